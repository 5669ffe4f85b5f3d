"""Kernels compile for a GPU, and fit. The interpreter does not tell: it knows no types of variables."""

import os

import pytest
import warm

pytest.importorskip("triton")
PRELUDE = """
import itertools, sys
from importlib import import_module

import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def build(kernel, signature, constants, warps, attrs=None, arch=90, **options):
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, **options})
"""
CODE = """
scores = import_module("unsloth_pack.kernels.token_scores")
loss = import_module("unsloth_pack.kernels.head")
POINTERS = ("log_probs", "entropies", "tops", "means", "squares", "losses", "g_log_probs", "g_entropies")
TYPES = {"logits": "*bf16", "labels": "*i64", "scale": "fp32", "softcap": "fp32", "V": "i32"}
TYPES |= dict.fromkeys(POINTERS, "*fp32")
for kernel in (scores.score_kernel, scores.score_gradient_kernel, loss._cross_entropy_kernel):
    flags = [name for name in kernel.arg_names if name.isupper() and name not in ("V", "BLOCK")]
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    for values in itertools.product([False, True], repeat=len(flags)):
        if len(flags) > 3 and len(set(values[1:-1])) > 1:
            continue  # every score or none: each is a branch of its own
        constants = dict(zip(flags, values)) | {"BLOCK": 1024}
        build(kernel, signature, constants, 8)
        print("compiled", kernel.__name__, constants)
"""


def compiled(code, tmp_path, *arguments):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}  # what was compiled before proves nothing
    done = warm.code(PRELUDE + code, *arguments, environment=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_kernels_of_the_head_compile_for_hopper(tmp_path):
    assert compiled(CODE, tmp_path).count("compiled") == 8 + 8 + 4


ATTENTION = """
host = kernels = import_module("unsloth_pack.kernels.attention")
HOPPER = sys.argv[1] == "Hopper"
NO_POINTERS = dict.fromkeys(("n_segments", "window"), "i32") | dict.fromkeys(("scale", "softcap"), "fp32")
NO_POINTERS["part_elements"] = "i64"
EXACT = {"shift": "*fp32", "norm": "*fp32", "delta": "*fp32", "cu_seqlens": "*i32"}


def compile(kernel, tile, size, head_dim, memory, flags, none=()):
    element = {2: "*bf16", 4: "*fp32"}[size]
    signature = {}
    for name in kernel.arg_names:
        of_stride = "i32" if name.endswith(("_sn", "_sh")) else element
        signature[name] = (NO_POINTERS | EXACT).get(name, "constexpr" if name.isupper() else of_stride)
    capped, windowed, group, members, *sinks = flags
    if "sinks" in kernel.arg_names and not sinks:
        none = (*none, "sinks")
    if size == 2:
        none = (*none, "norm")
    constants = dict(K=2, G=group, D=head_dim, CAPPED=capped, WINDOWED=windowed, BLOCK_D=head_dim)
    constants |= dict(BLOCK_Q=tile.queries, BLOCK_J=tile.keys) | dict.fromkeys(none)
    if "MEMBERS" in kernel.arg_names:
        constants["MEMBERS"] = members
    signature |= dict.fromkeys(none, "constexpr")
    arch, stages = 90 if HOPPER else 89, dict(num_stages=tile.stages)
    needed = build(kernel, signature, constants, tile.warps, arch=arch, **stages).metadata.shared
    assert needed <= memory * 1024, (kernel.__name__, size, head_dim, memory, needed)
    print("compiled", kernel.__name__, size, head_dim, memory, flags, none)


for (size, head_dim), by_memory in host.TILES.items():
    if HOPPER and size == 4:
        continue  # the same tiles as for less shared memory
    memory, tiles = [*by_memory.items()][0 if HOPPER else -1]
    if sys.argv[2:] and head_dim != int(sys.argv[2]):
        continue
    flags = (True, True, 2, 2) if head_dim != 64 else (False, True, 8, 8, "sinks")
    compile(kernels.forward_kernel, tiles.forward, size, head_dim, memory, flags)
    compile(kernels.q_gradient_kernel, tiles.q_gradient, size, head_dim, memory, flags)
    launches = [(tiles.kv_gradient, ())]
    if tiles.v_gradient is not None:
        launches = [(tiles.kv_gradient, ("gv",)), (tiles.v_gradient, ("gk",))]
    for tile, none in launches:
        compile(kernels.kv_gradient_kernel, tile, size, head_dim, memory, flags, none)
"""


@pytest.mark.parametrize(
    ("arguments", "n"),
    [
        (("Hopper", "64"), 3),
        pytest.param(("Hopper",), 3 + 3 + 4, marks=pytest.mark.nightly),
        pytest.param(("Ada",), 3 * 6, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_the_kernels_of_attention_compile_and_fit(arguments, n, tmp_path):
    assert compiled(ATTENTION, tmp_path, *arguments).count("compiled") == n


OF_WEIGHTS = """
kernel = import_module("unsloth_pack.kernels.quantized")._dequantize_nf4_kernel
for dtype, nested in itertools.product(["bf16", "fp16", "fp32"], [False, True]):
    signature = {"packed": "*u8", "code": "*fp32", "scales": "*u8" if nested else "*fp32"}
    of_scales = {} if nested else {"scale_code": None, "outer_scales": None, "offset": None}
    constants = {"GROUP": 256, "BLOCKS": 64, "PAIRS": 32} | of_scales
    signature |= dict.fromkeys(("scale_code", "outer_scales", "offset"), "*fp32")
    signature |= {"out": f"*{dtype}", "n": "i32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    build(kernel, signature, constants, 4)
    print("compiled", dtype, nested)
"""


def test_the_kernel_of_four_bits_compiles_for_hopper(tmp_path):
    assert compiled(OF_WEIGHTS, tmp_path).count("compiled") == 6


FP8 = """
fp8 = import_module("unsloth_pack.kernels.quantized")
GROUPS = {(4096,): 4, (14336,): 16, (4096, 1024, 1024): 4, (14336, 14336): 32}


def compile(kernel, signature, constants, warps):
    build(kernel, signature, constants, warps)
    print("compiled", kernel.__name__, signature)


for widths, warps in GROUPS.items():
    several, blocks = len(widths), tuple(map(triton.next_power_of_2, widths))
    ints = ("i32",) * several
    for is_scaled in (False, True):
        signature = dict(parts=("*bf16",) * several, strides=ints, widths=ints)
        signature["column_scales"] = ("*fp32" if is_scaled else "constexpr",) * several
        signature |= dict(values="*fp8e4nv", scale="*fp32", C="i32", BLOCKS="constexpr")
        place = fp8._quantize_kernel.arg_names.index("column_scales")
        none = {} if is_scaled else {(place, i): None for i in range(several)}
        compile(fp8._quantize_kernel, signature, none | {"BLOCKS": blocks}, warps)
    signature = dict(parts=("*u8",) * several, heights=ints, out="*u8", R="i32", C="i32", TILE="constexpr")
    compile(fp8._transpose_kernel, signature, {"TILE": fp8._TILE}, 4)
"""


def test_the_kernels_of_fp8_compile_for_hopper(tmp_path):
    assert compiled(FP8, tmp_path).count("compiled") == 4 * 3


GATED = """
host = import_module("unsloth_pack.kernels.gated_lora")
OF_PARTS = {  # the arguments that say how a part lies
    "g": ("left_sr", "right_sf", "right_sr", "RANK"),
    "gate": ("gl_sr", "gr_sf", "gr_sr", "GATE_RANK"),
    "up": ("ul_sr", "ur_sf", "ur_sr", "UP_RANK"),
}


def cases(like, rank):
    # The forward kernel; the backward kernel with all parts, without that of g, with it alone, and with none
    left, right = torch.empty(1, 2 * rank)[:, :rank], torch.empty(14336, rank)
    inner = host._part(host.LowRank(left, right), like)
    down = host._part(host.LowRank(right, torch.empty(rank, 14336).t()), like)
    none = host._part(None, like)
    yield host._gated_lora_kernel, {"gate": inner, "up": inner}
    for parts in ([down, inner, inner], [none, inner, inner], [down, none, none], [none, none, none]):
        yield host._gated_lora_backward_kernel, dict(zip(OF_PARTS, parts))


for dtype, rank in itertools.product([torch.bfloat16, torch.float32], map(int, sys.argv[1:])):
    like = torch.empty(2**14, 2**13, dtype=dtype, device="meta")
    pointer = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    for kernel, parts in cases(like, rank):
        blocks = host._Blocks.choose(like, len(parts), list(parts.values()))
        may_sum = pointer == "*bf16" and len(parts) == 3
        sums = may_sum and 0 < max(part.rank for part in parts.values()) <= host._MAX_SUMMED_RANK
        blocks = blocks.with_fewer_sums(like) if sums else blocks
        constants = {name.upper(): value for name, value in blocks._asdict().items()}
        for name, part in parts.items():
            layout = part.left_row, part.right_row, part.right_column, part.rank
            constants |= dict(zip(OF_PARTS[name], layout))
        constants |= {"STORE": rank > 32, "ACTIVATION": "silu"} | ({} if sums else {"sums": None})
        names = kernel.arg_names
        of_strides = {name: "i32" for name in names if name in "NF" or "_s" in name}
        signature = {name: pointer for name in names} | of_strides | {"sums": "*fp32"}
        signature = {name: signature[name] for name in names}
        signature |= {name: "fp32" for name in names if name.endswith("_scale")}
        signature |= {name: "constexpr" for name in names if name in constants}
        divisible = [i for i, name in enumerate(names) if signature[name] in (pointer, "i32")]
        divisible = {(i,): [["tt.divisibility", 16]] for i in divisible if names[i] != "N"}
        own = {name: constants[name] for name in names if name in constants}
        made = build(kernel, signature, own, 4, attrs=divisible)
        assert made.metadata.shared <= 99 * 1024, (kernel.__name__, dtype, rank, made.metadata.shared)
        print("compiled", kernel.__name__, dtype, rank, sums, made.metadata.shared)
"""


@pytest.mark.parametrize("ranks", [(32, 128), pytest.param((8, 16, 64), marks=pytest.mark.nightly)])
def test_the_kernels_of_gated_layers_fit_into_the_least_shared_memory(ranks, tmp_path):
    printed = compiled(GATED, tmp_path, *ranks)
    assert printed.count("compiled") == 2 * 5 * len(ranks)
    of_sums = [rank for rank in ranks if rank <= 32]  # the backward kernel sums products there, in 16 bits
    assert printed.count("True") == 3 * len(of_sums)


EXPERTS = """
host = import_module("unsloth_pack.kernels.moe")
INTS = dict.fromkeys(("weight_stride", "F", "C"), "i32")
FLOATS = ("low_rank_scale", "g_scale", "alpha", "limit", "offset", "scale", "more_scale")
EXACT = {"expert": "*i16", "weight": "*fp32", "g_weight": "*fp32", "places": "*i64"}
PARTS = ("low_rank", "bias", "expert", "of_g_out", "more")
for dtype, with_parts, gate in itertools.product(["*bf16", "*fp32"], [0, 1], ["silu", "gelu_tanh"]):
    for kernel in (host._routed_gate_kernel, host._routed_gate_backward_kernel, host._sum_of_rows_kernel):
        names = kernel.arg_names
        constants = {"KEEP": True, "ACTIVATION": gate, "INTERLEAVED": gate == "silu", "BLOCK": 1024, "K": 8}
        constants |= {} if with_parts else dict.fromkeys(PARTS)
        own = {name: value for name, value in constants.items() if name in names}
        types = INTS | dict.fromkeys(FLOATS, "fp32") | EXACT | dict.fromkeys(own, "constexpr")
        signature = {name: types.get(name, dtype) for name in names}
        wide = [i for i, name in enumerate(names) if signature[name] == dtype or name in "FC"]
        attrs = {(i,): [["tt.divisibility", 16]] for i in wide}
        build(kernel, signature, own, host._WARPS, attrs=attrs)
        print("compiled", kernel.__name__, dtype, with_parts, gate)
"""


def test_the_kernels_of_experts_compile_for_hopper(tmp_path):
    assert compiled(EXPERTS, tmp_path).count("compiled") == 2 * 2 * 2 * 3


NORM = """
norm = import_module("unsloth_pack.kernels.norm")
NUMBERS = {"eps": "fp32", "offset": "fp32", "R": "i32", "steps": "i32"}


def compile(kernel, C, none):
    BLOCK_R, BLOCK_C, warps = norm._choose_blocks(C, 2)
    constants = {"C": C, "BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C} | dict.fromkeys(none)
    types = NUMBERS | {name: "i32" for name in kernel.arg_names if name.endswith("_sr")}
    types |= {"partial": "*fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "*bf16") for name in kernel.arg_names}
    build(kernel, signature, constants, warps)
    print("compiled", kernel.__name__, C, none)


for C in (896, 4096):
    compile(norm._norm_kernel, C, ())
    compile(norm._norm_kernel, C, ("added", "total"))
    for none in ((), ("other",), ("partial",), ("other", "partial")):
        compile(norm._norm_backward_kernel, C, none)
"""


def test_the_kernels_of_norms_compile_for_hopper(tmp_path):
    assert compiled(NORM, tmp_path).count("compiled") == 12

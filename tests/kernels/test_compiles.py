"""Kernels compile for a GPU, and fit. The interpreter does not tell: it knows no types of variables."""

import os

import pytest
import warm

pytest.importorskip("triton")
PRELUDE = """
import sys
from types import SimpleNamespace

import torch, triton
from torch import randn
from triton.backends.compiler import GPUTarget
from unsloth_pack import kernels
from unsloth_pack.kernels import launch

target = GPUTarget("cuda", 90, 32)
# Each target has a device of its own: Triton asks for the target of a device once
driver = dict(get_current_device=lambda: target.arch, get_current_target=lambda: target)
driver["get_current_stream"] = lambda _: 0
triton.runtime.driver.set_active(SimpleNamespace(**driver))

def run(self, *args, grid, warmup, **options):  # as it is launched, but for the launch
    compiled = triton.JITFunction.run(self, *args, grid=grid, warmup=True, **options)
    print(self.__name__, compiled.metadata.shared)

modules = [module for name, module in sys.modules.items() if name.startswith("unsloth_pack.kernels.")]
launch.Kernel.run = run
for module in modules:
    module.takes_fused_path = lambda *_: True

def leaf(*shape, dtype=torch.bfloat16):
    return randn(shape).to(dtype).requires_grad_()

attention = sys.modules["unsloth_pack.kernels.attention"]  # whose name the function has taken
"""
ALL = """
x, w, wide = leaf(64, 256), leaf(256), leaf(64, 512)
kernels.rms_norm(x, w.detach(), 1e-6).sum().backward()
sum(y.sum() for y in kernels.add_rms_norm(x, x, w, 1e-6)).backward()
for activation in ("silu", "gelu_tanh"):
    kernels.gated(*wide.chunk(2, -1), activation).sum().backward()
kernels.relu2(x).sum().backward()
kernels.xielu(x, *map(torch.tensor, ([0.2], [-1.0], 0.5, -1e-6))).sum().backward()
kernels.dropout(x, torch.tensor([1]), 0.1, 3, x.detach())

q, k, angles, positions = leaf(64, 4, 128), leaf(64, 2, 128), randn(64, 64), torch.arange(64)
norm = kernels.QKNorm(leaf(128), leaf(128), 1e-6)
for options in ({}, {"qk_norm": norm, "interleaved": True}):
    sum(y.sum() for y in kernels.rope_qk(q, k, angles, angles, positions, **options)).backward()
options = {"softcap": 2.0, "window": 7, "sinks": leaf(4)}
branches = {"parents": torch.tensor([-1, 0]).int()}
for more in (options, branches, options | branches):
    kernels.varlen_attention(q, k, k, torch.tensor([0, 9, 64]).int(), 0.1, **more).sum().backward()

hidden, weight, labels = leaf(64, 32), leaf(1024, 32), torch.arange(64)
kernels.linear_cross_entropy(hidden, weight, labels, softcap=2.0).backward()
kernels.token_scores(hidden.detach(), weight, labels)
fields = ["entropy", "is_top1", "mean_logit", "log_sum_sq_probs"]
kernels.token_scores(hidden, weight, labels, softcap=2.0, fields=fields).entropy.sum().backward()
teacher = kernels.TeacherHead(hidden, weight, softcap=3.0)
for divergence in ("forward_kl", "reverse_kl", "jsd"):
    options = dict(divergence=divergence, temperature=2.0, ce_weight=1.0)
    kernels.linear_distillation(hidden, weight, labels, teacher, **options).loss.backward()

base, part = randn(64, 512).bfloat16(), kernels.Scaled(randn(64, 512).bfloat16(), 0.5)
inner = kernels.InnerSum(base, part, base[:4], torch.zeros(64).short())
for gate in (kernels.Gate("silu", 1.7, 7.0, 1.0, True), kernels.Gate("gelu_tanh")):
    kernels.routed_gate_(inner, randn(64), gate, True)
    of_g = kernels.Scaled(part.values[:, :256].contiguous(), 0.5)
    kernels.routed_gate_backward_(randn(64, 256).bfloat16(), of_g, inner, randn(64), gate, base)
kernels.sum_of_rows([part, part], torch.arange(64).view(8, 8))

rows = kernels.quantize_rows(base, base[:, :80], column_scales=[randn(512, 1), randn(80, 1)])
kernels.quantize_rows(base)
kernels.fp8_transposed([rows, rows])
rows.dequantized(torch.bfloat16)
packed, code = torch.zeros(2048).byte(), randn(16)
nested = kernels.NestedScales(torch.zeros(64).byte(), randn(256), randn(1), randn(()), 256)
for scales, lower_first in ((randn(64), False), (nested, False), (nested, True)):
    kernels.dequantize_4bit(packed, code, scales, 64, torch.bfloat16, lower_first)
"""
GATED_LORA = """
for dtype, rank in ((torch.bfloat16, 32), (torch.float32, 128)):
    gate, up, g = (randn(2048, 4096).to(dtype) for _ in range(3))
    part = kernels.LowRank(randn(2048, rank).to(dtype), randn(4096, rank).to(dtype))
    kernels.gated_lora_(kernels.LoraOutput(gate, part), kernels.LoraOutput(up, part), "silu", rank > 32)
    for parts in ([part] * 3, [part, None, None]):
        outputs = map(kernels.LoraOutput, (g, gate, up), parts)
        kernels.gated_lora_backward_(*outputs, "silu", gate, up)
"""
EVERY_ONE = """
functions = [value for module in modules for value in vars(module).values()]
names = {value.__name__ for value in functions if isinstance(value, launch.Kernel)}
print("all:", *(name for name in names if name.endswith("_kernel")))
"""
ATTENTION = """
for (size, head_dim), by_memory in attention.TILES.items():
    for memory, tiles in by_memory.items():
        attention._tiles = lambda q: tiles
        target = GPUTarget("cuda", 90 if memory > 99 else 89, 32)
        dtype = {2: torch.bfloat16, 4: torch.float32}[size]
        q, k = leaf(64, 4, head_dim, dtype=dtype), leaf(64, 2, head_dim, dtype=dtype)
        for parents in (None, torch.tensor([-1, 0]).int()):
            options = {"softcap": 2.0, "window": 7, "parents": parents}
            cu_seqlens = torch.tensor([0, 30, 64]).int()
            kernels.varlen_attention(q, k, k, cu_seqlens, 0.1, **options).sum().backward()
        print("room", memory * 1024)
"""


def compiled(code, tmp_path):
    """The names of compiled kernels and their bytes of shared memory, in order."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}  # what was compiled before proves nothing
    done = warm.code(PRELUDE + code, environment=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_hopper(tmp_path):
    *lines, (_, *names) = compiled(ALL + GATED_LORA + EVERY_ONE, tmp_path)
    assert {name for name, _ in lines} == {*names}
    assert len(names) > 20
    assert all(int(shared) <= 99 * 1024 for name, shared in lines if "gated_lora" in name)  # fits an Ada GPU


@pytest.mark.nightly
def test_tiles_of_attention_fit(tmp_path):
    needed = []
    for name, n_bytes in compiled(ATTENTION, tmp_path):
        needed.append(int(n_bytes))
        if name == "room":
            assert max(needed) <= needed.pop()
            needed = []
    assert needed == []

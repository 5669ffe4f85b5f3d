"""The speed of every kernel, compared with the limits of the device and with torch.

    python benchmarks/kernel_times.py [--shape qwen0.5b,llama8b] [--compiled] [--json PATH]
    python benchmarks/kernel_times.py --shape llama8b --only distil,cross_entropy

The table has one row for each kernel and direction, in bfloat16, on the inputs that a layer of the shape has
for a packed row. Times are of calls replayed from a CUDA graph, which rotate through so many inputs that the
L2 cache holds none of them when its turn comes. A backward's time is that of both passes less the forward's.

Kernels that move data are judged by bytes a second (every input read once, every output written once),
against a large device-to-device copy. Kernels that multiply are judged by FLOP a second, against a GEMM of
8,192 cubed in bfloat16 or e4m3. Both limits are measured in the same run. `torch` is the code that runs
without the kernel: plain torch as transformers writes it, PEFT for the LoRA layers, a GEMM in bfloat16 for
those in fp8. `compiled` is the same after torch.compile.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from clocks import MAX_SETS, WORKING_SET, copy_bandwidth, eager_ms, graph_ms, timed
from shapes import SHAPES, Shape, device_name, versions
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

EPS = 1e-6
RANK = 16
DEVICE = "cuda"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
CUBE = 8192

Tensors = tuple[Tensor, ...]
Run = Callable[..., Any]


@dataclass(frozen=True)
class Subject:
    """A kernel on one kind of input.

    Args:
        inputs: makes the inputs and, where there is a backward to measure, the gradients of the outputs.
        work: bytes moved or FLOP done by the forward and by the backward; None without a backward.
        ceiling: "copy", "bf16" or "fp8".
        ours, plain: take the inputs.
        captured: whether both can be replayed from a CUDA graph; else Python's time counts.
    """

    name: str
    ceiling: str
    work: tuple[float, float | None]
    inputs: Callable[[], tuple[Tensors, Tensors]]
    ours: Run
    plain: Run
    captured: bool = True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen0.5b,llama8b", help="one or several (default: both)")
    parser.add_argument("--only", default="", help="rows whose names hold one of these words (default: all)")
    parser.add_argument("--compiled", action="store_true", help="also time torch.compile of plain torch")
    parser.add_argument("--json", type=Path, help="also write every number here")
    args = parser.parse_args()
    names = args.shape.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"--shape: {unknown[0]!r} is none of {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        print("benchmarks/kernel_times.py measures a CUDA device and this machine has none", file=sys.stderr)
        return 2

    ceilings = {"copy": copy_bandwidth(), "bf16": bf16_tflops()}
    if torch.cuda.get_device_capability() >= (8, 9):
        ceilings["fp8"] = fp8_tflops()
    report: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "gpu": device_name()}
    report |= {"versions": versions(), "ceilings": ceilings, "rows": []}
    measured = ", ".join(f"{name} {value:,.0f} {unit_of(name)}" for name, value in ceilings.items())
    print(f"{report['gpu']}, torch {torch.__version__}: {measured}")
    for name in names:
        shape = SHAPES[name]
        print(f"\n{name}, {shape.tokens:,} tokens")
        head = (
            f"{'kernel':<20}{'':<10}{'ms':>9}{'torch ms':>10}{'compiled':>10}{'speedup':>9}{'achieved':>16}"
            f"{'of ceiling':>11}{'peak MiB':>16}"
        )
        print(head)
        for subject in subjects(shape):
            if not any(word in subject.name for word in args.only.split(",")):
                continue
            for row in measure(subject, ceilings[subject.ceiling], args.compiled):
                print_row(row)
                report["rows"].append({"shape": name, "tokens": shape.tokens} | row)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def print_row(row: dict[str, Any]) -> None:
    achieved = f"{row['achieved']:,.0f} {row['unit']}"
    compiled = f"{row['compiled_ms']:.4f}" if row["compiled_ms"] is not None else row["not_compiled"] or "-"
    print(
        f"{row['kernel']:<20}{row['direction']:<10}{row['ms']:>9.4f}{row['torch_ms']:>10.4f}{compiled:>10}"
        f"{row['speedup']:>8.1f}x{achieved:>16}{row['percent_of_ceiling']:>10.0f}%"
        f"{row['peak_mib']:>8.0f}{row['torch_peak_mib']:>8.0f}"
    )


def measure(subject: Subject, ceiling: float, with_compiled: bool) -> Iterator[dict[str, Any]]:
    """The rows of a kernel: forward, and backward if it has one."""
    ours, plain = (direction_ms(subject, path) for path in (subject.ours, subject.plain))
    peaks = [peak_mib(subject, path) for path in (subject.ours, subject.plain)]
    compiled, not_compiled = compiled_ms(subject) if with_compiled else ({}, "")
    for direction, work in zip(("forward", "backward"), subject.work, strict=True):
        if work is None:
            continue
        ms = ours[direction]
        achieved = work / ms / (1e6 if subject.ceiling == "copy" else 1e9)
        yield {
            "kernel": subject.name,
            "direction": direction if subject.work[1] is not None else "",
            "ms": ms,
            "torch_ms": plain[direction],
            "compiled_ms": compiled.get(direction),
            "not_compiled": not_compiled,
            "speedup": plain[direction] / ms,
            "achieved": achieved,
            "unit": unit_of(subject.ceiling),
            "percent_of_ceiling": 100 * achieved / ceiling,
            "peak_mib": peaks[0],
            "torch_peak_mib": peaks[1],
        }


def compiled_ms(subject: Subject) -> tuple[dict[str, float], str]:
    """The times of plain torch compiled, or the name of the error where it cannot be compiled or captured."""
    try:
        torch.compiler.reset()
        return direction_ms(subject, torch.compile(subject.plain, dynamic=False)), ""
    except Exception as error:
        return {}, type(error).__name__


def direction_ms(subject: Subject, path: Run) -> dict[str, float]:
    first = subject.inputs()
    size = sum(x.numel() * x.element_size() for group in first for x in group)
    n_sets = min(MAX_SETS, max(4, -(-WORKING_SET // (2 * size))))
    sets = [first, *(subject.inputs() for _ in range(n_sets - 1))]
    clock = graph_ms if subject.captured else eager_ms
    ms = {"forward": clock([partial(path, *inputs) for inputs, _ in sets])}
    if subject.work[1] is not None:
        both = clock([partial(forward_backward, path, *each) for each in sets])
        ms["backward"] = both - ms["forward"]
    return ms


def peak_mib(subject: Subject, path: Run) -> float:
    """Memory of both passes beside the inputs and the gradients of the outputs, in MiB."""
    inputs, gradients = subject.inputs()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = forward_backward(path, inputs, gradients) if subject.work[1] is not None else path(*inputs)
    peak = torch.cuda.max_memory_allocated()
    del found
    return (peak - before) / 2**20


def forward_backward(path: Run, inputs: Tensors, gradients: Tensors) -> list[Tensor]:
    found = path(*inputs)
    outputs = [found] if isinstance(found, Tensor) else [*found]
    leaves = [x for x in inputs if x.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]


def unit_of(ceiling: str) -> str:
    return "GB/s" if ceiling == "copy" else "TFLOP/s"


# The kernels


def subjects(shape: Shape) -> Iterator[Subject]:
    yield from rotary(shape)
    yield from elementwise(shape)
    yield from gated_loras(shape)
    yield from experts(shape)
    yield from fp8(shape)
    yield from four_bits(shape)
    yield from lora(shape)
    yield loss(shape)
    yield scores(shape)
    yield from distillation(shape)


def rotary(shape: Shape) -> Iterator[Subject]:
    from unsloth_pack.kernels import QKNorm, reference, rope_qk

    T, layout = shape.tokens, (shape.heads, shape.kv_heads, shape.head_dim)
    positions = packed_positions(T)
    cos, sin = tables(T, shape.head_dim)
    rows = [x[positions][None, None].bfloat16() for x in (cos, sin)]
    weights = [1 + 0.1 * randn(shape.head_dim, grad=False) for _ in range(2)]
    norm = QKNorm(*weights, EPS)

    def inputs() -> tuple[Tensors, Tensors]:
        q, k, *gradients = random_inputs(layout, T, True)
        return (q, k), tuple(gradients)

    def plain_with_norm(q: Tensor, k: Tensor) -> Tensors:
        q, k = (reference.rms_norm(x, w, EPS) for x, w in zip((q, k), weights, strict=True))
        return plain_rope(q, k, *rows)

    qk = 2.0 * T * (shape.heads + shape.kv_heads) * shape.head_dim
    looked_up = 8 * T + (int(positions.max()) + 1) * shape.head_dim * cos.element_size()
    yield Subject(
        name="rope_qk",
        ceiling="copy",
        work=(2 * qk + looked_up, 2 * qk + looked_up),
        inputs=inputs,
        ours=lambda q, k: rope_qk(q, k, cos, sin, positions),
        plain=lambda q, k: plain_rope(q, k, *rows),
    )
    yield Subject(
        name="rope_qk, QK norm",
        ceiling="copy",
        work=(2 * qk + looked_up, 3 * qk + looked_up),
        inputs=inputs,
        ours=lambda q, k: rope_qk(q, k, cos, sin, positions, qk_norm=norm),
        plain=plain_with_norm,
    )


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensors:
    def rotate_half(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def random_inputs(layout: tuple[int, int, int], tokens: int, backward: bool) -> Tensors:
    """q, k and their gradients: `[1, H, T, D]` over memory of `[1, T, H, D]`, as projections leave them."""
    HQ, HK, D = layout

    def randn(H: int) -> Tensor:
        return torch.randn(1, tokens, H, D, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    q, k = randn(HQ).requires_grad_(backward), randn(HK).requires_grad_(backward)
    return q, k, randn(HQ), randn(HK)


def packed_positions(tokens: int) -> Tensor:
    """Documents of 16 to 1000 tokens, the last one cut at the row's end."""
    generator = torch.Generator().manual_seed(0)
    positions: list[int] = []
    while len(positions) < tokens:
        positions += range(int(torch.randint(16, 1001, (), generator=generator)))
    return torch.tensor(positions[:tokens], device="cuda")


def tables(n_positions: int, D: int) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** -(torch.arange(0, D, 2, device="cuda", dtype=torch.float64) / D)
    angle = torch.arange(n_positions, device="cuda")[:, None] * frequency.repeat(2)
    return angle.cos().float(), angle.sin().float()


def elementwise(shape: Shape) -> Iterator[Subject]:
    from unsloth_pack.kernels import dropout, gated, reference, rms_norm

    T = shape.tokens
    hidden, inner = 2.0 * T * shape.hidden, 2.0 * T * shape.intermediate
    weight = 1 + 0.1 * randn(shape.hidden, grad=False)
    yield Subject(
        name="rms_norm",
        ceiling="copy",
        work=(2 * hidden, 3 * hidden),
        inputs=lambda: ((randn(T, shape.hidden),), (randn(T, shape.hidden, grad=False),)),
        ours=lambda x: rms_norm(x, weight, EPS),
        plain=lambda x: reference.rms_norm(x, weight, EPS),
    )
    yield Subject(
        name="gated",
        ceiling="copy",
        work=(3 * inner, 5 * inner),
        inputs=lambda: (
            (randn(T, shape.intermediate), randn(T, shape.intermediate)),
            (randn(T, shape.intermediate, grad=False),),
        ),
        ours=lambda gate, up: gated(gate, up, "silu"),
        plain=lambda gate, up: F.silu(gate) * up,
    )
    seed = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    yield Subject(
        name="dropout",
        ceiling="copy",
        work=(2 * hidden, None),
        inputs=lambda: ((randn(T, shape.hidden, grad=False),), ()),
        ours=lambda x: dropout(x, seed, 0.1),
        plain=lambda x: F.dropout(x, 0.1),
    )


def gated_loras(shape: Shape) -> Iterator[Subject]:
    """The activation in an MLP of LoRA layers, as its node calls it for each rank."""
    from unsloth_pack.kernels import LoraOutput, LowRank, gated_lora_, gated_lora_backward_, reference
    from unsloth_pack.kernels.gated_lora import should_store

    T, width = shape.tokens, shape.intermediate
    values = 2.0 * T * width
    for rank in (8, 16, 64, 128):
        store = should_store(rank)
        part = LowRank(randn(T, 2 * rank, grad=False)[:, :rank], randn(width, rank, grad=False))
        of_down = LowRank(randn(T, rank, grad=False), randn(rank, width, grad=False).t())
        yield Subject(
            name=f"gated_lora_, rank {rank}",
            ceiling="copy",
            work=((5 if store else 3) * values, None),
            inputs=lambda: (tuple(randn(T, width, grad=False) for _ in range(2)), ()),
            ours=lambda x, u, part=part, store=store: gated_lora_(
                LoraOutput(x, part), LoraOutput(u, part), "silu", store
            ),
            plain=lambda x, u, part=part: reference.gated_lora_(
                LoraOutput(x, part), LoraOutput(u, part), "silu", False
            ),
        )
        added = (of_down, None, None) if store else (of_down, part, part)
        yield Subject(
            name=f"gated_lora_backward_, rank {rank}",
            ceiling="copy",
            work=(6 * values, None),
            inputs=lambda: (tuple(randn(T, width, grad=False) for _ in range(3)), ()),
            ours=partial(_gated_backward, gated_lora_backward_, added),
            plain=partial(_gated_backward, reference.gated_lora_backward_, added),
        )


def _gated_backward(run: Run, added: Sequence[Any], g: Tensor, gate: Tensor, up: Tensor) -> Any:
    from unsloth_pack.kernels import LoraOutput

    return run(*map(LoraOutput, (g, gate, up), added), "silu", gate, up)


def experts(shape: Shape) -> Iterator[Subject]:
    """What is between the GEMMs of experts like those of Qwen3-30B-A3B: 8 of 768 features for a token."""
    from unsloth_pack.kernels import (
        Gate,
        InnerSum,
        Scaled,
        reference,
        routed_gate_,
        routed_gate_backward_,
        sum_of_rows,
    )

    k, features, tokens = 8, 768, shape.tokens
    rows, gate = k * tokens, Gate("silu")
    inner, wide = 2.0 * rows * features, 2.0 * rows * shape.hidden
    weight = torch.rand(rows, device=DEVICE)
    places = torch.randperm(rows, device=DEVICE).view(tokens, k)
    low_rank = Scaled(randn(rows, 2 * features, grad=False), 1.0)
    of_g = Scaled(randn(rows, features, grad=False), 1.0)
    yield Subject(
        name="routed_gate_",
        ceiling="copy",
        work=(7 * inner, None),
        inputs=lambda: ((randn(rows, 2 * features, grad=False),), ()),
        ours=lambda base: routed_gate_(InnerSum(base, low_rank), weight, gate, True),
        plain=lambda base: reference.routed_gate_(InnerSum(base, low_rank), weight, gate, True),
    )
    yield Subject(
        name="routed_gate_backward_",
        ceiling="copy",
        work=(7 * inner, None),
        inputs=lambda: ((randn(rows, features, grad=False), randn(rows, 2 * features, grad=False)), ()),
        ours=lambda g, base: routed_gate_backward_(g, of_g, InnerSum(base), weight, gate, base),
        plain=lambda g, base: reference.routed_gate_backward_(g, of_g, InnerSum(base), weight, gate, base),
    )
    more = Scaled(randn(rows, shape.hidden, grad=False), 1.0)
    yield Subject(
        name="sum_of_rows",
        ceiling="copy",
        work=(2 * wide + wide / k, None),
        inputs=lambda: ((randn(rows, shape.hidden, grad=False),), ()),
        ours=lambda y: sum_of_rows([Scaled(y, 1.0), more], places),
        plain=lambda y: reference.sum_of_rows([Scaled(y, 1.0), more], places),
    )


def fp8(shape: Shape) -> Iterator[Subject]:
    """The up projection, and the gradients of its input and of one of gate and up, where the GPU has e4m3."""
    from unsloth_pack.kernels import (
        Fp8Rows,
        fp8_linear,
        fp8_linear_backward,
        fp8_transposed,
        quantize_rows,
        reference,
    )

    if torch.cuda.get_device_capability() < (8, 9):
        return
    T, hidden, inner = shape.tokens, shape.hidden, shape.intermediate
    weight = randn(inner, hidden, grad=False)
    weight_rows = quantize_rows(weight)
    flop = 2.0 * T * hidden * inner

    def with_rows() -> tuple[Tensors, Tensors]:
        x = randn(T, hidden, grad=False)
        return (x, *quantize_rows(x)), ()

    yield Subject(
        name="quantize_rows",
        ceiling="copy",
        work=(T * (3.0 * hidden + 4), None),
        inputs=lambda: ((randn(T, hidden, grad=False),), ()),
        ours=quantize_rows,
        plain=reference.quantize_rows,
    )
    yield Subject(
        name="fp8_linear",
        ceiling="fp8",
        work=(flop, None),
        inputs=with_rows,
        ours=lambda x, values, scale: fp8_linear(Fp8Rows(values, scale), weight_rows, x.new_empty(T, inner)),
        plain=lambda x, values, scale: x @ weight.t(),
    )
    yield Subject(
        name="fp8_transposed",
        ceiling="copy",
        work=(2.0 * weight.numel(), None),
        inputs=lambda: (tuple(quantize_rows(weight)), ()),
        ours=lambda values, scale: fp8_transposed([Fp8Rows(values, scale)]).values,
        plain=lambda values, scale: values.t().contiguous(),
    )

    def backward(*gs: Tensor) -> Tensor:
        weights = fp8_transposed([weight_rows] * len(gs))
        return fp8_linear_backward(gs, weights, gs[0].new_empty(T, hidden))

    for number, name in ((1, "fp8_linear_backward"), (2, "the same, gate + up")):
        yield Subject(
            name=name,
            ceiling="fp8",
            work=(number * flop, None),
            inputs=lambda number=number: (tuple(randn(T, inner, grad=False) for _ in range(number)), ()),
            ours=backward,
            plain=lambda g, *more: sum((other @ weight for other in more), g @ weight),
        )


def four_bits(shape: Shape) -> Iterator[Subject]:
    """The up projection's weight out of NF4 with nested scales; `torch` is bitsandbytes."""
    if find_spec("bitsandbytes") is None:
        return
    from bitsandbytes import functional

    from unsloth_pack.lora.quantised import Nf4Weight

    states: dict[int, Any] = {}

    def quantised() -> tuple[Tensors, Tensors]:
        weight = randn(shape.intermediate, shape.hidden, grad=False)
        packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        states[packed.data_ptr()] = state
        return (packed,), ()

    yield Subject(
        name="dequantize_4bit",
        ceiling="copy",
        work=(shape.intermediate * shape.hidden * (2 + 0.5 + 1 / 64), None),
        inputs=quantised,
        ours=lambda packed: Nf4Weight(packed, states[packed.data_ptr()]).dequantized(torch.bfloat16),
        plain=lambda packed: functional.dequantize_4bit(packed, states[packed.data_ptr()]),
    )


def lora(shape: Shape) -> Iterator[Subject]:
    """The projections of a decoder layer as the nodes that models run, against PEFT's layers.

    Gate and up are kept for the backward pass. Where the packed row is so long that some layers compute them
    again, that has a line of its own. Torch always keeps them.
    """
    layer, dropping = adapted_layer(shape), adapted_layer(shape, lora_dropout=0.1)
    sparing = adapted_layer(shape, number=0)
    yield over_one_input("LoRA q, k, v", shape, layer.self_attn, ATTENTION[:3])
    yield over_one_input("same, dropout", shape, dropping.self_attn, ATTENTION[:3])
    yield over_one_input("LoRA o", shape, layer.self_attn, ATTENTION[3:])
    yield whole_mlp("LoRA MLP", shape, layer.mlp)
    yield whole_mlp("same, dropout", shape, dropping.mlp)
    yield whole_mlp("same, computed again", shape, sparing.mlp)
    if find_spec("bitsandbytes") is not None:
        yield whole_mlp("same, NF4", shape, adapted_layer(shape, in_nf4=True).mlp)


def adapted_layer(shape: Shape, lora_dropout: float = 0.0, in_nf4: bool = False, number: int = 1) -> Any:
    """A patched decoder layer with an adapter on every projection.

    Args:
        number: the index that the layer has in its model.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from unsloth_pack import patch_model

    with torch.device(DEVICE):
        one_layer = shape.config(num_hidden_layers=1, vocab_size=256)
        model = AutoModelForCausalLM.from_config(one_layer, dtype=torch.bfloat16)
    if in_nf4:
        for name in MLP:
            setattr(model.model.layers[0].mlp, name, nf4(getattr(model.model.layers[0].mlp, name)))
        model.is_loaded_in_4bit = True
    adapter = LoraConfig(
        r=RANK, target_modules=[*ATTENTION, *MLP], lora_dropout=lora_dropout, task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapter, autocast_adapter_dtype=False).train()
    patch_model(model)
    layer = model.get_base_model().model.layers[0]
    layer.mlp.number = number
    return layer


def nf4(linear: torch.nn.Linear) -> torch.nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"quant_type": "nf4", "compress_statistics": True}
    size = linear.in_features, linear.out_features
    quantised = Linear4bit(*size, bias=False, compute_dtype=linear.weight.dtype, **options)
    quantised.weight = Params4bit(linear.weight.data.cpu(), requires_grad=False, **options)
    return quantised.to(DEVICE)


def over_one_input(name: str, shape: Shape, attention: Any, names: tuple[str, ...]) -> Subject:
    from unsloth_pack.lora.linear import project

    layers = [getattr(attention, name) for name in names]
    return Subject(
        name=name,
        ceiling="bf16",
        work=lora_work(shape, layers),
        inputs=partial(lora_inputs, shape, layers, [layer.out_features for layer in layers]),
        ours=lambda x, *_: project(x, layers),
        plain=lambda x, *_: [peft_forward(layer, x) for layer in layers],
    )


def whole_mlp(name: str, shape: Shape, mlp: Any) -> Subject:
    gate, up, down = layers = [getattr(mlp, name) for name in MLP]

    def plain(x: Tensor, *_: Tensor) -> Tensor:
        return peft_forward(down, F.silu(peft_forward(gate, x)) * peft_forward(up, x))

    return Subject(
        name=name,
        ceiling="bf16",
        work=lora_work(shape, layers),
        inputs=partial(lora_inputs, shape, layers, [down.out_features]),
        ours=lambda x, *_: mlp(x),
        plain=plain,
    )


def peft_forward(layer: Any, x: Tensor) -> Tensor:
    """The forward of PEFT's class, which the patch has subclassed."""
    return type(layer).__bases__[-1].forward(layer, x)


def lora_work(shape: Shape, layers: list[Any]) -> tuple[float, float]:
    """FLOP of forward and backward: one product per frozen weight in each; per factor one, then two."""
    frozen = sum(layer.in_features * layer.out_features for layer in layers)
    factors = sum(RANK * (layer.in_features + layer.out_features) for layer in layers)
    return 2.0 * shape.tokens * (frozen + factors), 2.0 * shape.tokens * (frozen + 2 * factors)


def lora_inputs(shape: Shape, layers: list[Any], widths: list[int]) -> tuple[Tensors, Tensors]:
    gradients = tuple(randn(1, shape.tokens, width, grad=False) for width in widths)
    factors = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    return (randn(1, shape.tokens, layers[0].in_features), *factors), gradients


def loss(shape: Shape) -> Subject:
    """Forward and backward together, because our forward makes the gradient too. The head is frozen."""
    from unsloth_pack.kernels import LabelledRows, linear_cross_entropy

    weight = randn(shape.vocab, shape.hidden, grad=False) / shape.hidden**0.5
    labels = torch.randint(0, shape.vocab, (shape.tokens,), device="cuda")
    found = LabelledRows(labels)
    assert found.count == shape.tokens  # read before the capture
    one = torch.ones((), device="cuda")

    def ours(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, found)

    def plain(hidden: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels)

    return Subject(
        name="linear_cross_entropy",
        ceiling="bf16",
        work=(4.0 * shape.tokens * shape.hidden * shape.vocab, None),
        inputs=lambda: ((randn(shape.tokens, shape.hidden),), ()),
        ours=lambda hidden: forward_backward(ours, (hidden,), (one,)),
        plain=lambda hidden: forward_backward(plain, (hidden,), (one,)),
    )


def scores(shape: Shape) -> Subject:
    """What TRL's trainers ask for: log-probability, entropy and top-1 of every label, weighed one by one."""
    from unsloth_pack.kernels import LabelledRows, token_scores

    weight = randn(shape.vocab, shape.hidden, grad=False) / shape.hidden**0.5
    labels = torch.randint(0, shape.vocab, (shape.tokens,), device="cuda")
    found = LabelledRows(labels)
    assert found.count == shape.tokens  # read before the capture
    upstream = torch.randn(shape.tokens, device="cuda")

    def ours(hidden: Tensor) -> Tensor:
        return token_scores(hidden, weight, found, fields=("entropy", "is_top1")).log_prob

    def plain(hidden: Tensor) -> Tensor:
        log_p = F.linear(hidden, weight).float().log_softmax(-1)
        log_p.detach().exp().mul(log_p.detach()).sum(-1).neg_()
        log_p.detach().argmax(-1).eq(labels)
        return log_p.gather(1, labels[:, None])[:, 0]

    return Subject(
        name="token_scores",
        ceiling="bf16",
        work=(4.0 * shape.tokens * shape.hidden * shape.vocab, None),
        inputs=lambda: ((randn(shape.tokens, shape.hidden),), ()),
        ours=lambda hidden: forward_backward(ours, (hidden,), (upstream,)),
        plain=lambda hidden: forward_backward(plain, (hidden,), (upstream,)),
    )


def distillation(shape: Shape) -> Iterator[Subject]:
    """The divergence from a teacher, through two heads, or from its 64 most likely tokens.

    `torch` computes chunks of rows, each again in the backward pass; where the row names it, Liger's loss or
    that of TRL's `DistillationTrainer`.
    It has the teacher's whole head also where ours has stored tokens.
    """
    from unsloth_pack.kernels import LabelledRows, TeacherHead, TopLogProbs, linear_distillation

    T, V = shape.tokens, shape.vocab
    weight = randn(V, shape.hidden, grad=False) / shape.hidden**0.5
    labels = torch.randint(0, V, (T,), device=DEVICE)
    found = LabelledRows(labels)
    assert found.count == T  # read before the capture
    one = torch.ones((), device=DEVICE)
    top = torch.stack([torch.randperm(V, device=DEVICE)[:64] for _ in range(64)]).repeat(T // 64, 1).int()
    stored = TopLogProbs(top, (randn(T, 64, grad=False).float().log_softmax(-1) - 0.1).half())

    def ours(divergence: str, hidden: Tensor, taught: Tensor) -> Tensor:
        teacher = TeacherHead(taught, weight)
        return linear_distillation(hidden, weight, found, teacher, divergence=divergence).loss

    def ours_of_stored(hidden: Tensor, _: Tensor) -> Tensor:
        return linear_distillation(hidden, weight, found, stored).loss

    def plain(divergence: str, hidden: Tensor, taught: Tensor) -> Tensor:
        def chunk(x: Tensor, y: Tensor) -> Tensor:
            log_p, log_q = (F.linear(each, weight).float().log_softmax(-1) for each in (x, y))
            if divergence == "forward_kl":
                return F.kl_div(log_p, log_q, reduction="sum", log_target=True)
            log_m = torch.logaddexp(log_p, log_q) - math.log(2)
            return sum(F.kl_div(log_m, each, reduction="sum", log_target=True) / 2 for each in (log_p, log_q))

        parts = zip(hidden.split(1024), taught.split(1024), strict=True)
        return (
            sum(checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False) for part in parts) / T
        )

    def subject(name: str, n_gemms: int, ours: Run, plain: Run, captured: bool = True) -> Subject:
        return Subject(
            name=name,
            ceiling="bf16",
            work=(2.0 * n_gemms * T * shape.hidden * V, None),
            inputs=lambda: ((randn(T, shape.hidden), randn(T, shape.hidden, grad=False)), ()),
            ours=lambda x, y: forward_backward(lambda x: ours(x, y), (x,), (one,)),
            plain=lambda x, y: forward_backward(lambda x: plain(x, y), (x,), (one,)),
            captured=captured,
        )

    def trl(beta: float, hidden: Tensor, taught: Tensor) -> Tensor:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        return ChunkedDivergenceFunction.apply(hidden, weight, None, taught, weight, None, beta)[0].mean()

    for name, beta in (("forward_kl", 0.0), ("jsd", 0.5)):
        yield subject(f"distil, {name}", 3, partial(ours, name), partial(plain, name))
        yield subject(f"distil, {name}, TRL", 3, partial(ours, name), partial(trl, beta), captured=False)
    if find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearJSD

        liger_loss = LigerFusedLinearJSD(jsd_beta=0.5)

        def liger(hidden: Tensor, taught: Tensor) -> Tensor:
            return liger_loss(hidden, weight, taught, weight, None)

        yield subject("distil, jsd, Liger", 3, partial(ours, "jsd"), liger, captured=False)
    yield subject("distil, stored 64", 2, ours_of_stored, partial(plain, "forward_kl"))


def randn(*size: int, grad: bool = True) -> Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device=DEVICE, requires_grad=grad)


# The ceilings


def bf16_tflops() -> float:
    x, y = (randn(CUBE, CUBE, grad=False) for _ in range(2))
    return tflops(lambda: x @ y.t())


def fp8_tflops() -> float:
    x, y = (randn(CUBE, CUBE, grad=False).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return tflops(lambda: torch._scaled_mm(x, y.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))


def tflops(run: Callable[[], object]) -> float:
    """TFLOP/s of one multiplication of two matrices of CUBE rows and columns."""
    return 2 * CUBE**3 / statistics.median(timed(run)) / 1e9


if __name__ == "__main__":
    sys.exit(main())

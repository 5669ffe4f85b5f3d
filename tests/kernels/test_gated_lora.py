"""gated_lora_ against float64 truth, under Triton's interpreter without a GPU and on the GPU with one.

The yardstick is what plain torch computes in the same dtypes: the adapter's part is a GEMM of its own.
"""

import pytest
import torch
import torch.nn.functional as F
from exactness import DEVICE
from interpreter import sum_in_one_order
from torch import Tensor

from unsloth_pack.kernels import LoraOutput, LowRank, gated_lora_, gated_lora_backward_

pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def rand(*shape: int, dtype=FP32, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).to(DEVICE, dtype)


def part(n: int, f: int, rank: int, dtype=FP32, scale: float = 1.0, padding: int = 0) -> LowRank:
    left, right = rand(n, rank, dtype=dtype), rand(rank, f, dtype=dtype, scale=rank**-0.5)
    return LowRank(wide(left, padding), wide(right, padding).t(), scale)


def plain(
    gate: Tensor, up: Tensor, g_out: Tensor, activation: str, parts: list[LowRank | None], dtype: torch.dtype
) -> list[Tensor]:
    """The product and the gradients of gate and up, all in `dtype`."""
    sums = []
    for x, of in zip((gate, up, g_out), parts, strict=True):
        x = x.to(dtype)
        if of is not None:
            x = torch.addmm(x, of.left.to(dtype), of.right.to(dtype).t(), alpha=of.scale)
        sums.append(x)
    x, u, g = sums
    x.requires_grad_()
    u.requires_grad_()
    act = F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")
    product = act * u
    return [product, *torch.autograd.grad(product, (x, u), g)]


def ours(gate, up, g_out, activation, parts, in_place=False, padding: int = 0) -> list[Tensor]:
    """Likewise by the kernels, into tensors filled with NaN, or over the inputs."""
    of_gate, of_up, of_g = parts
    gate, up, again = (wide(x, padding) for x in (gate, up, g_out))
    before = gate.clone(), up.clone()
    product = gated_lora_(LoraOutput(gate, of_gate), LoraOutput(up, of_up), activation, store=False)
    stored = wide(gate, padding), wide(up, padding)
    sums = LoraOutput(stored[0], of_gate), LoraOutput(stored[1], of_up)
    assert torch.equal(product, gated_lora_(*sums, activation, store=True))
    g_gate, g_up = (gate, up) if in_place else (torch.full_like(x, torch.nan) for x in (gate, up))
    outputs = map(LoraOutput, (again, gate, up), (of_g, of_gate, of_up))
    products = gated_lora_backward_(*outputs, activation, g_gate, g_up)
    assert in_place or all(map(torch.equal, (gate, up), before))
    assert torch.equal(product, again)
    check_products(products, [again, g_gate, g_up], [of_g, of_gate, of_up])
    of_sums = [g_out.clone(), torch.full_like(gate, torch.nan), torch.full_like(up, torch.nan)]
    gated_lora_backward_(LoraOutput(of_sums[0], of_g), *map(LoraOutput, stored), activation, *of_sums[1:])
    assert all(map(torch.equal, of_sums, (again, g_gate, g_up)))
    return [product, g_gate, g_up]


def check_products(products: list[Tensor | None], written: list[Tensor], parts: list[LowRank | None]) -> None:
    """Of what was written and the left factors, beside the error of one GEMM in float32."""
    for got, x, of in zip(products, written, parts, strict=True):
        if of is None:
            assert got is None
            continue
        truth = x.double().t() @ of.left.double()
        yardstick = error(x.float().t() @ of.left.float(), truth)
        assert got.dtype == torch.float32
        assert error(got, truth) <= 2 * yardstick + 4 * torch.finfo(torch.float32).eps * truth.norm().item()


def error(x: Tensor, truth: Tensor) -> float:
    return (x.double() - truth).norm().item()


def wide(x: Tensor, padding: int) -> Tensor:
    """A copy, as a slice of wider rows filled with NaN."""
    return torch.cat([x, x.new_full((len(x), padding), torch.nan)], 1)[:, : x.shape[1]]


def check(gate, up, g_out, activation, parts, **layout) -> None:
    results = ours(gate, up, g_out, activation, parts, **layout)
    yardsticks = plain(gate, up, g_out, activation, parts, gate.dtype)
    truths = plain(gate, up, g_out, activation, parts, torch.float64)
    for x, y, t in zip(results, yardsticks, truths, strict=True):
        assert x.dtype == gate.dtype
        own, yardstick = error(x, t), error(y, t)
        slack = 4 * torch.finfo(torch.float32).eps * t.norm().item()
        assert own <= yardstick + slack, (own, yardstick, slack)


@pytest.fixture
def in_one_order(as_hardware, monkeypatch):
    """The kernels of the two passes compute the same product in tiles of their own."""
    if not torch.cuda.is_available():
        sum_in_one_order(monkeypatch)


# Ranks up to 32 are summed in the kernel in 16 bits; 100 takes two steps of 64, the second of them in part.
# The rows are in two runs of eight tiles, and two tiles hold the columns.
@pytest.mark.parametrize(
    ("rank", "dtype", "activation"),
    [(1, BF16, "gelu_tanh"), (16, FP16, "silu"), (64, BF16, "silu"), (100, FP32, "silu")],
)
def test_no_less_exact_than_a_gemm_of_its_own(dtype, rank, activation, in_one_order):
    n, f = 135, 72
    gate, up, g_out = (rand(n, f, dtype=dtype) for _ in range(3))
    parts = [part(n, f, rank, dtype, 2.0), part(n, f, rank, dtype, 0.3), part(n, f, rank, dtype)]
    check(gate, up, g_out, activation, parts)
    check(gate, up, g_out, activation, [*parts[:2], None], in_place=True)


@pytest.mark.parametrize(("n", "f"), [(1, 1), (64, 8), (63, 65)])
def test_ragged_shapes(n, f):
    gate, up, g_out = (rand(n, f) for _ in range(3))
    parts = [part(n, f, rank, padding=7) for rank in (3, 20, 5)]
    check(gate, up, g_out, "silu", parts, padding=7)

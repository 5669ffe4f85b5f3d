"""The kernels of routed experts against float64 truth, beside plain torch in the same dtype.

Under Triton's interpreter without a GPU and on the GPU with one.
"""

import pytest
import torch
from exactness import DEVICE
from torch import Tensor

from unsloth_pack.kernels import (
    Gate,
    InnerSum,
    Scaled,
    grouped_mm,
    grouped_outer,
    routed_gate_,
    routed_gate_backward_,
    sum_of_rows,
)

pytest.importorskip("triton")
BF16, FP32 = torch.bfloat16, torch.float32
GATES = {
    "silu": Gate("silu"),
    "gelu": Gate("gelu_tanh"),
    "limited": Gate("silu", 1.702, 0.7, 1.0, interleaved=True),
}


def rand(*shape: int, dtype=FP32) -> Tensor:
    """Numbers that no limit is near: which side of it a rounded one is on would be luck."""
    x = torch.randn(shape)
    return torch.where((x.abs() - 0.7).abs() < 0.02, 2 * x, x).to(DEVICE, dtype)


def plain(inner: InnerSum, weight: Tensor, gate: Gate, g: Tensor, of_g: Scaled | None, dtype) -> list[Tensor]:
    """The weighted product and the gradients of the sum and of the weight, all in `dtype`."""
    total = inner.base.to(dtype)
    if inner.low_rank is not None:
        total = total + inner.low_rank.scale * inner.low_rank.values.to(dtype)
    if inner.bias is not None:
        total = total + inner.bias.to(dtype)[inner.expert.long()]
    leaves = total.detach().requires_grad_(), weight.detach().to(dtype).requires_grad_()
    product = leaves[1][:, None] * gate.product(*gate.halves(leaves[0]))
    g = g.to(dtype)
    if of_g is not None:
        g = g + of_g.scale * of_g.values.to(dtype)
    return [product, *torch.autograd.grad(product, leaves, g)]


def ours(inner: InnerSum, weight, gate, g, of_g, in_place=False) -> list[Tensor]:
    """Likewise by the kernels; the sum is kept, or made again over its own base."""
    before = inner.base.clone()
    product = routed_gate_(inner, weight, gate, keep=False)
    assert torch.equal(inner.base, before)
    if not in_place:
        assert torch.equal(product, routed_gate_(inner, weight, gate, keep=True))
        inner = InnerSum(inner.base)
    again, g_inner = g.clone(), inner.base if in_place else torch.full_like(inner.base, torch.nan)
    g_weight = routed_gate_backward_(again, of_g, inner, weight, gate, g_inner)
    assert torch.equal(again, product)
    return [product, g_inner, g_weight]


def no_less_exact(results, yardsticks, truths) -> None:
    for x, y, t in zip(results, yardsticks, truths, strict=True):
        error, yardstick = ((r.double() - t).norm().item() for r in (x, y))
        slack = 4 * torch.finfo(FP32).eps * t.norm().item()
        assert error <= yardstick + slack, (error, yardstick, slack)


@pytest.mark.parametrize(
    ("dtype", "gate", "in_place"), [(BF16, "silu", False), (FP32, "gelu", True), (BF16, "limited", False)]
)
def test_the_weighted_product_is_no_less_exact_than_plain_torch(dtype, gate, in_place):
    S, F, E = 40, 72, 3
    base, low_rank, g = rand(S, 2 * F, dtype=dtype), rand(S, 2 * F, dtype=dtype), rand(S, F, dtype=dtype)
    weight = torch.rand(S, device=DEVICE)
    expert = torch.arange(S, device=DEVICE, dtype=torch.int16) % E
    part, of_g = Scaled(0.1 * low_rank, 0.25), Scaled(rand(S, F, dtype=dtype), 0.3)
    gate = GATES[gate]
    cases = [(None, None, of_g)]
    if gate.limit is None:  # a sum may come near a limit
        cases += [(part, rand(E, 2 * F, dtype=dtype), None), (part, None, of_g)]
    for low, bias, of in cases:
        inner = InnerSum(base.clone(), low, bias, None if bias is None else expert)
        given = InnerSum(base, *inner[1:])
        results = ours(inner, weight, gate, g, of, in_place)
        assert results[0].dtype == results[1].dtype == dtype
        assert results[2].dtype == FP32
        truths = plain(given, weight, gate, g, of, torch.float64)
        no_less_exact(results, plain(given, weight, gate, g, of, dtype), truths)


@pytest.mark.parametrize(("S", "F"), [(0, 8), (1, 1), (1, 1025), (33, 65)])
def test_ragged_shapes(S, F):
    base, g, weight = rand(S, 2 * F), rand(S, F), torch.rand(S, device=DEVICE)
    expert = torch.zeros(S, device=DEVICE, dtype=torch.int16)
    for gate in GATES.values():
        bias = None if gate.limit else rand(2, 2 * F)
        inner = InnerSum(base.clone(), None, bias, None if bias is None else expert)
        given = InnerSum(base, *inner[1:])
        results = ours(inner, weight, gate, g, None)
        truths = plain(given, weight, gate, g, None, torch.float64)
        no_less_exact(results, plain(given, weight, gate, g, None, FP32), truths)


def test_a_limit_stops_the_gradient_beyond_it():
    gate = Gate("silu", 1.702, 7.0, 1.0, interleaved=True)
    rows = torch.tensor([[8.0, 1.0], [1.0, 8.0], [1.0, -8.0], [-8.0, 1.0], [7.0, 7.0]], device=DEVICE)
    g_inner = torch.full_like(rows, torch.nan)
    ones = torch.ones(5, device=DEVICE)
    routed_gate_backward_(ones[:, None].clone(), None, InnerSum(rows), ones, gate, g_inner)
    is_zero = [[True, False], [False, True], [False, True], [False, False], [False, False]]
    assert (g_inner == 0).tolist() == is_zero


@pytest.mark.parametrize(("dtype", "C", "k"), [(BF16, 1030, 3), (FP32, 24, 1)])
def test_rows_are_summed_in_their_order(dtype, C, k):
    N = 17
    y, more = rand(N * k, C, dtype=dtype), Scaled(rand(N * k, C, dtype=dtype), 0.3)
    places = torch.randperm(N * k, device=DEVICE).view(N, k)
    for parts in ([Scaled(y, 1.0)], [Scaled(y, 1.0), more]):
        wide = sum(part.scale * part.values.double() for part in parts)
        plain = sum(part.scale * part.values for part in parts)
        got = sum_of_rows(parts, places)
        assert got.dtype == dtype
        no_less_exact([got], [plain[places].sum(1)], [wide[places].sum(1)])
        assert torch.equal(got, sum_of_rows(parts, places))


def test_what_lies_behind_the_sums_stays(monkeypatch):
    C = 5
    y, places = rand(6, C), torch.tensor([[5, 0], [1, 4], [2, 3]], device=DEVICE)
    arena, new_empty = torch.full((3 * C + 2000,), 7.0, device=DEVICE), Tensor.new_empty

    def of_arena(tensor, shape, **options):
        return arena[: 3 * C].view(shape) if shape == (3, C) else new_empty(tensor, shape, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "new_empty", of_arena)
        got = sum_of_rows([Scaled(y, 1.0)], places)
    assert torch.equal(got, y[places].sum(1))
    assert got.data_ptr() == arena.data_ptr()
    assert (arena[3 * C :] == 7).all()


@pytest.mark.parametrize("counts", [[5, 0, 9, 0], [0, 0, 0, 14]], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_grouped_gemms(counts, dtype):
    n_in, n_out = 16, 24
    ends = torch.tensor(counts, device=DEVICE).cumsum(0).int()
    x, g = rand(14, n_in, dtype=dtype), rand(14, n_out, dtype=dtype)
    weight = rand(4, n_out, n_in, dtype=dtype)
    rows = [slice(end - n, end) for n, end in zip(counts, ends.tolist(), strict=True)]
    for view in (weight.transpose(1, 2), weight.transpose(1, 2).contiguous()):
        parts = [x[own].double() @ view[e].double() for e, own in enumerate(rows)]
        plain = torch.cat([x[own] @ view[e] for e, own in enumerate(rows)])
        no_less_exact([grouped_mm(x, view, ends)], [plain], [torch.cat(parts)])
    outer = grouped_outer(x, g, ends)
    truth = torch.stack([x[own].double().t() @ g[own].double() for own in rows])
    plain = torch.stack([x[own].t() @ g[own] for own in rows])
    no_less_exact([outer], [plain], [truth])
    assert all((outer[e] == 0).all() for e, n in enumerate(counts) if n == 0)

"""rope_qk against float64 truth, under Triton's interpreter without a GPU and on the GPU with one.

The yardstick is the plain path: what transformers computes, in the inputs' dtype. In bfloat16 and float16 the
kernel's largest error may not exceed the plain path's at all. In float32, where both round about as often but
in another order, it may by one unit in the last place of the largest value.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from exactness import DEVICE, large_buffer, leaf, saved_by
from torch import Tensor

from unsloth_pack.kernels import QKNorm, launch, rope, rope_qk

pytest.importorskip("triton")
NORMS = ("qwen3", "gemma3", "olmo2")


# The plain path, and how to compare with it


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    position_ids: Tensor | None
    norm: QKNorm | None
    g_outs: tuple[Tensor, Tensor]
    interleaved: bool = False

    def copy(self, dtype: torch.dtype | None = None) -> "Inputs":
        """Contiguous copies, leaves of a graph of their own, perhaps in another dtype."""
        norm = self.norm
        if norm is not None:
            norm = replace(norm, q_weight=leaf(norm.q_weight, dtype), k_weight=leaf(norm.k_weight, dtype))
        q, k, cos, sin, gq, gk = (leaf(x, dtype) for x in (self.q, self.k, self.cos, self.sin, *self.g_outs))
        return Inputs(q, k, cos, sin, self.position_ids, norm, (gq, gk), self.interleaved)


def plain_rope_qk(q, k, cos, sin, position_ids=None, *, qk_norm=None, interleaved=False):
    """transformers' way: every step rounds to the inputs' dtype, cos and sin too."""
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    R = cos.shape[-1]
    cos, sin = (x.to(q.dtype) for x in (cos, sin))
    cos, sin = (x.reshape(-1, 1, R) if q.dim() == 3 else x.unsqueeze(-3) for x in (cos, sin))
    if interleaved:  # as GLM 4 does
        cos, sin = (x[..., : R // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))

    def rotate_half(x):
        if interleaved:
            return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
        return torch.cat((-x[..., R // 2 :], x[..., : R // 2]), dim=-1)

    def turn(x, weight):
        if qk_norm is not None:
            x = plain_norm(x, weight, qk_norm)
        turned, tail = x[..., :R], x[..., R:]
        return torch.cat([turned * cos + rotate_half(turned) * sin, tail], dim=-1)

    weights = (None, None) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight)
    return turn(q, weights[0]), turn(k, weights[1])


def plain_norm(x, weight, norm):
    """Qwen3RMSNorm, Gemma3RMSNorm and Olmo2RMSNorm, which round at different places."""
    by_token = x.transpose(-3, -2) if x.dim() == 4 else x
    if norm.flat:
        by_token = by_token.flatten(-2)
    wide = by_token.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.flat:
        out = (weight * wide).to(x.dtype).unflatten(-1, (x.shape[1], x.shape[-1]))
    elif norm.offset:
        out = (wide * (norm.offset + weight.to(wide.dtype))).to(x.dtype)
    else:
        out = weight * wide.to(x.dtype)
    return out.transpose(-3, -2) if x.dim() == 4 else out


def run(fn, i: Inputs) -> list[Tensor]:
    """q_out, k_out, and the gradients of the inputs that require one."""
    outs = fn(i.q, i.k, i.cos, i.sin, i.position_ids, qk_norm=i.norm, interleaved=i.interleaved)
    weights = [] if i.norm is None else [i.norm.q_weight, i.norm.k_weight]
    leaves = [x for x in (i.q, i.k, *weights) if x.requires_grad]
    return [*outs, *torch.autograd.grad(outs, leaves, i.g_outs)]


def check(inputs: Inputs) -> list[Tensor]:
    """Judge all results and gradients, and return them. No input is written to."""
    dtype, tensors = inputs.q.dtype, (inputs.q, inputs.k, *inputs.g_outs)
    before = [x.detach().clone() for x in tensors]
    ours, plain = run(rope_qk, inputs), run(plain_rope_qk, inputs.copy())
    truth, oracle = (run(fn, inputs.copy(torch.float64)) for fn in (plain_rope_qk, rope_qk))
    torch.testing.assert_close(oracle, truth, rtol=1e-9, atol=1e-12)
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in plain]
    slack = torch.finfo(dtype).eps if dtype == torch.float32 else 0.0
    for i, (x, y, t) in enumerate(zip(ours, plain, truth, strict=True)):
        error, yardstick = ((r.double() - t).abs().max().item() for r in (x, y))
        assert error <= yardstick + slack * t.abs().max().item(), f"result {i} of q, k, gq, gk, gw.."
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True)), "an input was written to"
    return ours


def make(
    T, HQ, HK, D, *, R=None, B=None, dtype=torch.float32, norm=None, trained=True, interleaved=False
) -> Inputs:
    """Random inputs `[T, H, D]`, or `[B, H, T, D]` if B is given, with shuffled positions."""
    flat, offset = norm == "olmo2", 1.0 if norm == "gemma3" else 0.0

    def randn(H: int) -> Tensor:
        return torch.randn((T, H, D) if B is None else (B, H, T, D)).to(DEVICE, dtype)

    def weight(H: int) -> Tensor:
        w = 1 - offset + 0.3 * torch.randn(H * D if flat else D)
        return w.to(DEVICE, dtype).requires_grad_(trained)

    q, k, R = randn(HQ).requires_grad_(), randn(HK).requires_grad_(), R or D
    angle = torch.arange(2 * T + 1).double()[:, None] / 10000 ** (torch.arange(0, R, 2).double() / R)
    cos, sin = (f(torch.cat([angle, angle], dim=-1)).float().to(DEVICE) for f in (torch.cos, torch.sin))
    positions = torch.randint(0, 2 * T + 1, (T,) if B is None else (B, T)).to(DEVICE)
    qk_norm = None if norm is None else QKNorm(weight(HQ), weight(HK), 1e-6, offset, flat)
    return Inputs(q, k, cos, sin, positions, qk_norm, (randn(HQ), randn(HK)), interleaved)


def nan_around(x: Tensor, axis: int, stop_gap: int = 1) -> Tensor:
    """x as a slice of a buffer that is NaN on both sides along the axis: any read past the slice shows."""
    shape = list(x.shape)
    shape[axis] += 1 + stop_gap
    buffer = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    inside = buffer.narrow(axis, 1, x.shape[axis])
    inside.copy_(x.detach())
    return inside.requires_grad_(x.requires_grad)


# Numerics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", [None, *NORMS])
@pytest.mark.parametrize("interleaved", [False, True])
def test_no_less_exact_than_the_plain_path(norm, dtype, interleaved):
    check(make(9, 4, 2, 64, dtype=dtype, norm=norm, interleaved=interleaved))


@pytest.mark.parametrize(("T", "heads"), [(1, (2, 2)), (127, (7, 1)), (33, (14, 2)), (31, (3, 5))], ids=str)
def test_head_ratios_and_odd_lengths(T, heads):
    check(make(T, *heads, 16))


@pytest.mark.parametrize(("D", "R"), [(256, 256), (80, 32), (96, 24), (128, 64), (10, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_head_dims_and_partial_rotary(D, R, interleaved):
    inputs = make(5, 4, 2, D, R=R, interleaved=interleaved)
    q_out, _, gq, _ = check(inputs)
    assert torch.equal(q_out[..., R:], inputs.q[..., R:])
    assert torch.equal(gq[..., R:], inputs.g_outs[0][..., R:])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("sizes", [(6, 7, 1, 80, 32), (3, 3, 2, 96, 96)], ids=str)
def test_norms_of_ragged_shapes(norm, sizes):
    T, HQ, HK, D, R = sizes
    check(make(T, HQ, HK, D, R=R, norm=norm))
    check(make(T, HQ, HK, D, R=R, norm=norm, B=2, interleaved=True))


# Layouts


def fused_qkv(inputs: Inputs) -> Inputs:
    """q and k as slices of one projection's output, whose v is NaN."""
    q, k = inputs.q.detach(), inputs.k.detach()
    qkv = torch.cat([q, k, torch.full_like(k, torch.nan)], dim=1)
    if q.dim() == 4:
        qkv = qkv.transpose(1, 2).contiguous().transpose(1, 2)
    HQ, HK = q.shape[1], k.shape[1]
    return replace(inputs, q=qkv[:, :HQ].requires_grad_(), k=qkv[:, HQ : HQ + HK].requires_grad_())


def sliced_everywhere(inputs: Inputs) -> Inputs:
    """Slices of NaN buffers, q and k along different axes, gradients as well, every second dim in one."""
    gq, gk = inputs.g_outs
    gk_wide = gk.repeat_interleave(2, dim=-1)
    gk_wide[..., 1::2] = torch.nan
    q, k = nan_around(inputs.q, -1, 2), nan_around(inputs.k, -2, 3)
    return replace(inputs, q=q, k=k, g_outs=(nan_around(gq, 0), gk_wide[..., ::2]))


def expanded_gradients(inputs: Inputs) -> Inputs:
    """What `.sum().backward()` hands over: one number with stride 0."""
    one = torch.ones((), device=DEVICE)
    return replace(inputs, g_outs=(one.expand_as(inputs.q), one.expand_as(inputs.k)))


@pytest.mark.parametrize("B", [None, 1, 3])
@pytest.mark.parametrize("norm", [None, "qwen3"])
@pytest.mark.parametrize("lay_out", [fused_qkv, sliced_everywhere, expanded_gradients])
def test_any_strides(lay_out, norm, B):
    check(lay_out(make(5, 4, 2, 16, R=8, B=B, norm=norm)))


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["token", "head", "dim"])
def test_strides_past_two_to_the_31(axis):
    small = make(3, 3, 3, 4, dtype=torch.bfloat16)
    far = 2**31 // (small.q.shape[axis] - 1) + 8
    strides = [64, 16, 1]
    strides[axis] = far
    buffer = large_buffer(far * (small.q.shape[axis] - 1) + 1024, torch.bfloat16)
    q, gq = (buffer.as_strided(small.q.shape, strides, start) for start in (0, 512))
    q.copy_(small.q.detach())
    gq.copy_(small.g_outs[0])
    expected = run(rope_qk, small)
    inputs = replace(small, q=q.requires_grad_(), g_outs=(gq, small.g_outs[1]))
    assert all(torch.equal(x, y) for x, y in zip(run(rope_qk, inputs), expected, strict=True))


# Positions


@pytest.mark.parametrize("shape", ["[T]", "[1, T]", "[B, T]"])
@pytest.mark.parametrize("B", [None, 1, 3])
def test_position_ids(B, shape):
    """Those of a packed row, in order, and in none; with every second number to be skipped."""
    T = 12
    packed = torch.cat([torch.arange(n) for n in (5, 1, 4, 2)])
    rows = [x.to(DEVICE) for x in (packed, torch.arange(T), torch.randperm(T))]
    positions = rows[0] if shape == "[T]" else torch.stack(rows[: 1 if shape == "[1, T]" else B or 1])
    inputs = make(T, 3, 1, 16, B=B)
    check(replace(inputs, position_ids=positions))
    strided = torch.stack([positions, torch.full_like(positions, 2**31 - 1)], dim=-1).int()[..., 0]
    check(replace(inputs, position_ids=strided))


@pytest.mark.parametrize(("B", "rows"), [(None, ()), (None, (1,)), (3, ()), (3, (1,)), (3, (3,))], ids=str)
def test_a_row_of_the_tables_for_each_token(B, rows):
    inputs = make(7, 3, 1, 16, R=12, B=B)
    angle = torch.randn(*rows, 7, 6, device=DEVICE).repeat(*[1] * len(rows), 1, 2)
    check(replace(inputs, cos=angle.cos(), sin=angle.sin(), position_ids=None))


# Autograd


def test_without_a_norm_nothing_of_q_and_k_is_saved():
    i = make(5, 4, 2, 16)
    saved = saved_by(lambda: rope_qk(i.q, i.k, i.cos, i.sin, i.position_ids))
    assert saved == {x.data_ptr() for x in (i.cos, i.sin, i.position_ids)}


@pytest.mark.parametrize("norm", NORMS)
def test_weight_gradients_of_many_blocks_are_exact_and_repeat(norm, monkeypatch):
    monkeypatch.setattr(launch, "_WEIGHT_GRAD_PROGRAMS", 3)
    inputs = make(10, 8, 4, 128, norm=norm)
    assert 10 // rope._choose_blocks(8, 4, 128, 3)["BLOCK_T"] > 3  # so that a program takes several blocks
    first, second = check(inputs), run(rope_qk, inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    check(make(10, 8, 4, 128, norm=norm, trained=False))

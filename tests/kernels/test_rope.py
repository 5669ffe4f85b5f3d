"""rope_qk against float64 truth, under Triton's interpreter without a GPU and on the GPU with one.

The yardstick is the plain path: what transformers computes, in the inputs' dtype. In bfloat16 and float16 the
kernel's largest error may not exceed the plain path's at all. In float32, where both round about as often but
in another order, it may by one unit in the last place of the largest value.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from every_day import combinations
from exactness import DEVICE, assert_no_sync, large_buffer, leaf, saved_by
from torch import Tensor

from unsloth_pack.kernels import QKNorm, rope, rope_qk

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

    def leaves(self) -> list[Tensor]:
        weights = [] if self.norm is None else [self.norm.q_weight, self.norm.k_weight]
        return [x for x in (self.q, self.k, *weights) if x.requires_grad]

    def copy(self, dtype: torch.dtype | None = None) -> "Inputs":
        """Contiguous copies, leaves of a graph of their own; in another dtype if it is given."""

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
        out = (weight * wide).to(x.dtype)
    elif norm.offset:
        out = (wide * (norm.offset + weight.to(wide.dtype))).to(x.dtype)
    else:
        out = weight * wide.to(x.dtype)
    if norm.flat:
        out = out.unflatten(-1, (x.shape[1], x.shape[-1]))
    return out.transpose(-3, -2) if x.dim() == 4 else out


def run(fn, inputs: Inputs) -> list[Tensor]:
    """q_out, k_out, and the gradients of the inputs that require one."""
    i = inputs
    outs = fn(i.q, i.k, i.cos, i.sin, i.position_ids, qk_norm=i.norm, interleaved=i.interleaved)
    return [*outs, *torch.autograd.grad(outs, i.leaves(), i.g_outs)]


def largest_error(results: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [(x.double() - t).abs().max().item() for x, t in zip(results, truth, strict=True)]


def assert_no_worse_than_plain(inputs: Inputs) -> None:
    dtype = inputs.q.dtype
    ours = run(rope_qk, inputs)
    assert [x.dtype for x in ours[:2]] == [dtype, dtype]
    truth = run(plain_rope_qk, inputs.copy(torch.float64))
    assert [x.shape for x in ours] == [x.shape for x in truth]
    plain = run(plain_rope_qk, inputs.copy())
    slack = torch.finfo(dtype).eps if dtype == torch.float32 else 0.0
    for i, (error, yardstick) in enumerate(
        zip(largest_error(ours, truth), largest_error(plain, truth), strict=True)
    ):
        assert error <= yardstick + slack * truth[i].abs().max().item(), f"result {i} of q, k, gq, gk, gw.."


def tables(n_positions: int, R: int, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.arange(n_positions).double()[:, None] / 10000 ** (torch.arange(0, R, 2).double() / R)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)


def make_norm(kind: str | None, HQ: int, HK: int, D: int, dtype, trained=True) -> QKNorm | None:
    if kind is None:
        return None
    flat, offset = kind == "olmo2", 1.0 if kind == "gemma3" else 0.0

    def weight(H: int) -> Tensor:
        w = 1 - offset + 0.3 * torch.randn(H * D if flat else D)
        return w.to(DEVICE, dtype).requires_grad_(trained)

    return QKNorm(weight(HQ), weight(HK), 1e-6, offset, flat)


def make(
    T, HQ, HK, D, *, R=None, B=None, dtype=torch.float32, norm=None, trained=True, interleaved=False
) -> Inputs:
    """Random inputs `[T, H, D]`, or `[B, H, T, D]` if B is given, with shuffled positions."""

    def randn(H: int) -> Tensor:
        return torch.randn((T, H, D) if B is None else (B, H, T, D)).to(DEVICE, dtype)

    q, k = randn(HQ).requires_grad_(), randn(HK).requires_grad_()
    cos, sin = tables(2 * T + 1, D if R is None else R)
    positions = torch.randint(0, 2 * T + 1, (T,) if B is None else (B, T)).to(DEVICE)
    made = make_norm(norm, HQ, HK, D, dtype, trained)
    return Inputs(q, k, cos, sin, positions, made, (randn(HQ), randn(HK)), interleaved)


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
    assert_no_worse_than_plain(make(9, 4, 2, 64, dtype=dtype, norm=norm, interleaved=interleaved))


@pytest.mark.parametrize(
    ("T", "heads"),
    combinations(
        (1, 2, 31, 33, 127),
        ((2, 2), (4, 1), (7, 1), (8, 1), (14, 2), (3, 5)),
        daily=[(1, (2, 2)), (127, (7, 1)), (33, (14, 2)), (31, (3, 5))],
    ),
)
def test_head_ratios_and_odd_lengths(T, heads):
    assert_no_worse_than_plain(make(T, *heads, 16))


@pytest.mark.parametrize(
    ("D", "R"),
    [
        *((64, 64), (80, 80), (96, 96), (128, 128), (256, 256)),
        *((80, 32), (96, 24), (128, 64), (256, 64), (10, 6), (8, 2)),
    ],
)
def test_head_dims_and_partial_rotary(D, R):
    inputs = make(5, 4, 2, D, R=R)
    assert_no_worse_than_plain(inputs)
    q_out, _, gq, _ = run(rope_qk, inputs)
    assert torch.equal(q_out[..., R:], inputs.q[..., R:])
    assert torch.equal(gq[..., R:], inputs.g_outs[0][..., R:])


@pytest.mark.parametrize(
    ("dims", "norm"),
    combinations(
        ((80, 32), (10, 6), (32, 8), (128, 128)),
        (None, *NORMS),
        daily=[((80, 32), None), ((10, 6), "qwen3"), ((32, 8), "olmo2"), ((10, 6), "gemma3")],
    ),
)
def test_pairs_of_neighbours(dims, norm):
    D, R = dims
    for B in (None, 2):
        inputs = make(5, 7, 1, D, R=R, B=B, norm=norm, interleaved=True)
        assert_no_worse_than_plain(inputs)
        assert not torch.equal(run(rope_qk, inputs)[0], run(rope_qk, replace(inputs, interleaved=False))[0])


@pytest.mark.parametrize(
    ("norm", "sizes"),
    combinations(
        NORMS,
        ((1, 1, 1, 64, 64), (6, 7, 1, 80, 32), (3, 3, 2, 96, 96), (2, 8, 1, 256, 64)),
        daily=[("qwen3", (3, 3, 2, 96, 96)), ("gemma3", (3, 3, 2, 96, 96)), ("olmo2", (6, 7, 1, 80, 32))],
    ),
)
def test_norms_of_ragged_shapes(norm, sizes):
    T, HQ, HK, D, R = sizes
    assert_no_worse_than_plain(make(T, HQ, HK, D, R=R, norm=norm))
    assert_no_worse_than_plain(make(T, HQ, HK, D, R=R, norm=norm, B=2))


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
    return replace(
        inputs,
        q=nan_around(inputs.q, -1, 2),
        k=nan_around(inputs.k, -2, 3),
        g_outs=(nan_around(gq, 0), gk_wide[..., ::2]),
    )


def expanded_gradients(inputs: Inputs) -> Inputs:
    """What `.sum().backward()` hands over: one number with stride 0."""
    one = torch.ones((), device=DEVICE)
    return replace(inputs, g_outs=(one.expand_as(inputs.q), one.expand_as(inputs.k)))


@pytest.mark.parametrize("B", [None, 1, 3])
@pytest.mark.parametrize("norm", [None, "qwen3"])
@pytest.mark.parametrize("lay_out", [fused_qkv, sliced_everywhere, expanded_gradients])
def test_any_strides(lay_out, norm, B):
    inputs = lay_out(make(5, 4, 2, 16, R=8, B=B, norm=norm))
    before = [x.detach().clone() for x in (inputs.q, inputs.k, *inputs.g_outs)]
    assert_no_worse_than_plain(inputs)
    after = [x.detach() for x in (inputs.q, inputs.k, *inputs.g_outs)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "an input was written to"


# Positions


def packed_positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", ["[T]", "[1, T]", "[B, T]"])
@pytest.mark.parametrize("B", [None, 1, 3])
def test_position_ids(B, shape, dtype):
    T = 12
    rows = [packed_positions([5, 1, 4, 2]), torch.arange(T, device=DEVICE), torch.randperm(T).to(DEVICE)]
    positions = rows[0] if shape == "[T]" else torch.stack(rows[: 1 if shape == "[1, T]" else B or 1])
    inputs = make(T, 3, 1, 16, B=B)
    assert_no_worse_than_plain(replace(inputs, position_ids=positions.to(dtype)))
    strided = torch.stack([positions, torch.full_like(positions, 2**31 - 1)], dim=-1).to(dtype)[..., 0]
    assert_no_worse_than_plain(replace(inputs, position_ids=strided))


@pytest.mark.parametrize(("B", "rows"), [(None, ()), (None, (1,)), (3, ()), (3, (1,)), (3, (3,))], ids=str)
def test_a_row_of_the_tables_for_each_token(B, rows):
    inputs = make(7, 3, 1, 16, R=12, B=B)
    angle = torch.randn(*rows, 7, 6, device=DEVICE).repeat(*[1] * len(rows), 1, 2)
    assert_no_worse_than_plain(replace(inputs, cos=angle.cos(), sin=angle.sin(), position_ids=None))


def test_documents_of_a_packed_row_come_out_as_they_would_alone():
    lengths = [5, 1, 8, 3]
    inputs = replace(make(17, 4, 2, 16, dtype=torch.bfloat16), position_ids=packed_positions([5, 1, 8, 3]))
    packed = run(rope_qk, inputs)
    for start, n in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        own = slice(int(start), int(start) + n)
        g_outs = tuple(g[own] for g in inputs.g_outs)
        q, k = (x.detach()[own].clone().requires_grad_() for x in (inputs.q, inputs.k))
        alone = run(
            rope_qk, replace(inputs, q=q, k=k, g_outs=g_outs, position_ids=torch.arange(n, device=DEVICE))
        )
        assert all(torch.equal(x[own], y) for x, y in zip(packed, alone, strict=True))


# Autograd


def test_without_a_norm_nothing_of_q_and_k_is_saved():
    i = make(5, 4, 2, 16)
    saved = saved_by(lambda: rope_qk(i.q, i.k, i.cos, i.sin, i.position_ids))
    tables_and_positions = {x.data_ptr() for x in (i.cos, i.sin, i.position_ids)}
    assert saved == tables_and_positions


@pytest.mark.parametrize("norm", NORMS)
def test_frozen_weights_cost_nothing(norm, monkeypatch):
    inputs = make(5, 4, 2, 16, norm=norm, trained=False)
    assert len(inputs.leaves()) == 2
    assert_no_worse_than_plain(inputs)
    asked = []
    backward = rope._norm_backward
    monkeypatch.setattr(rope, "_norm_backward", lambda *a: asked.append(a[-1]) or backward(*a))
    run(rope_qk, inputs)
    run(rope_qk, make(5, 4, 2, 16, norm=norm, trained=True))
    assert asked == [False, True]


@pytest.mark.parametrize("norm", NORMS)
def test_weight_gradients_of_many_blocks_are_exact_and_repeat(norm, monkeypatch):
    monkeypatch.setattr(rope, "_WEIGHT_GRAD_PROGRAMS", 3)
    inputs = make(10, 8, 4, 128, norm=norm)
    assert 10 // rope._choose_blocks(8, 4, 128, 3)["BLOCK_T"] > 3  # so that a program takes several blocks
    assert_no_worse_than_plain(inputs)
    first, second = run(rope_qk, inputs), run(rope_qk, inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


# 64-bit indices


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["token", "head", "dim"])
def test_strides_past_two_to_the_31(axis):
    small = make(3, 3, 3, 4, dtype=torch.bfloat16)
    far = 2**31 // (small.q.shape[axis] - 1) + 8
    strides = [64, 16, 1]
    strides[axis] = far
    buffer = large_buffer(far * (small.q.shape[axis] - 1) + 1024, torch.bfloat16)
    q = buffer.as_strided(small.q.shape, strides, 0)
    q.copy_(small.q.detach())
    q.requires_grad_()
    expected = run(rope_qk, small)
    assert all(torch.equal(x, y) for x, y in zip(run(rope_qk, replace(small, q=q)), expected, strict=True))
    far_gradient = buffer.as_strided(small.q.shape, strides, 512)
    far_gradient.copy_(small.g_outs[0])
    inputs = replace(small, g_outs=(far_gradient, small.g_outs[1]))
    assert all(torch.equal(x, y) for x, y in zip(run(rope_qk, inputs), expected, strict=True))


# Dispatch and errors


@pytest.mark.gpu
def test_never_synchronises():
    inputs = make(64, 8, 2, 128, dtype=torch.bfloat16, norm="qwen3")
    assert_no_sync(lambda: run(rope_qk, inputs))

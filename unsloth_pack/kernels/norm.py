"""RMSNorm in one launch, forward and backward, also of a sum.

R rows of C features. With y = x / rms(x) * w and w = offset + weight, for each row:

    r  = 1 / sqrt(mean(x²) + eps)
    gx = r * (g * w - n * mean(g * w * n)),  n = x * r
    gw = sum of g * n over the rows

The backward pass reads x anyway and recomputes r: only the inputs are saved.

In a decoder layer x is a sum, the new residual, which is returned beside y. The same launch computes the sum,
and the backward pass adds the gradient of the residual to gx.
"""

from __future__ import annotations

import functools
from typing import Any, no_type_check

import torch
from torch import Tensor

from unsloth_pack.kernels import reference
from unsloth_pack.kernels.launch import (
    MAX_WARPS,
    PER_THREAD,
    apply,
    as_rows,
    check_shapes,
    floor_power_of_2,
    jit,
    once_differentiable,
    share_programs,
    takes_fused_path,
    tl,
    triton,
)

_TILE = 4096  # elements of a program; one row may be longer


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) * (offset + weight), the mean over the last dim.

    Args:
        x: `[..., C]`, any C. bfloat16, float16 or float32; float64 takes the reference path. Read in place if
            the last dim is contiguous and the others collapse into rows of one stride.
        weight: `[C]`, any float dtype. Gets a gradient if it requires one, the same bits every run.
        eps: added to the mean square; positive.
        offset: 0 for a weight that starts at one (llama, qwen), 1 for one that starts at zero (gemma).

    Returns:
        A fresh contiguous tensor of x's shape, computed in float32 and rounded once. The dtype is that of
        transformers: with offset 0 `promote_types(x.dtype, weight.dtype)` (llama's norm ends in
        `weight * x_hat.to(x.dtype)`), otherwise x's (gemma's ends in `.type_as(x)`). Norms that return x's
        with offset 0 too are declared (`norm_keeps_dtype`).

    Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
    """
    return add_rms_norm(x, None, weight, eps, offset)[1]


def add_rms_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute the sum x + added, and its `rms_norm`.

    Args:
        x, weight, eps, offset: as for `rms_norm`.
        added: `[..., C]` of x's shape, any of x's possible dtypes; None to norm x itself.

    Returns:
        The sum, contiguous, of the promoted dtype (a view of x if added is None); and the norm of the rounded
        sum.
    """
    check_shapes(x=("*C", x), added=("*C", added), weight=("C", weight))
    if not takes_fused_path(x, weight) or not (added is None or takes_fused_path(added, weight)):
        return reference.add_rms_norm(x, added, weight, eps, offset)
    return apply(_AddRMSNorm, x, added, weight.contiguous(), eps, offset)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        (rows, row_stride), total, added_rows, added_stride = as_rows(x), None, None, 0
        if added is not None:
            added_rows, added_stride = as_rows(added)
            total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, added.dtype))
        normed = x if total is None else total
        dtype = torch.promote_types(normed.dtype, weight.dtype) if offset == 0 else normed.dtype
        out = x.new_empty(x.shape, dtype=dtype)
        C = x.shape[-1]
        R = x.numel() // C
        BLOCK_R, BLOCK_C, num_warps = _choose_blocks(C, 1)
        _norm_kernel[(-(-R // BLOCK_R),)](
            rows, added_rows, weight, total, out, eps, offset, R, row_stride, added_stride,
            C, BLOCK_R, BLOCK_C, num_warps=num_warps,
        )  # fmt: skip
        ctx.save_for_backward(normed, weight)
        ctx.eps_and_offset = eps, offset
        ctx.dtypes = x.dtype, None if added is None else added.dtype
        ctx.set_materialize_grads(False)
        return normed, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_total: Tensor | None, g_out: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gx, partial = g_total, None
        if g_out is not None:
            (g_rows, g_stride), (rows, row_stride) = as_rows(g_out), as_rows(x)
            other, other_stride = (None, 0) if g_total is None else as_rows(g_total)
            gx = x.new_empty(x.shape)
            C = x.shape[-1]
            R = x.numel() // C
            trained = ctx.needs_input_grad[2]
            BLOCK_R, BLOCK_C, num_warps = _choose_blocks(C, 3 if trained else 2)
            programs, STEPS = -(-R // BLOCK_R), 1
            if trained:
                programs, STEPS = share_programs(programs)
                partial = x.new_empty((programs, C), dtype=torch.float32)
            _norm_backward_kernel[(programs,)](
                g_rows, rows, weight, other, gx, partial, *ctx.eps_and_offset, R,
                g_stride, row_stride, other_stride, C, BLOCK_R, BLOCK_C, STEPS, num_warps=num_warps,
            )  # fmt: skip
        g_weight = None if partial is None else partial.sum(0).to(weight.dtype)
        return *(None if d is None or gx is None else gx.to(d) for d in ctx.dtypes), g_weight, None, None


@functools.cache
def _choose_blocks(C: int, tiles: int) -> tuple[int, int, int]:
    """Choose BLOCK_R, BLOCK_C and the warps of a kernel that holds `tiles` tiles of rows at a time."""
    BLOCK_C = triton.next_power_of_2(C)
    BLOCK_R = floor_power_of_2(_TILE // (tiles * BLOCK_C))
    num_warps = min(MAX_WARPS, floor_power_of_2(tiles * BLOCK_R * BLOCK_C // (32 * PER_THREAD)))
    return BLOCK_R, BLOCK_C, num_warps


@jit(do_not_specialize=["R"])
@no_type_check
def _norm_kernel(
    x, added, weight, total, out, eps, offset, R, x_sr, added_sr,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write out `[R, C]`: the norm of x, or of total `[R, C]` = x + added. Grid: blocks of BLOCK_R rows."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    dim = tl.arange(0, BLOCK_C)[None, :]
    x_RC = _load_rows(x, row, dim, R, x_sr, C)
    if added is not None:
        x_RC += _load_rows(added, row, dim, R, added_sr, C)
        x_RC = x_RC.to(total.dtype.element_ty).to(tl.float32)
        _store_rows(total, x_RC, row, dim, R, C)
    w_C = _load_weight(weight, dim, offset, C)
    out_RC = x_RC * _inverse_rms(x_RC, eps, C) * w_C
    _store_rows(out, out_RC, row, dim, R, C)


@jit(do_not_specialize=["R"])
@no_type_check
def _norm_backward_kernel(
    g, x, weight, other, gx, partial, eps, offset, R, g_sr, x_sr, other_sr,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write gx `[R, C]`: the gradient of x.

    other: `[R, C]`, added to gx, or None.
    partial: float32 `[programs, C]`, each program's share of the weight's gradient, or None.
    Grid: programs that each take STEPS blocks of BLOCK_R rows in turn.
    """
    dim = tl.arange(0, BLOCK_C)[None, :]
    w_C = _load_weight(weight, dim, offset, C)
    if partial is not None:
        gw_RC = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(0) * STEPS + step) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        x_RC = _load_rows(x, row, dim, R, x_sr, C)
        g_RC = _load_rows(g, row, dim, R, g_sr, C)
        scale = _inverse_rms(x_RC, eps, C)
        n_RC = x_RC * scale
        if partial is not None:
            gw_RC += g_RC * n_RC
        gx_RC = _through_rms(g_RC * w_C, n_RC, scale, C)
        if other is not None:
            gx_RC += _load_rows(other, row, dim, R, other_sr, C)
        _store_rows(gx, gx_RC, row, dim, R, C)
    if partial is not None:
        start = partial + tl.program_id(0).to(tl.int64) * C
        tl.store(start + dim, tl.sum(gw_RC, axis=0, keep_dims=True), mask=dim < C)


@jit
def _load_rows(x, row, dim, R, x_sr, C: tl.constexpr):
    mask_RC = (row < R) & (dim < C)
    # int64: a slice of a long fused row can exceed 2³¹ elements.
    return tl.load(x + row.to(tl.int64) * x_sr + dim, mask=mask_RC, other=0.0).to(tl.float32)


@jit
def _store_rows(out, out_RC, row, dim, R, C: tl.constexpr):
    mask_RC = (row < R) & (dim < C)
    tl.store(out + row.to(tl.int64) * C + dim, out_RC.to(out.dtype.element_ty), mask=mask_RC)


@jit
def _load_weight(weight, dim, offset, C: tl.constexpr):
    return offset + tl.load(weight + dim, mask=dim < C, other=0.0).to(tl.float32)


@jit
def _inverse_rms(x_RC, eps, C: tl.constexpr):
    mean_square = tl.sum(x_RC * x_RC, axis=1, keep_dims=True) / C
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))  # tl.rsqrt approximates


@jit
def _through_rms(gn_RC, n_RC, scale, C: tl.constexpr):
    """Return the gradient of x from the gradient gn of n = x * scale: scale * (gn - n * mean(gn * n))."""
    mean = tl.sum(gn_RC * n_RC, axis=1, keep_dims=True) / C
    return scale * (gn_RC - n_RC * mean)

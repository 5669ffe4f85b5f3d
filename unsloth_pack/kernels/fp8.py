"""Rows in eight bits, and the GEMM of them.

x ≈ q * s: q in e4m3 (Micikevicius et al. 2022, "FP8 formats for deep learning"), one float32 scale
s = max|x| / 448 for every row.

Shapes: N tokens, I inputs, O outputs of a weight `[O, I]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .launch import MAX_WARPS, PER_THREAD, as_rows, floor_power_of_2, jit, takes_fused_path, tl, triton

_TILE = 64  # rows and columns that a program transposes


class Fp8Rows(NamedTuple):
    """A matrix in e4m3.

    Args:
        values: `[N, C]` float8_e4m3fn, contiguous.
        scale: `[N, 1]` float32; values * scale is what they stand for.
    """

    values: Tensor
    scale: Tensor

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """`[N, C]` in `dtype`."""
        return (self.values.float() * self.scale).to(dtype)


def quantize_rows(x: Tensor, column_scale: Tensor | None = None) -> Fp8Rows:
    """`[N, C]` to e4m3, each row scaled by its largest element, in one launch.

    Args:
        x: `[N, C]` bfloat16, float16 or float32. Rows of zeros give zeros.
        column_scale: `[C, 1]` float32; the columns are multiplied by it first.
    """
    if not takes_fused_path(x, x):
        return Fp8Rows(*reference.quantize_rows(x, column_scale))
    rows, stride = as_rows(x)
    N, C = x.shape
    values = torch.empty((N, C), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((N, 1), dtype=torch.float32, device=x.device)
    BLOCK_C = triton.next_power_of_2(C)
    num_warps = min(MAX_WARPS, floor_power_of_2(BLOCK_C // (32 * PER_THREAD)))
    with torch.cuda.device_of(x):
        _quantize_kernel[(N,)](
            rows, column_scale, values, scale, stride, C, BLOCK_C, num_warps=max(1, num_warps)
        )
    return Fp8Rows(values, scale)


def fp8_linear(x: Fp8Rows, weight: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """x Wᵀ: `[N, O]` in `dtype` from `[N, I]` and `[O, I]`, accumulated in float32.

    On a GPU I and O are multiples of 16 and `dtype` is bfloat16.
    """
    if not x.values.is_cuda:
        return reference.fp8_linear(x, weight, dtype)
    return _scaled_mm(x, weight.values, weight.scale, dtype)


def fp8_linear_backward(g: Tensor, weight: Fp8Rows) -> Tensor:
    """g W: `[N, I]`, the gradient of x, from `[N, O]` and `[O, I]`.

    The sum runs over the rows of W, each with its own scale, so g takes in the scales before it is quantised.
    """
    if not g.is_cuda:
        return reference.fp8_linear_backward(g, weight)
    g_rows = quantize_rows(g, weight.scale)
    ones = weight.scale.new_ones((weight.values.shape[1], 1))
    return _scaled_mm(g_rows, _transposed(weight.values), ones, g.dtype)


def _scaled_mm(x: Fp8Rows, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(
        x.values, values.t(), scale_a=x.scale, scale_b=scale.t(), out_dtype=dtype, use_fast_accum=True
    )


def _transposed(values: Tensor) -> Tensor:
    """`[C, R]` contiguous from `[R, C]`: tensor cores take e4m3 only with the summed dim last."""
    R, C = values.shape
    transposed = values.new_empty((C, R))
    grid = (triton.cdiv(R, _TILE), triton.cdiv(C, _TILE))
    with torch.cuda.device_of(values):
        _transpose_kernel[grid](
            values.view(torch.uint8), transposed.view(torch.uint8), R, C, _TILE, num_warps=4
        )
    return transposed


@jit
def _quantize_kernel(x, column_scale, values, scale, x_sr, C, BLOCK_C: tl.constexpr):
    """values `[N, C]` and scale `[N, 1]` of x. Grid: N rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_C)
    mask = column < C
    x_C = tl.load(x + row * x_sr + column, mask=mask, other=0.0).to(tl.float32)
    if column_scale is not None:
        x_C *= tl.load(column_scale + column, mask=mask, other=0.0)
    s = tl.maximum(tl.max(tl.abs(x_C)) / 448.0, 1e-30)
    q_C = tl.clamp(x_C * tl.div_rn(1.0, s), -448.0, 448.0)  # a division for every element would cost more
    tl.store(values + row * C + column, q_C.to(tl.float8e4nv), mask=mask)
    tl.store(scale + row, s)


@jit
def _transpose_kernel(values, out, R, C, TILE: tl.constexpr):
    """out `[C, R]`: values `[R, C]`. Grid: tiles of TILE rows and TILE columns."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < R)[:, None] & (column < C)[None, :]
    tile = tl.load(values + row.to(tl.int64)[:, None] * C + column[None, :], mask=inside)
    tl.store(out + column.to(tl.int64)[:, None] * R + row[None, :], tl.trans(tile), mask=tl.trans(inside))

"""Quantise rows to eight bits, multiply them, and dequantise eight and four bits.

fp8: x ≈ q * s, q in e4m3 (Micikevicius et al. 2022, "FP8 formats for deep learning") and one float32 scale
s = max|x| / 448 for every row. One GEMM gives the gradient of an input that several layers share: their
gradients lie side by side in one matrix, and so do their transposed weights. The sum is rounded to 16 bits
once.

Four bits, as in bitsandbytes: x = code[q] * s, with s = s₈-code[s₈] * s' + offset if the scales are in eight
bits (Dettmers et al. 2023, "QLoRA", section 3, "Double Quantization"). n blocks with one scale each; two
elements a byte, the first in the upper half. bitsandbytes dequantises the scales in two launches of their
own. MXFP4 is the same with the halves exchanged, and code[s₈] a power of two (OCP 2023, "Microscaling Formats
(MX) Specification", section 5).

Shapes: N tokens, I inputs, O outputs of a weight `[O, I]`, ΣO those of all weights over one input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from unsloth_pack.kernels import reference
from unsloth_pack.kernels.arguments import NestedScales
from unsloth_pack.kernels.launch import (
    FUSED_DTYPES,
    as_rows,
    floor_power_of_2,
    jit,
    takes_fused_path,
    tl,
    triton,
)

_ELEMENTS = 4096  # of a program that dequantises eight bits
_FOUR_BIT_ELEMENTS, _FOUR_BIT_WARPS = 2048, 2  # of one that dequantises four
_MAX_COLUMNS = 512  # of a program that dequantises
_TILE = 64  # rows and columns of a program that transposes
_HELD = 64  # elements that a thread holds while a program quantises a row
_MAX_WARPS = 32  # a program holds the gradients of gate and up of a whole row


class Fp8Rows(NamedTuple):
    """A matrix in e4m3."""

    values: Tensor  # `[N, C]` float8_e4m3fn, contiguous
    scale: Tensor  # `[N, 1]` float32; values * scale is what they stand for

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return `[N, C]` in `dtype`, computed in float32 and rounded once, in one launch."""
        if not takes_fused_path(self.scale, self.scale) or dtype not in FUSED_DTYPES:
            return reference.dequantize_rows(self.values, self.scale, dtype)
        (N, C), out = self.values.shape, self.values.new_empty(self.values.shape, dtype=dtype)
        block = min(_MAX_COLUMNS, triton.next_power_of_2(C))
        rows = _ELEMENTS // block
        _dequantize_kernel[(triton.cdiv(N, rows), triton.cdiv(C, block))](
            self.values, self.scale, out, N, C, rows, block, num_warps=4
        )
        return out


class Fp8Columns(NamedTuple):
    """Weights over one input, transposed and side by side, for the gradient of that input."""

    values: Tensor  # `[I, ΣO]` float8_e4m3fn, contiguous
    scales: tuple[Tensor, ...]  # of the columns: `[O, 1]` float32 of each weight


def quantize_rows(*parts: Tensor, column_scales: Sequence[Tensor] | None = None) -> Fp8Rows:
    """Quantise `[N, C]` to e4m3, each row scaled by its largest element, in one launch.

    Args:
        parts: the matrix, or its columns in several parts `[N, C_p]` of one dtype: bfloat16, float16 or
            float32. Rows of zeros give zeros.
        column_scales: `[C_p, 1]` float32 for each part; columns are multiplied by them first.
    """
    if not all(takes_fused_path(part, part) for part in parts):
        return Fp8Rows(*reference.quantize_rows(*parts, column_scales=column_scales))
    rows, strides = zip(*map(as_rows, parts), strict=True)
    N, widths = len(parts[0]), tuple(part.shape[1] for part in parts)
    values = parts[0].new_empty((N, sum(widths)), dtype=torch.float8_e4m3fn)
    scale = parts[0].new_empty((N, 1), dtype=torch.float32)
    blocks = tuple(map(triton.next_power_of_2, widths))
    num_warps = min(_MAX_WARPS, floor_power_of_2(sum(blocks) * len(parts) // (32 * _HELD)))
    columns = (None,) * len(parts) if column_scales is None else tuple(column_scales)
    _quantize_kernel[(N,)](
        rows, strides, widths, columns, values, scale, sum(widths), blocks, num_warps=num_warps
    )
    return Fp8Rows(values, scale)


def fp8_linear(x: Fp8Rows, weight: Fp8Rows, out: Tensor) -> Tensor:
    """Write x Wᵀ to out, from `[N, I]` and `[O, I]`, accumulated in float32.

    Args:
        out: `[N, O]`, contiguous. On a GPU bfloat16, and I and O multiples of 16.
    """
    if not out.is_cuda:
        return reference.fp8_linear(x, weight, out)
    return _scaled_mm(x, weight.values, weight.scale, out)


def fp8_transposed(weights: Sequence[Fp8Rows]) -> Fp8Columns:
    """Transpose weights `[O, I]` over one input for `fp8_linear_backward`, in one launch.

    Tensor cores take e4m3 only with the summed dim last.
    """
    values, scales = zip(*weights, strict=True)
    if not takes_fused_path(scales[0], scales[0]):
        return Fp8Columns(*reference.fp8_transposed(weights))
    C, heights = values[0].shape[1], tuple(map(len, values))
    out = values[0].new_empty((C, sum(heights)))
    grid = (sum(triton.cdiv(height, _TILE) for height in heights), triton.cdiv(C, _TILE))
    as_bytes = tuple(x.view(torch.uint8) for x in values)
    _transpose_kernel[grid](as_bytes, heights, out.view(torch.uint8), sum(heights), C, _TILE, num_warps=4)
    return Fp8Columns(out, scales)


def fp8_linear_backward(gs: Sequence[Tensor], weights: Fp8Columns, out: Tensor) -> Tensor:
    """Write Σ g W, the gradient of x, to out.

    The sum runs over the rows of every W, each with a scale, so g is multiplied by them before it is
    quantised.
    One scale for a row of all g is as exact as one each: small elements of the row are small in the sum.

    Args:
        gs: `[N, O]` of each weight.
        out: `[N, I]`, contiguous, on a GPU bfloat16.
    """
    if not out.is_cuda:
        return reference.fp8_linear_backward(gs, weights, out)
    g = quantize_rows(*gs, column_scales=weights.scales)
    return _scaled_mm(g, weights.values, weights.scales[0].new_ones((out.shape[1], 1)), out)


def _scaled_mm(x: Fp8Rows, values: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    scales = (x.scale, scale.t())
    torch._scaled_mm(x.values, values.t(), *scales, out_dtype=out.dtype, use_fast_accum=True, out=out)
    return out


@jit
def _quantize_kernel(parts, strides, widths, column_scales, values, scale, C, BLOCKS: tl.constexpr):
    """Write values `[N, C]` and scale `[N, 1]` of the parts side by side. Grid: N rows."""
    row = tl.program_id(0).to(tl.int64)
    largest = 0.0
    loaded = tl.tuple(())
    for i in tl.static_range(len(parts)):
        column = tl.arange(0, BLOCKS[i])
        x_C = tl.load(parts[i] + row * strides[i] + column, mask=column < widths[i], other=0.0).to(tl.float32)
        if column_scales[i] is not None:
            x_C *= tl.load(column_scales[i] + column, mask=column < widths[i], other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x_C)))
        loaded += (x_C,)
    s = tl.maximum(largest / 448.0, 1e-30)
    inverse = tl.div_rn(1.0, s)  # a division for every element would cost more
    start = values + row * C
    for i in tl.static_range(len(parts)):
        column = tl.arange(0, BLOCKS[i])
        q_C = tl.clamp(loaded[i] * inverse, -448.0, 448.0)
        tl.store(start + column, q_C.to(tl.float8e4nv), mask=column < widths[i])
        start += widths[i]
    tl.store(scale + row, s)


@jit(do_not_specialize=["N"])
@no_type_check
def _dequantize_kernel(values, scale, out, N, C, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write out `[N, C]`. Grid: blocks of rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < N)[:, None] & (column < C)[None, :]
    places = row[:, None] * C + column[None, :]
    x = tl.load(values + places, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(scale + row, mask=row < N, other=0.0)
    tl.store(out + places, (x * s[:, None]).to(out.dtype.element_ty), mask=inside)


@jit
def _transpose_kernel(parts, heights, out, R, C, TILE: tl.constexpr):
    """Write out `[C, R]`: the transposed parts side by side. Grid: tiles of all parts' rows, of columns."""
    tile = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    start = out
    for i in tl.static_range(len(parts)):
        n_tiles = tl.cdiv(heights[i], TILE)
        if (tile >= 0) & (tile < n_tiles):
            row = tile * TILE + tl.arange(0, TILE)
            inside = (row < heights[i])[:, None] & (column < C)[None, :]
            x = tl.load(parts[i] + row.to(tl.int64)[:, None] * C + column[None, :], mask=inside)
            place = start + column.to(tl.int64)[:, None] * R + row[None, :]
            tl.store(place, tl.trans(x), mask=tl.trans(inside))
        tile -= n_tiles
        start += heights[i]


def dequantize_4bit(
    packed: Tensor,
    code: Tensor,
    scales: Tensor | NestedScales,
    block: int,
    dtype: torch.dtype,
    lower_first: bool = False,
) -> Tensor:
    """Dequantise four-bit elements, computed in float32 and rounded once.

    Args:
        packed: `[n * block / 2]` uint8.
        code: `[16]` float32, the meaning of each of the sixteen values.
        scales: `[n]` float32, one for each block, or these in eight bits.
        block: elements of a block, a power of 2 from 32 on.
        dtype: of the result.
        lower_first: True if the first of two elements is in the lower half of their byte, as in MXFP4.

    Returns:
        `[n * block]`, bit for bit as by bitsandbytes.
    """
    n = len(scales.values if isinstance(scales, NestedScales) else scales)
    if not takes_fused_path(code, code):
        return reference.dequantize_4bit(packed, code, scales, block, dtype, lower_first)
    out = torch.empty(n * block, dtype=dtype, device=packed.device)
    blocks = max(1, _FOUR_BIT_ELEMENTS // block)
    parts = (*scales[:4], scales.group) if isinstance(scales, NestedScales) else (scales, None, None, None, 1)
    _dequantize_nf4_kernel[(triton.cdiv(n, blocks),)](
        *(packed, code, *parts, out, n, blocks, block // 2, lower_first),
        num_warps=_FOUR_BIT_WARPS,
        enable_fp_fusion=False,  # bitsandbytes rounds the product before it adds the offset
    )
    return out


@jit(do_not_specialize=["n"])
@no_type_check
def _dequantize_nf4_kernel(
    packed, code, scales, scale_code, outer_scales, offset, GROUP: tl.constexpr, out, n,
    BLOCKS: tl.constexpr, PAIRS: tl.constexpr, LOWER_FIRST: tl.constexpr,
):  # fmt: skip
    """Write out `[n, 2 * PAIRS]`. Grid: BLOCKS blocks each."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < n
    scale = tl.load(scales + block, mask=exists, other=0)
    if scale_code is not None:
        outer = tl.load(outer_scales + block // GROUP, mask=exists, other=0.0)
        scale = tl.load(scale_code + scale.to(tl.int32)) * outer + tl.load(offset)
    places = block[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    pairs = tl.load(packed + places, mask=exists[:, None], other=0).to(tl.int32)
    upper = tl.load(code + (pairs >> 4)) * scale[:, None]
    lower = tl.load(code + (pairs & 15)) * scale[:, None]
    elements = tl.interleave(lower, upper) if LOWER_FIRST else tl.interleave(upper, lower)
    elements = elements.to(out.dtype.element_ty)
    where = block[:, None] * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
    tl.store(out + where, elements, mask=exists[:, None])

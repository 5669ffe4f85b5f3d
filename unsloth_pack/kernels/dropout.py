"""Dropout whose mask is never stored: it is drawn again from its seed, forward and backward.

Element (n, c) of C columns takes word c // Q, with Q = ⌈C / 4⌉, of the four that Philox makes of the counter
(c mod Q, n) and the seed; it is kept where that word is at least p · 2³². So one call draws for four runs of
columns, each contiguous, and rows may be computed in tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .launch import as_rows, jit, takes_fused_path, tl

_BLOCK = 1024  # columns of each of the four runs that a program takes
_WARPS = 4


def dropout(x: Tensor, seed: Tensor, p: float, first_row: int = 0, add_to: Tensor | None = None) -> Tensor:
    """x / (1 - p) where an element is kept, else 0; no autograd.

    Args:
        x: `[N, C]`, bfloat16, float16 or float32; float64 takes the reference path.
        seed: an int64 on x's device, which is not waited for. The same seed keeps the same elements.
        p: probability that an element is dropped, in [0, 1].
        first_row: how many rows of the mask lie before those of x, which may be a tile.
        add_to: `[N, C]`, contiguous, of x's dtype: the result is added to it in place.

    Returns:
        A fresh tensor of x's shape and dtype, or `add_to`; computed in float32 and rounded once.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or p is no probability.

    Source: Srivastava et al. 2014, "Dropout"; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
    3" (Philox 4x32-10).
    """
    _check(x, seed, p, add_to)
    if not takes_fused_path(x, x):
        return reference.dropout(x, seed, p, first_row, add_to)
    n_rows, n_columns = x.shape
    rows, stride = as_rows(x)
    out = x.new_empty(x.shape) if add_to is None else add_to
    quarter = -(-n_columns // 4)
    blocks = -(-quarter // _BLOCK)
    with torch.cuda.device_of(x):
        _dropout_kernel[(n_rows * blocks,)](
            rows, seed, add_to, out, n_columns, stride, first_row,
            reference.dropout_threshold(p), 1 / (1 - p) if p < 1 else 0.0, _BLOCK, num_warps=_WARPS,
            enable_fp_fusion=False,  # the oracle's bits: it rounds what is kept before it adds
        )  # fmt: skip
    return out


def _check(x: Tensor, seed: Tensor, p: float, add_to: Tensor | None) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x is {[*x.shape]} of {x.dtype}: pass rows, [N, C], of a floating dtype")
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != x.device:
        raise ValueError(f"seed is {seed.dtype} on {seed.device}: pass one int64 on {x.device}")
    if not 0 <= p <= 1:
        raise ValueError(f"p is {p!r}: pass a probability")
    if add_to is not None and (add_to.shape, add_to.dtype, add_to.device) != (x.shape, x.dtype, x.device):
        raise ValueError(f"add_to is {[*add_to.shape]} of {add_to.dtype}: pass one like x")
    if add_to is not None and not add_to.is_contiguous():
        raise ValueError("add_to is not contiguous: its rows are written one after the other")


@jit
def _dropout_kernel(x, seed, add_to, out, C, x_sr, first_row, threshold, scale, BLOCK: tl.constexpr):
    """out `[N, C]`: x where it is kept, times scale, plus add_to where not None.

    Grid: for each row in turn, the blocks of BLOCK of its C / 4 counters.
    """
    quarter = tl.cdiv(C, 4)
    blocks = tl.cdiv(quarter, BLOCK)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    counter = block * BLOCK + tl.arange(0, BLOCK)
    words = tl.philox(tl.load(seed), counter, first_row + row, 0, 0)
    row = row.to(tl.int64)
    for run in tl.static_range(4):
        col = run * quarter + counter
        mask = (counter < quarter) & (col < C)
        kept = mask & (words[run].to(tl.int64) >= threshold)
        dropped = tl.load(x + row * x_sr + col, mask=kept, other=0.0).to(tl.float32) * scale
        if add_to is not None:
            dropped += tl.load(add_to + row * C + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * C + col, dropped.to(out.dtype.element_ty), mask=mask)

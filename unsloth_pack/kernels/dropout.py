"""Dropout without a stored mask: forward and backward draw it from its seed.

With Q = ⌈C / 8⌉ for C columns, Philox turns the counter (c mod Q, n) and the seed into eight 16-bit numbers.
Element (n, c) takes number c // Q and stays where that is at least p · 2¹⁶. So one counter serves eight
elements of a row, in eight contiguous runs of Q columns, and rows may be computed in tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsloth_pack.kernels import reference
from unsloth_pack.kernels.launch import as_rows, jit, takes_fused_path, tl, triton

_MAX_COUNTERS = 1024  # of a program
_PER_THREAD = 8  # counters: a 16-byte load of bf16 in each run


def dropout(x: Tensor, seed: Tensor, p: float, first_row: int = 0, add_to: Tensor | None = None) -> Tensor:
    """Drop elements with probability p and scale the others by 1 / (1 - p). Without autograd.

    Args:
        x: `[N, C]`, bfloat16, float16 or float32; float64 takes the reference path.
        seed: one int64 on x's device; the host does not wait for it. The same seed drops the same elements.
        p: in [0, 1]; rounded to a multiple of 2⁻¹⁶.
        first_row: the mask's row for the first row of x, if x is a tile of a longer input.
        add_to: `[N, C]`, contiguous, of x's dtype: the result is added to it in place.

    Returns:
        A fresh tensor of x's shape and dtype, or `add_to`; computed in float32 and rounded once.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or p is no probability.

    Source: Srivastava et al. 2014, "Dropout"; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
    3" (Philox 4x32-7, the fewest rounds that pass their tests).
    """
    _check(x, seed, p, add_to)
    if not takes_fused_path(x, x):
        return reference.dropout(x, seed, p, first_row, add_to)
    n_rows, n_columns = x.shape
    rows, stride = as_rows(x)
    out = x.new_empty(x.shape) if add_to is None else add_to
    run = -(-n_columns // 8)
    block = min(triton.next_power_of_2(run), _MAX_COUNTERS)
    with torch.cuda.device_of(x):
        _dropout_kernel[(n_rows * triton.cdiv(run, block),)](
            rows, seed, add_to, out, n_columns, run, stride, first_row,
            reference.dropout_threshold(p), reference.dropout_scale(p), block,
            num_warps=max(1, block // (32 * _PER_THREAD)),
            enable_fp_fusion=False,  # the oracle rounds the scaled element before it adds
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


@jit(do_not_specialize=["first_row"])
def _dropout_kernel(x, seed, add_to, out, C, RUN, x_sr, first_row, threshold, scale, BLOCK: tl.constexpr):
    """Write out `[N, C]`: the dropout of x, plus add_to unless None.

    Grid: for each row in turn, the blocks of BLOCK of its RUN = ⌈C / 8⌉ counters.
    """
    blocks = tl.cdiv(RUN, BLOCK)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    counter = block * BLOCK + tl.arange(0, BLOCK)
    words = tl.philox(tl.load(seed), counter, first_row + row, 0, 0, n_rounds=7)
    row = row.to(tl.int64)
    for run in tl.static_range(8):
        col = run * RUN + counter
        mask = (counter < RUN) & (col < C)
        number = words[run % 4] >> 16 * (run // 4) & 0xFFFF
        whole = tl.load(x + row * x_sr + col, mask=mask, other=0.0)  # a mask of single elements costs width
        dropped = tl.where(number.to(tl.int32) >= threshold, whole.to(tl.float32) * scale, 0.0)
        if add_to is not None:
            dropped += tl.load(add_to + row * C + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * C + col, dropped.to(out.dtype.element_ty), mask=mask)

"""The product in a gated MLP of LoRA layers, with the adapters' part added as its tiles are read.

    product = act(gate + s_g L_g R_gᵀ) * (up + s_u L_u R_uᵀ)

A GEMM that adds the adapter's part to `gate` would read and write all of it once more. A kernel that reads
`gate` anyway adds the part to a tile in registers, where it costs the reading of two narrow matrices. The
backward kernel likewise adds the adapter's part of down to the gradient that it reads.

N rows of F features, r of a part's rank, in tiles of `[ROWS, COLUMNS]`. A program goes down TILES of them and
loads the next ones while it computes, so that both kernels run at the speed of the device's memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .gated import check_gated, check_written, product_and_gradients
from .launch import as_rows, jit, takes_fused_path, tl, triton
from .reference import LowRank

_MOST_RANKS = 64  # of a part that are multiplied at a time
_MOST_LOADED_AHEAD = 92 * 2**10  # bytes: an Ada GPU has 99 KiB of shared memory for a program


class _Part(NamedTuple):
    """A `LowRank` as the kernels take it."""

    left: Tensor
    right: Tensor
    scale: float
    left_row: int
    right_row: int
    right_column: int
    rank: int


class _Blocks(NamedTuple):
    """A tile, how many of them a program has, how many it loads ahead, and the ranks that are multiplied at a
    time: what ran fastest on an H200."""

    rows: int
    columns: int
    tiles: int
    stages: int
    ranks: int

    @classmethod
    def of(cls, x: Tensor, *parts: LowRank) -> _Blocks:
        """For tensors like x, with at most two parts."""
        most = max((part.left.shape[1] for part in parts), default=1)
        ranks = min(_MOST_RANKS, max(16, triton.next_power_of_2(most)))  # `tl.dot` takes 16 and more
        rows, columns = (16, 128) if ranks <= 32 else (32, 64)
        of_parts = 2 * triton.cdiv(most, ranks) * ranks * (rows + columns)
        stage = x.element_size() * (2 * rows * columns + of_parts)  # bytes that are loaded ahead for a tile
        return cls(rows, columns, 8, 1 + min(2, _MOST_LOADED_AHEAD // stage), ranks)

    def grid(self, x: Tensor) -> tuple[int]:
        N, F = x.shape
        return (triton.cdiv(N, self.rows * self.tiles) * triton.cdiv(F, self.columns),)


def gated_lora_(
    gate: Tensor, up: Tensor, activation: str, of_gate: LowRank, of_up: LowRank, keep: bool
) -> Tensor:
    """act(gate + of_gate) * (up + of_up), without autograd.

    Args:
        gate, up: `[N, F]` of one dtype. With `keep` they become the sums: rows of one stride, each contiguous
            and apart from the others.
        activation: as for `gated`.
        of_gate, of_up: what is added to them.

    Returns:
        `[N, F]`, fresh and contiguous, computed in float32 from the rounded sums and rounded once.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, the activation is unknown, or sums cannot
            be written in place.

    Source: Hu et al. 2021, "LoRA", section 4.1; Shazeer 2020, "GLU Variants Improve Transformer", eq. 6.
    """
    check_gated(gate, up, activation)
    _check(gate, of_gate, of_up)
    if keep:
        check_written(gate.shape, gate=gate, up=up)
    if not takes_fused_path(gate, up):
        return reference.gated_lora_(gate, up, activation, of_gate, of_up, keep)
    (gate_rows, gate_sr), (up_rows, up_sr) = as_rows(gate), as_rows(up)
    out = gate.new_empty(gate.shape)
    blocks = _Blocks.of(gate, of_gate, of_up)
    with torch.cuda.device_of(gate):
        _gated_lora_kernel[blocks.grid(gate)](
            *(gate_rows, up_rows, out, *_part(of_gate), *_part(of_up), *gate.shape, gate_sr, up_sr),
            *(keep, activation, *blocks),
            num_warps=4,
        )
    return out


def gated_lora_backward_(
    g_out: Tensor,
    of_g_out: LowRank | None,
    gate: Tensor,
    up: Tensor,
    activation: str,
    g_gate: Tensor,
    g_up: Tensor,
) -> None:
    """The backward pass of act(gate) * up, which also makes the product again.

    Args:
        g_out: `[N, F]`; with `of_g_out` added, the gradient of the product. Overwritten by the product.
        of_g_out: what is added to g_out, or None.
        gate, up, activation: as for `gated`, of the dtype of g_out.
        g_gate, g_up: the gradients of gate and up are written there; may be gate and up themselves.

    Raises:
        ValueError: as for `gated_lora_`; or a tensor that is written to has another shape, or is not rows of
            one stride, each contiguous and apart from the others.
    """
    check_gated(gate, up, activation)
    check_written(gate.shape, g_out=g_out, g_gate=g_gate, g_up=g_up)
    parts = [] if of_g_out is None else [of_g_out]
    _check(gate, *parts)
    if not takes_fused_path(gate, up):
        reference.gated_lora_backward_(g_out, of_g_out, gate, up, activation, g_gate, g_up)
        return
    tensors, strides = zip(*map(as_rows, (g_out, gate, up, g_gate, g_up)), strict=True)
    # A part of rank 0 adds nothing, and its tensors are not read
    part = _Part(gate, gate, 0.0, 0, 0, 0, 0) if of_g_out is None else _part(of_g_out)
    blocks = _Blocks.of(gate, *parts)
    with torch.cuda.device_of(gate):
        _gated_lora_backward_kernel[blocks.grid(gate)](
            *(*tensors, *part, *gate.shape, *strides, activation, *blocks), num_warps=4
        )


def _part(of: LowRank) -> _Part:
    left = of.left if of.left.stride(1) == 1 else of.left.contiguous()
    right_row, right_column = of.right.stride()
    return _Part(left, of.right, float(of.scale), left.stride(0), right_row, right_column, left.shape[1])


def _check(x: Tensor, *parts: LowRank) -> None:
    """Raise ValueError unless the parts fit to x."""
    if x.dim() != 2:
        raise ValueError(f"gate is {[*x.shape]}: pass [N, F]")
    for left, right, _ in parts:
        if left.dim() != 2 or right.dim() != 2 or (len(left), len(right)) != x.shape:
            raise ValueError(f"a part of {[*left.shape]} and {[*right.shape]}: pass [N, r] and [F, r]")
        if left.shape[1] != right.shape[1] or not left.shape[1]:
            raise ValueError(f"a part has ranks {left.shape[1]} and {right.shape[1]}: pass one, above 0")
        if not left.dtype == right.dtype == x.dtype or not left.device == right.device == x.device:
            raise ValueError(
                f"a part is {left.dtype} and {right.dtype} on {left.device} and {right.device}: "
                f"it must be {x.dtype} on {x.device}, like gate"
            )


# F is specialised: Triton must know that 16 divides it, and the strides, for 16-byte accesses.


@jit(do_not_specialize=["N"])
def _gated_lora_kernel(
    gate, up, out,
    gate_left, gate_right, gate_scale, gl_sr, gr_sf, gr_sr, GATE_RANK: tl.constexpr,
    up_left, up_right, up_scale, ul_sr, ur_sf, ur_sr, UP_RANK: tl.constexpr,
    N, F, gate_sr, up_sr,
    KEEP: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """out `[N, F]`: the product; with KEEP gate and up become the sums. Grid: runs of tiles, row by row."""
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row, column, inside = _tile(tile, N, F, ROWS, COLUMNS, TILES)
        x = tl.load(gate + row * gate_sr + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_sr + column, mask=inside, other=0.0).to(tl.float32)
        x += _low_rank(gate_left, gate_right, gate_scale, row, column, N, F, gl_sr, gr_sf, gr_sr,
                       GATE_RANK, ROWS, COLUMNS, RANKS)  # fmt: skip
        u += _low_rank(up_left, up_right, up_scale, row, column, N, F, ul_sr, ur_sf, ur_sr,
                       UP_RANK, ROWS, COLUMNS, RANKS)  # fmt: skip
        kept_x, kept_u = x.to(gate.dtype.element_ty), u.to(up.dtype.element_ty)
        if KEEP:
            tl.store(gate + row * gate_sr + column, kept_x, mask=inside)
            tl.store(up + row * up_sr + column, kept_u, mask=inside)
        x, u = kept_x.to(tl.float32), kept_u.to(tl.float32)
        product, _gx, _gu = product_and_gradients(0.0, x, u, gate.dtype.element_ty, ACTIVATION)
        tl.store(out + row * F + column, product.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["N"])
def _gated_lora_backward_kernel(
    g_out, gate, up, g_gate, g_up,
    g_left, g_right, g_scale, left_sr, right_sf, right_sr, RANK: tl.constexpr,
    N, F, g_sr, gate_sr, up_sr, g_gate_sr, g_up_sr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """g_gate, g_up `[N, F]`: the gradients of gate and up; g_out becomes the product. Grid: as above."""
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row, column, inside = _tile(tile, N, F, ROWS, COLUMNS, TILES)
        g = tl.load(g_out + row * g_sr + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(gate + row * gate_sr + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_sr + column, mask=inside, other=0.0).to(tl.float32)
        if RANK > 0:
            g += _low_rank(g_left, g_right, g_scale, row, column, N, F, left_sr, right_sf, right_sr,
                           RANK, ROWS, COLUMNS, RANKS)  # fmt: skip
        product, gx, gu = product_and_gradients(g, x, u, gate.dtype.element_ty, ACTIVATION)
        tl.store(g_gate + row * g_gate_sr + column, gx.to(g_gate.dtype.element_ty), mask=inside)
        tl.store(g_up + row * g_up_sr + column, gu.to(g_up.dtype.element_ty), mask=inside)
        tl.store(g_out + row * g_sr + column, product.to(g_out.dtype.element_ty), mask=inside)


@jit
def _tile(tile, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """The rows `[ROWS, 1]` and columns `[1, COLUMNS]` of one of this program's tiles, both int64, and which
    elements exist."""
    n_columns = tl.cdiv(F, COLUMNS)
    first = (tl.program_id(0) // n_columns).to(tl.int64) * TILES + tile
    row = first * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % n_columns).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < N) & (column < F)


@jit
def _low_rank(
    left, right, scale, row, column, N, F, left_sr, right_sf, right_sr,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """scale * left rightᵀ, a tile of it."""
    part = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in tl.static_range(0, RANK, RANKS):
        rank_l = first + tl.arange(0, RANKS)[None, :]
        rank_r = first + tl.arange(0, RANKS)[:, None]
        l_tile = tl.load(left + row * left_sr + rank_l, mask=(row < N) & (rank_l < RANK), other=0.0)
        r_tile = tl.load(
            right + column * right_sf + rank_r * right_sr, mask=(column < F) & (rank_r < RANK), other=0.0
        )
        part = tl.dot(l_tile, r_tile, part, input_precision="ieee")
    return scale * part

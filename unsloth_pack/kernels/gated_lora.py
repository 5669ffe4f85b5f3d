"""The product of a gated MLP, also of LoRA layers. The low-rank parts are added to tiles in registers.

    product = act(gate + s_g L_g R_gᵀ) * (up + s_u L_u R_uᵀ)

A GEMM that adds the low-rank part to `gate` would read and write all of `gate` once more. This kernel reads
only the two narrow factors. The sums need not be stored: the backward kernel computes them again, and adds
down's low-rank part to the incoming gradient likewise. For small ranks it also sums the products with the
left factors, which the factors' gradients need. For large ranks, storing the sums is faster.

N rows of F features, rank r, in tiles of `[ROWS, COLUMNS]`. A program walks down TILES of them and loads the
next ones while it computes, so that both kernels run at the speed of the device's memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from unsloth_pack.kernels import reference
from unsloth_pack.kernels.arguments import LoraOutput, LowRank
from unsloth_pack.kernels.elementwise import product_and_gradients
from unsloth_pack.kernels.launch import (
    apply,
    as_rows,
    check_shapes,
    floor_power_of_2,
    jit,
    multiply,
    once_differentiable,
    takes_fused_path,
    tl,
    triton,
)

_MAX_RANKS = 64  # multiplied at a time
_MAX_SUMMED_RANK = 32  # of a part whose products a program sums in registers
_MIN_PROGRAMS = 1000  # to keep a GPU busy
_WARPS = 4
_MAX_PREFETCH = 92 * 2**10  # bytes: an Ada GPU has 99 KiB of shared memory for a program


class _Part(NamedTuple):
    """Hold a `LowRank` as the kernels take it."""

    left: Tensor
    right: Tensor
    scale: float
    left_row: int
    right_row: int
    right_column: int
    rank: int


class _Blocks(NamedTuple):
    """A tile's shape, tiles of a program, loads ahead, and ranks multiplied at a time."""

    rows: int
    columns: int
    tiles: int
    stages: int
    ranks: int

    @classmethod
    def choose(cls, x: Tensor, n_tensors: int, parts: list[_Part]) -> _Blocks:
        """Choose for a kernel that reads `n_tensors` tensors like x and the parts."""
        part_ranks = [part.rank for part in parts if part.rank] or [1]
        ranks = min(_MAX_RANKS, max(16, triton.next_power_of_2(max(part_ranks))))  # `tl.dot` takes 16 or more
        rows, columns = (16 if ranks <= 32 or len(part_ranks) == 3 else 32), 64
        factors = sum(triton.cdiv(rank, ranks) for rank in part_ranks) * ranks * (rows + columns)
        stage = x.element_size() * (n_tensors * rows * columns + factors)  # bytes loaded ahead for a tile
        return cls(rows, columns, 8, 1 + min(2, _MAX_PREFETCH // stage), ranks)

    def with_fewer_sums(self, x: Tensor) -> _Blocks:
        """Give each program more tiles, so that there are fewer sums to write."""
        most = x.numel() // (self.rows * self.columns * _MIN_PROGRAMS)
        return self._replace(tiles=min(32, max(8, floor_power_of_2(most))))

    def grid(self, x: Tensor) -> tuple[int]:
        N, F = x.shape
        return (triton.cdiv(N, self.rows * self.tiles) * triton.cdiv(F, self.columns),)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up, element by element.

    Args:
        gate, up: `[..., F]`, bfloat16, float16 or float32; float64 takes the reference path. Read in place if
            the last dim is contiguous and the others collapse into rows of one stride, as in the halves of a
            fused projection. Both are saved for the backward pass.
        activation: "silu", or "gelu_tanh" for the tanh approximation of GELU (transformers'
            `gelu_pytorch_tanh`).

    Returns:
        A fresh contiguous tensor of their shape and promoted dtype, computed in float32 and rounded once.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6 (SwiGLU, GEGLU); Hendrycks & Gimpel 2016,
    "Gaussian Error Linear Units", section 2 (the approximation).
    """
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation is {activation!r}: pass silu or gelu_tanh")
    check_shapes(gate=("*F", gate), up=("*F", up))
    if not takes_fused_path(gate, up):
        return reference.gated(gate, up, activation)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    return apply(_Gated, gate.to(dtype), up.to(dtype), activation)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        x, u = (LoraOutput(y.reshape(-1, y.shape[-1])) for y in (gate, up))
        return gated_lora_(x, u, activation, store=False).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        g, x, u = (LoraOutput(y.reshape(-1, y.shape[-1])) for y in (g_out, gate, up))
        g_gate, g_up = gate.new_empty(x.base.shape), up.new_empty(u.base.shape)
        gated_lora_backward_(g, x, u, ctx.activation, g_gate, g_up, overwrite=False)
        return g_gate.view(gate.shape), g_up.view(up.shape), None


def gated_lora_(gate: LoraOutput, up: LoraOutput, activation: str, store: bool) -> Tensor:
    """Compute act(gate) * up, without autograd.

    Args:
        gate, up: `[N, F]`, of one dtype. With `store` their bases become the sums: their rows then need one
            stride, must be contiguous and may not overlap.
        activation: as for `gated`.

    Returns:
        `[N, F]`, fresh and contiguous, computed in float32 from the rounded sums and rounded once.

    Source: Hu et al. 2021, "LoRA", section 4.1; Shazeer 2020, "GLU Variants Improve Transformer", eq. 6.
    """
    like = gate.base
    if not takes_fused_path(like, up.base):
        return reference.gated_lora_(gate, up, activation, store)
    (gate_rows, gate_sr), (up_rows, up_sr) = as_rows(gate.base), as_rows(up.base)
    out = like.new_empty(like.shape)
    parts = [_part(gate.low_rank, like), _part(up.low_rank, like)]
    blocks = _Blocks.choose(like, 2, parts)
    _gated_lora_kernel[blocks.grid(like)](
        *(gate_rows, up_rows, out, *parts[0], *parts[1], *like.shape, gate_sr, up_sr, store, activation),
        *blocks,
        num_warps=_WARPS,
    )
    return out


def gated_lora_backward_(
    g_out: LoraOutput,
    gate: LoraOutput,
    up: LoraOutput,
    activation: str,
    g_gate: Tensor,
    g_up: Tensor,
    overwrite: bool = True,
) -> list[Tensor | None]:
    """Run the backward pass of `gated_lora_`, and compute the product again.

    Args:
        g_out: `[N, F]`, the gradient of the product. Its base is overwritten by the product.
        gate, up, activation: as for `gated_lora_`, of the dtype of g_out.
        g_gate, g_up: the gradients of the sums are written there; may be the bases of gate and up.
        overwrite: False to leave g_out as it is; then it has no low-rank part.

    Returns:
        productᵀ left of g_out's low-rank part, g_gateᵀ left of gate's and g_upᵀ left of up's, `[F, r]` each,
        without the scales, in float32 (float64 for float64); None without that part.
    """
    like, added = gate.base, [g_out.low_rank, gate.low_rank, up.low_rank]
    if not takes_fused_path(like, up.base):
        return reference.gated_lora_backward_(g_out, gate, up, activation, g_gate, g_up, overwrite)
    tensors, strides = zip(*map(as_rows, (g_out.base, gate.base, up.base, g_gate, g_up)), strict=True)
    parts = [_part(part, like) for part in added]
    blocks, sums = _Blocks.choose(like, 3, parts), None
    if like.element_size() == 2 and 0 < max(part.rank for part in parts) <= _MAX_SUMMED_RANK:
        blocks = blocks.with_fewer_sums(like)
        shape = (triton.cdiv(len(like), blocks.rows * blocks.tiles), 3, like.shape[1], blocks.ranks)
        sums = torch.empty(shape, dtype=torch.float32, device=like.device)
    _gated_lora_backward_kernel[blocks.grid(like)](
        *(*tensors, sums, *parts[0], *parts[1], *parts[2], *like.shape, *strides, overwrite, activation),
        *blocks,
        num_warps=_WARPS,
    )
    if sums is not None:
        totals = zip(sums.sum(0), parts, strict=True)
        return [total[:, : part.rank] if part.rank else None for total, part in totals]
    return [_product(x, part) for x, part in zip((g_out.base, g_gate, g_up), added, strict=True)]


def _product(x: Tensor, part: LowRank | None) -> Tensor | None:
    """Compute xᵀ left in float32."""
    if part is None:
        return None
    product = torch.empty((x.shape[1], part.left.shape[1]), dtype=torch.float32, device=x.device)
    multiply(x.t(), part.left, product)
    return product


def should_store(rank: int) -> bool:
    """True if gate and up should be replaced by their sums with parts of this rank."""
    return rank > _MAX_SUMMED_RANK


def _part(low_rank: LowRank | None, like: Tensor) -> _Part:
    """Describe a low-rank part; without one, or with rank 0, its tensors are never read."""
    if low_rank is None or not low_rank.left.shape[1]:
        return _Part(like, like, 0.0, 0, 0, 0, 0)
    left, right, scale = low_rank
    left = left if left.stride(1) == 1 else left.contiguous()
    return _Part(left, right, float(scale), left.stride(0), right.stride(0), right.stride(1), left.shape[1])


# F is specialised: Triton must know that 16 divides it, and the strides, for 16-byte accesses. The strides of
# narrow factors are constants, because 16 does not divide a rank of 8.
@jit(do_not_specialize=["N"])
@no_type_check
def _gated_lora_kernel(
    gate, up, out,
    gate_left, gate_right, gate_scale,
    gl_sr: tl.constexpr, gr_sf: tl.constexpr, gr_sr: tl.constexpr, GATE_RANK: tl.constexpr,
    up_left, up_right, up_scale,
    ul_sr: tl.constexpr, ur_sf: tl.constexpr, ur_sr: tl.constexpr, UP_RANK: tl.constexpr,
    N, F, gate_sr, up_sr,
    STORE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write the product `[N, F]`; with STORE gate and up become the sums. Grid: runs of tiles, row by row."""
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row, column, inside = _tile(tile, N, F, ROWS, COLUMNS, TILES)
        x = tl.load(gate + row * gate_sr + column, mask=inside, other=0.0)
        u = tl.load(up + row * up_sr + column, mask=inside, other=0.0)
        x = _rounded_sum(x, gate_left, gate_right, gate_scale, row, column, N, F, gl_sr, gr_sf, gr_sr,
                         GATE_RANK, ROWS, COLUMNS, RANKS)  # fmt: skip
        u = _rounded_sum(u, up_left, up_right, up_scale, row, column, N, F, ul_sr, ur_sf, ur_sr,
                         UP_RANK, ROWS, COLUMNS, RANKS)  # fmt: skip
        if STORE:
            tl.store(gate + row * gate_sr + column, x.to(gate.dtype.element_ty), mask=inside)
            tl.store(up + row * up_sr + column, u.to(up.dtype.element_ty), mask=inside)
        product, _gx, _gu = product_and_gradients(0.0, x, u, gate.dtype.element_ty, ACTIVATION)
        tl.store(out + row * F + column, product.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["N"])
@no_type_check
def _gated_lora_backward_kernel(
    g_out, gate, up, g_gate, g_up, sums,
    g_left, g_right, g_scale,
    left_sr: tl.constexpr, right_sf: tl.constexpr, right_sr: tl.constexpr, RANK: tl.constexpr,
    gate_left, gate_right, gate_scale,
    gl_sr: tl.constexpr, gr_sf: tl.constexpr, gr_sr: tl.constexpr, GATE_RANK: tl.constexpr,
    up_left, up_right, up_scale,
    ul_sr: tl.constexpr, ur_sf: tl.constexpr, ur_sr: tl.constexpr, UP_RANK: tl.constexpr,
    N, F, g_sr, gate_sr, up_sr, g_gate_sr, g_up_sr,
    OVERWRITE: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write g_gate, g_up `[N, F]`: the gradients of the sums. OVERWRITE: g_out -> the product. As above.

    sums: None, or float32 `[runs of tiles, 3, F, RANKS]`: the products with the left factors; 0 without a
        part.
    """
    of_product_CR = tl.zeros([COLUMNS, RANKS], dtype=tl.float32)
    of_gate_CR = tl.zeros([COLUMNS, RANKS], dtype=tl.float32)
    of_up_CR = tl.zeros([COLUMNS, RANKS], dtype=tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):
        row, column, inside = _tile(tile, N, F, ROWS, COLUMNS, TILES)
        g = tl.load(g_out + row * g_sr + column, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(gate + row * gate_sr + column, mask=inside, other=0.0)
        u = tl.load(up + row * up_sr + column, mask=inside, other=0.0)
        if RANK > 0:
            g += _low_rank(g_left, g_right, g_scale, row, column, N, F, left_sr, right_sf, right_sr,
                           RANK, ROWS, COLUMNS, RANKS)  # fmt: skip
        x = _rounded_sum(x, gate_left, gate_right, gate_scale, row, column, N, F, gl_sr, gr_sf, gr_sr,
                         GATE_RANK, ROWS, COLUMNS, RANKS)  # fmt: skip
        u = _rounded_sum(u, up_left, up_right, up_scale, row, column, N, F, ul_sr, ur_sf, ur_sr,
                         UP_RANK, ROWS, COLUMNS, RANKS)  # fmt: skip
        product, gx, gu = product_and_gradients(g, x, u, gate.dtype.element_ty, ACTIVATION)
        product = product.to(g_out.dtype.element_ty)
        gx, gu = gx.to(g_gate.dtype.element_ty), gu.to(g_up.dtype.element_ty)
        tl.store(g_gate + row * g_gate_sr + column, gx, mask=inside)
        tl.store(g_up + row * g_up_sr + column, gu, mask=inside)
        if OVERWRITE:
            tl.store(g_out + row * g_sr + column, product, mask=inside)
        if sums is not None:  # beyond the last row the left factors are 0
            if RANK > 0:
                left = _left(g_left, row, 0, N, left_sr, RANK, RANKS)
                of_product_CR = tl.dot(product.T, left, of_product_CR)
            if GATE_RANK > 0:
                left = _left(gate_left, row, 0, N, gl_sr, GATE_RANK, RANKS)
                of_gate_CR = tl.dot(gx.T, left, of_gate_CR)
            if UP_RANK > 0:
                left = _left(up_left, row, 0, N, ul_sr, UP_RANK, RANKS)
                of_up_CR = tl.dot(gu.T, left, of_up_CR)
    if sums is not None:
        run = (tl.program_id(0) // tl.cdiv(F, COLUMNS)).to(tl.int64)
        column = tl.program_id(0) % tl.cdiv(F, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        at = sums + (run * 3 * F + column) * RANKS + tl.arange(0, RANKS)[None, :]
        tl.store(at, of_product_CR, mask=column < F)
        tl.store(at + F * RANKS, of_gate_CR, mask=column < F)
        tl.store(at + 2 * F * RANKS, of_up_CR, mask=column < F)


@jit
def _tile(tile, N, F, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """Return a tile's rows `[ROWS, 1]` and columns `[1, COLUMNS]`, both int64, and which elements exist."""
    n_columns = tl.cdiv(F, COLUMNS)
    first = (tl.program_id(0) // n_columns).to(tl.int64) * TILES + tile
    row = first * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % n_columns).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < N) & (column < F)


@jit
def _rounded_sum(
    x, left, right, scale, row, column, N, F, left_sr, right_sf, right_sr,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Compute x + scale * left rightᵀ in float32, rounded to x's dtype: forward and backward see one sum."""
    dtype: tl.constexpr = x.dtype
    total = x.to(tl.float32)
    if RANK > 0:
        total += _low_rank(left, right, scale, row, column, N, F, left_sr, right_sf, right_sr,
                           RANK, ROWS, COLUMNS, RANKS)  # fmt: skip
        total = total.to(dtype).to(tl.float32)
    return total


@jit
def _low_rank(
    left, right, scale, row, column, N, F, left_sr, right_sf, right_sr,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of scale * left rightᵀ."""
    part = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in tl.static_range(0, RANK, RANKS):
        rank_r = first + tl.arange(0, RANKS)[:, None]
        l_tile = _left(left, row, first, N, left_sr, RANK, RANKS)
        r_tile = tl.load(
            right + column * right_sf + rank_r * right_sr, mask=(column < F) & (rank_r < RANK), other=0.0
        )
        part = tl.dot(l_tile, r_tile, part, input_precision="ieee")
    return scale * part


@jit
def _left(left, row, first, N, left_sr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Load rows of a left factor: RANKS of its ranks from `first` on."""
    rank = first + tl.arange(0, RANKS)[None, :]
    return tl.load(left + row * left_sr + rank, mask=(row < N) & (rank < RANK), other=0.0)

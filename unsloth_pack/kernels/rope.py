"""QK-norm and rotary embedding of q and k in one launch, forward and backward.

A program owns a few tokens of both q and k, so it reads their angles once. The transposed rotation is the
rotation by -θ: the backward pass is the same kernel and needs neither q nor k. With a norm it reads them
again and recomputes their scale.

B rows of T tokens, N = B * T, H heads (HQ of q, HK of k), D head dim, R <= D rotated dims, P = D / 2 pairs.
A tile `x1_THP` holds the first dim of each pair for a few tokens and all their heads, `x2_THP` the second:

    dims of a head | 0 .. R/2 | R/2 .. R | R .. (R + D)/2 | (R + D)/2 .. D |
    in its pairs   |  first   |  second  |     first      |     second     |
    rotated by     |          θ          |  0: the tail stays as it is     |

Interleaved, the pairs of the first R dims are neighbours instead: 0 and 1, 2 and 3, and so on.
"""

from __future__ import annotations

import functools
from typing import Any, no_type_check

import torch
from torch import Tensor

from unsloth_pack.kernels import reference
from unsloth_pack.kernels.arguments import QKNorm
from unsloth_pack.kernels.launch import (
    MAX_WARPS,
    PER_THREAD,
    apply,
    check_dtypes,
    check_shapes,
    floor_power_of_2,
    jit,
    once_differentiable,
    share_programs,
    takes_fused_path,
    tl,
    triton,
)


@jit(do_not_specialize=["N", "T"])  # one compilation serves all row lengths
@no_type_check
def turn_kernel(
    q, k, q_out, k_out, cos, sin, position_ids, q_weight, k_weight,
    eps, offset, direction,
    N, T, q_sb, q_st, q_sh, q_sd, k_sb, k_st, k_sh, k_sd,
    lookup_sb, lookup_st, table_sr, table_sc,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write q_out, k_out `[N, H, D]`: q, k normed, unless the weights are None, and rotated by θ * direction.

    direction: 1.0 or -1.0; no constant, so that one compilation serves forward and backward.
    Grid: blocks of BLOCK_T tokens.
    """
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims1, dims2, mask_P = _pairs(D, R, INTERLEAVED, BLOCK_P)
    # The angles wait for the lookup: it goes first, they come last.
    row_T = _table_rows(position_ids, token_T, N, T, lookup_sb, lookup_st, table_sr)
    q1, q2 = _load_pairs(q, dims1, dims2, mask_P, token_T, N, T, q_sb, q_st, q_sh, q_sd, HQ, BLOCK_HQ)
    k1, k2 = _load_pairs(k, dims1, dims2, mask_P, token_T, N, T, k_sb, k_st, k_sh, k_sd, HK, BLOCK_HK)
    cos_TP, sin_TP = _load_angles(cos, sin, row_T, token_T, N, table_sc, R, BLOCK_P)
    sin_TP *= direction
    if q_weight is not None:
        wq1, wq2 = _load_weight(q_weight, offset, dims1, dims2, mask_P, HQ, D, FLAT, BLOCK_HQ)
        wk1, wk2 = _load_weight(k_weight, offset, dims1, dims2, mask_P, HK, D, FLAT, BLOCK_HK)
        q_scale = _inverse_rms(q1, q2, eps, HQ, D, FLAT)
        k_scale = _inverse_rms(k1, k2, eps, HK, D, FLAT)
        q1, q2 = q1 * q_scale * wq1, q2 * q_scale * wq2
        k1, k2 = k1 * k_scale * wk1, k2 * k_scale * wk2
    q1, q2 = _rotate(q1, q2, cos_TP, sin_TP)
    k1, k2 = _rotate(k1, k2, cos_TP, sin_TP)
    _store_pairs(q_out, q1, q2, dims1, dims2, mask_P, token_T, N, HQ, D, BLOCK_HQ)
    _store_pairs(k_out, k1, k2, dims1, dims2, mask_P, token_T, N, HK, D, BLOCK_HK)


@jit(do_not_specialize=["N", "T"])
@no_type_check
def norm_backward_kernel(
    gq_out, gk_out, q, k, gq, gk, cos, sin, position_ids, q_weight, k_weight, q_partial, k_partial,
    eps, offset,
    N, T, gq_sb, gq_st, gq_sh, gq_sd, gk_sb, gk_st, gk_sh, gk_sd,
    q_sb, q_st, q_sh, q_sd, k_sb, k_st, k_sh, k_sd,
    lookup_sb, lookup_st, table_sr, table_sc,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, FLAT: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write gq, gk `[N, H, D]`: the gradients of q, k.

    q_partial, k_partial: float32 `[programs, D or H * D]`, each program's share of the weights' gradients, or
        None.
    Grid: programs that each take STEPS blocks of BLOCK_T tokens in turn.
    """
    dims1, dims2, mask_P = _pairs(D, R, INTERLEAVED, BLOCK_P)
    wq1, wq2 = _load_weight(q_weight, offset, dims1, dims2, mask_P, HQ, D, FLAT, BLOCK_HQ)
    wk1, wk2 = _load_weight(k_weight, offset, dims1, dims2, mask_P, HK, D, FLAT, BLOCK_HK)
    if q_partial is not None:
        gwq1_THP = tl.zeros([BLOCK_T, BLOCK_HQ, BLOCK_P], dtype=tl.float32)
        gwq2_THP = tl.zeros([BLOCK_T, BLOCK_HQ, BLOCK_P], dtype=tl.float32)
        gwk1_THP = tl.zeros([BLOCK_T, BLOCK_HK, BLOCK_P], dtype=tl.float32)
        gwk2_THP = tl.zeros([BLOCK_T, BLOCK_HK, BLOCK_P], dtype=tl.float32)
    for step in range(STEPS):
        token_T = (tl.program_id(0) * STEPS + step) * BLOCK_T + tl.arange(0, BLOCK_T)
        row_T = _table_rows(position_ids, token_T, N, T, lookup_sb, lookup_st, table_sr)
        q1, q2 = _load_pairs(q, dims1, dims2, mask_P, token_T, N, T, q_sb, q_st, q_sh, q_sd, HQ, BLOCK_HQ)
        gq1, gq2 = _load_pairs(
            gq_out, dims1, dims2, mask_P, token_T, N, T, gq_sb, gq_st, gq_sh, gq_sd, HQ, BLOCK_HQ
        )
        k1, k2 = _load_pairs(k, dims1, dims2, mask_P, token_T, N, T, k_sb, k_st, k_sh, k_sd, HK, BLOCK_HK)
        gk1, gk2 = _load_pairs(
            gk_out, dims1, dims2, mask_P, token_T, N, T, gk_sb, gk_st, gk_sh, gk_sd, HK, BLOCK_HK
        )
        cos_TP, sin_TP = _load_angles(cos, sin, row_T, token_T, N, table_sc, R, BLOCK_P)
        gq1, gq2 = _rotate(gq1, gq2, cos_TP, -sin_TP)
        gk1, gk2 = _rotate(gk1, gk2, cos_TP, -sin_TP)
        q_scale = _inverse_rms(q1, q2, eps, HQ, D, FLAT)
        k_scale = _inverse_rms(k1, k2, eps, HK, D, FLAT)
        q1, q2, k1, k2 = q1 * q_scale, q2 * q_scale, k1 * k_scale, k2 * k_scale
        if q_partial is not None:
            gwq1_THP += gq1 * q1
            gwq2_THP += gq2 * q2
            gwk1_THP += gk1 * k1
            gwk2_THP += gk2 * k2
        gq1, gq2 = _through_rms(gq1 * wq1, gq2 * wq2, q1, q2, q_scale, HQ, D, FLAT)
        gk1, gk2 = _through_rms(gk1 * wk1, gk2 * wk2, k1, k2, k_scale, HK, D, FLAT)
        _store_pairs(gq, gq1, gq2, dims1, dims2, mask_P, token_T, N, HQ, D, BLOCK_HQ)
        _store_pairs(gk, gk1, gk2, dims1, dims2, mask_P, token_T, N, HK, D, BLOCK_HK)
    if q_partial is not None:
        _store_partial(q_partial, gwq1_THP, gwq2_THP, dims1, dims2, mask_P, HQ, D, FLAT, BLOCK_HQ)
        _store_partial(k_partial, gwk1_THP, gwk2_THP, dims1, dims2, mask_P, HK, D, FLAT, BLOCK_HK)


@jit
def _pairs(D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return the first and the second dim of each pair, and whether the pair exists: `[1, 1, P]`."""
    pair = tl.arange(0, BLOCK_P)[None, None, :]
    dims1, dims2 = pair, pair + D // 2
    if R < D:
        dims1 = tl.where(pair < R // 2, pair, pair + R // 2)
        dims2 = tl.where(pair < R // 2, pair + R // 2, pair + D // 2)
    if INTERLEAVED:
        dims1 = tl.where(pair < R // 2, 2 * pair, dims1)
        dims2 = tl.where(pair < R // 2, 2 * pair + 1, dims2)
    return dims1, dims2, pair < D // 2


@jit
def _load_pairs(
    x, dims1, dims2, mask_P, token_T, N, T, sb, st, sh, sd, H: tl.constexpr, BLOCK_H: tl.constexpr
):
    token = token_T[:, None, None]
    head = tl.arange(0, BLOCK_H)[None, :, None]
    mask_THP = (token < N) & (head < H) & mask_P
    # int64: a slice of a long fused row can exceed 2³¹ elements.
    start = x + (token // T).to(tl.int64) * sb + (token % T).to(tl.int64) * st + head.to(tl.int64) * sh
    x1_THP = tl.load(start + dims1.to(tl.int64) * sd, mask=mask_THP, other=0.0)
    x2_THP = tl.load(start + dims2.to(tl.int64) * sd, mask=mask_THP, other=0.0)
    return x1_THP.to(tl.float32), x2_THP.to(tl.float32)


@jit
def _store_pairs(
    out, x1_THP, x2_THP, dims1, dims2, mask_P, token_T, N,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = token_T[:, None, None]
    head = tl.arange(0, BLOCK_H)[None, :, None]
    mask_THP = (token < N) & (head < H) & mask_P
    start = out + token.to(tl.int64) * (H * D) + head * D
    tl.store(start + dims1, x1_THP.to(out.dtype.element_ty), mask=mask_THP)
    tl.store(start + dims2, x2_THP.to(out.dtype.element_ty), mask=mask_THP)


@jit
def _table_rows(position_ids, token_T, N, T, lookup_sb, lookup_st, table_sr):
    """Return where each token's row of cos and sin starts."""
    row_T = (token_T // T).to(tl.int64) * lookup_sb + (token_T % T).to(tl.int64) * lookup_st
    if position_ids is not None:
        row_T = tl.load(position_ids + row_T, mask=token_T < N, other=0).to(tl.int64) * table_sr
    return row_T


@jit
def _load_angles(cos, sin, row_T, token_T, N, table_sc, R: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load cos θ and sin θ of each pair, `[T, P]`; θ is 0 for the pairs of dims past R."""
    pair = tl.arange(0, BLOCK_P)[None, :]
    mask_TP = (token_T[:, None] < N) & (pair < R // 2)
    where = row_T[:, None] + pair.to(tl.int64) * table_sc
    cos_TP = tl.load(cos + where, mask=mask_TP, other=1.0).to(tl.float32)
    sin_TP = tl.load(sin + where, mask=mask_TP, other=0.0).to(tl.float32)
    return cos_TP, sin_TP


@jit
def _rotate(x1_THP, x2_THP, cos_TP, sin_TP):
    cos, sin = cos_TP[:, None, :], sin_TP[:, None, :]
    return x1_THP * cos - x2_THP * sin, x2_THP * cos + x1_THP * sin


@jit
def _mean(x_THP, H: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr):
    """Return a norm's mean from sums of pairs: `[T, H, 1]`, or over all heads `[T, 1, 1]` when flat."""
    total = tl.sum(x_THP, axis=2, keep_dims=True)
    if FLAT:
        total = tl.sum(total, axis=1, keep_dims=True) / H
    return total / D


@jit
def _inverse_rms(x1_THP, x2_THP, eps, H: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr):
    mean_square = _mean(x1_THP * x1_THP + x2_THP * x2_THP, H, D, FLAT)
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))  # tl.rsqrt approximates


@jit
def _through_rms(gn1, gn2, n1, n2, scale, H: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr):
    """Return the gradient of x from the gradient gn of n = x * scale: scale * (gn - n * mean(gn * n))."""
    mean = _mean(gn1 * n1 + gn2 * n2, H, D, FLAT)
    return scale * (gn1 - n1 * mean), scale * (gn2 - n2 * mean)


@jit
def _load_weight(
    weight, offset, dims1, dims2, mask_P,
    H: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Load offset + weight by pairs: `[1, 1, P]`, or `[1, H, P]` when flat."""
    if FLAT:
        head = tl.arange(0, BLOCK_H)[None, :, None]
        dims1, dims2, mask_P = head * D + dims1, head * D + dims2, (head < H) & mask_P
    w1 = tl.load(weight + dims1, mask=mask_P, other=0.0).to(tl.float32)
    w2 = tl.load(weight + dims2, mask=mask_P, other=0.0).to(tl.float32)
    return offset + w1, offset + w2


@jit
def _store_partial(
    partial, g1_THP, g2_THP, dims1, dims2, mask_P,
    H: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    g1, g2 = tl.sum(g1_THP, axis=0, keep_dims=True), tl.sum(g2_THP, axis=0, keep_dims=True)
    start = partial + tl.program_id(0) * (H * D if FLAT else D)
    if FLAT:
        head = tl.arange(0, BLOCK_H)[None, :, None]
        dims1, dims2, mask_P = head * D + dims1, head * D + dims2, (head < H) & mask_P
    else:
        g1, g2 = tl.sum(g1, axis=1, keep_dims=True), tl.sum(g2, axis=1, keep_dims=True)
    tl.store(start + dims1, g1, mask=mask_P)
    tl.store(start + dims2, g2, mask=mask_P)


_Tables = tuple[Tensor, Tensor, Tensor | None]  # cos, sin and position_ids

_TILE = 4096  # elements of a program


def rope_qk(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    qk_norm: QKNorm | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Norm q and k, with qk_norm, and rotate each pair of dims by its token's angle.

    Args:
        q, k: `[T, H, D]` or `[B, H, T, D]`, D even, any strides; k may have fewer heads. bfloat16, float16 or
            float32; float64 takes the reference path. Neither is copied nor written to.
        cos, sin: with position_ids tables `[positions, R]`; without them a row for each token: `[T, R]`,
            `[1, T, R]` or `[B, T, R]`. R even, R <= D; dims from R on pass through. The second half of R
            repeats the first, as in transformers, and is not read. Any float dtype. They get no gradient.
        position_ids: int32 or int64, `[T]`, `[1, T]` or `[B, T]`: each token's row of the tables, any order.
            Not checked against the tables' length: a check would synchronise the device.
        qk_norm: RMSNorm of q and k before the rotation. Its weights get gradients if they require them.
        interleaved: the pairs are the dims (2i, 2i + 1); otherwise (i, i + R/2).

    Returns:
        q and k rotated: fresh tensors of the inputs' shapes and dtype, computed in float32 and rounded once.
        From the kernel `[T, H, D]` is contiguous, `[B, H, T, D]` a view of a contiguous `[B, T, H, D]`.

    Source: Su et al. 2021 (RoFormer), eq. 34; Zhang & Sennrich 2019 (RMSNorm), eq. 4.
    """
    _check(q, k, cos, sin, position_ids, qk_norm)
    if not takes_fused_path(q, k):
        tables = cos.detach(), sin.detach()
        return reference.rope_qk(q, k, *tables, position_ids, qk_norm=qk_norm, interleaved=interleaved)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    weights: tuple[Tensor | None, Tensor | None] = (None, None)
    if qk_norm is not None:
        weights = qk_norm.q_weight.contiguous(), qk_norm.k_weight.contiguous()
    return apply(_RopeQK, q, k, cos, sin, position_ids, *weights, qk_norm, interleaved)


class _RopeQK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None,
        q_weight: Tensor | None, k_weight: Tensor | None, norm: QKNorm | None, interleaved: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        tables, weights = (cos, sin, position_ids), (q_weight, k_weight)
        ctx.save_for_backward(*tables, *weights, *(() if norm is None else (q, k)))
        ctx.options = norm, interleaved
        return _turn(q, k, tables, weights, norm, interleaved, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gq_out: Tensor, gk_out: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, position_ids, q_weight, k_weight, *qk = ctx.saved_tensors
        tables, weights = (cos, sin, position_ids), (q_weight, k_weight)
        norm, interleaved = ctx.options
        grads: tuple[Tensor | None, ...]
        if norm is None:
            grads = *_turn(gq_out, gk_out, tables, weights, norm, interleaved, -1.0), None, None
        else:
            q, k = qk
            trains = any(ctx.needs_input_grad[5:7])
            grads = _norm_backward(gq_out, gk_out, q, k, tables, weights, norm, interleaved, trains)
        return *grads[:2], None, None, None, *grads[2:], None, None


def _turn(
    q: Tensor, k: Tensor, tables: _Tables, weights: tuple[Tensor | None, ...], norm: QKNorm | None,
    interleaved: bool, direction: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return q and k normed, unless norm is None, and rotated by θ * direction."""
    (B, T, HQ, D), HK = _by_token(q).shape, k.shape[1]
    q_out, k_out = _empty_like(q), _empty_like(k)
    eps, offset, flat = (None, None, False) if norm is None else (norm.eps, norm.offset, norm.flat)
    blocks = _choose_blocks(HQ, HK, D, 1)
    turn_kernel[(-(-B * T // blocks["BLOCK_T"]),)](
        q, k, q_out, k_out, *tables, *weights, eps, offset, direction,
        B * T, T, *_by_token(q).stride(), *_by_token(k).stride(), *_get_table_strides(B, T, *tables),
        HQ=HQ, HK=HK, D=D, R=tables[0].shape[-1], INTERLEAVED=interleaved, FLAT=flat, **blocks,
    )  # fmt: skip
    return q_out, k_out


def _norm_backward(
    gq_out: Tensor, gk_out: Tensor, q: Tensor, k: Tensor, tables: _Tables, weights: tuple[Tensor, Tensor],
    norm: QKNorm, interleaved: bool, weight_grads: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of q, k and, with weight_grads (else None), of the norm's weights."""
    (B, T, HQ, D), HK = _by_token(q).shape, k.shape[1]
    gq, gk = _empty_like(q), _empty_like(k)
    blocks = _choose_blocks(HQ, HK, D, 3 if weight_grads else 2)
    programs, STEPS = -(-B * T // blocks["BLOCK_T"]), 1
    partials: list[Tensor | None] = [None, None]
    if weight_grads:
        programs, STEPS = share_programs(programs)
        partials = [w.new_empty((programs, len(w)), dtype=torch.float32) for w in weights]
    norm_backward_kernel[(programs,)](
        gq_out, gk_out, q, k, gq, gk, *tables, *weights, *partials, norm.eps, norm.offset, B * T, T,
        *(stride for x in (gq_out, gk_out, q, k) for stride in _by_token(x).stride()),
        *_get_table_strides(B, T, *tables),
        HQ=HQ, HK=HK, D=D, R=tables[0].shape[-1], INTERLEAVED=interleaved, FLAT=norm.flat, STEPS=STEPS,
        **blocks,
    )  # fmt: skip
    return gq, gk, *(x if x is None else x.sum(0).to(w.dtype) for x, w in zip(partials, weights, strict=True))


def _by_token(x: Tensor) -> Tensor:
    """View q or k as `[B, T, H, D]`."""
    return x.transpose(1, 2) if x.dim() == 4 else x[None]


def _get_table_strides(
    B: int, T: int, cos: Tensor, sin: Tensor, position_ids: Tensor | None
) -> tuple[int, ...]:
    """Return the strides of row and token in position_ids, else in cos, and cos's last two."""
    row, token = (cos[..., 0] if position_ids is None else position_ids).expand(B, T).stride()
    return row if B > 1 else 0, token, *cos.stride()[-2:]


def _empty_like(x: Tensor) -> Tensor:
    """Allocate `[T, H, D]`, or a contiguous `[B, T, H, D]` seen as `[B, H, T, D]`."""
    if x.dim() == 3:
        return x.new_empty(x.shape)
    _, H, T, D = x.shape
    return x.new_empty_strided(x.shape, (T * H * D, D, H * D, 1))


@functools.cache
def _choose_blocks(HQ: int, HK: int, D: int, tiles: int) -> dict[str, int]:
    """Choose tile sizes and warps for a kernel that holds `tiles` tiles of q and k at a time."""
    BLOCK_HQ, BLOCK_HK, BLOCK_P = (triton.next_power_of_2(n) for n in (HQ, HK, D // 2))
    per_token = tiles * (BLOCK_HQ + BLOCK_HK) * 2 * BLOCK_P
    BLOCK_T = floor_power_of_2(_TILE // per_token)
    num_warps = min(MAX_WARPS, floor_power_of_2(BLOCK_T * per_token // (32 * PER_THREAD)))
    sizes = {"BLOCK_T": BLOCK_T, "BLOCK_HQ": BLOCK_HQ, "BLOCK_HK": BLOCK_HK, "BLOCK_P": BLOCK_P}
    return {**sizes, "num_warps": num_warps}


def _check(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, norm: QKNorm | None
) -> None:
    """Raise ValueError unless shapes, dtypes and devices fit together."""
    of_q, of_k = ("THD", "TKD") if q.dim() == 3 else ("BHTD", "BKTD")
    check_shapes(q=(of_q, q), k=(of_k, k), cos=("*R", cos), sin=("*R", sin))
    check_dtypes(q=q, k=k)
    D, R = q.shape[-1], cos.shape[-1]
    if D % 2 or R % 2 or not 0 < R <= D:
        raise ValueError(f"cos has {R} columns for head dim {D}: both must be even, 0 < columns <= head dim")
    B, T = _by_token(q).shape[:2]
    rows = cos[..., 0] if position_ids is None else position_ids
    is_table = cos.dim() == 2 and rows.dtype in (torch.int32, torch.int64) and rows.device == q.device
    if rows.shape not in ((T,), (1, T), (B, T)) or not (position_ids is None or is_table):
        raise ValueError(
            f"cos is {[*cos.shape]} and position_ids {[*rows.shape]} of {rows.dtype}: pass a row for each "
            f"token, [{T}, R] or [{B}, {T}, R], or a table [P, R] and integers [{T}] or [{B}, {T}]"
        )
    weights = () if norm is None else ((q, norm.q_weight), (k, norm.k_weight))
    for x, weight in weights:
        features = x.shape[1] * D if norm is not None and norm.flat else D
        if weight.shape != (features,) or weight.device != x.device:
            raise ValueError(f"a weight of QKNorm is {[*weight.shape]}: pass [{features}] on {x.device}")

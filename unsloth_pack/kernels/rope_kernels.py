"""The Triton kernels of `rope_qk`: what one program computes.

N tokens, H heads (HQ of q, HK of k), D head dim, R <= D rotated dims, P = D / 2 pairs.
A tile `x1_THP` holds the first dim of each pair for a few tokens and all their heads, `x2_THP` the second:

    dims of a head | 0 .. R/2 | R/2 .. R | R .. (R + D)/2 | (R + D)/2 .. D |
    in its pairs   |  first   |  second  |     first      |     second     |
    turned by      |          θ          |  0: the tail, if any, is as it was  |

Interleaved, the pairs of the first R dims are neighbours instead: 0 and 1, 2 and 3, and so on.
"""

from __future__ import annotations

from .launch import jit, tl

_jit = jit(do_not_specialize=["N", "T"])  # one compilation serves all row lengths


@_jit
def turn_kernel(
    q, k, q_out, k_out, cos, sin, position_ids, q_weight, k_weight,
    eps, offset, direction,
    N, T, q_sb, q_st, q_sh, q_sd, k_sb, k_st, k_sh, k_sd,
    lookup_sb, lookup_st, table_sr, table_sc,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    INTERLEAVED: tl.constexpr, FLAT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HQ: tl.constexpr, BLOCK_HK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """q_out, k_out `[N, H, D]`: q, k normed, unless the weights are None, and turned by θ times direction.

    The direction, 1.0 or -1.0, is no constant: one compilation serves the forward and the backward pass.

    Grid: blocks of BLOCK_T tokens.
    """
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims1, dims2, mask_P = _pairs(D, R, INTERLEAVED, BLOCK_P)
    # The lookup heads a chain of two loads, so it goes first; the angles, which wait for it, come last.
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


@_jit
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
    """gq, gk `[N, H, D]`: the gradients of q, k.

    q_partial, k_partial: float32 `[programs, D or H * D]`, each program's share of the weights' gradients, or
        None where those are not wanted.
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


@_jit
def _pairs(D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_P: tl.constexpr):
    """The first and the second dim of each pair, and whether the pair exists: `[1, 1, P]`."""
    pair = tl.arange(0, BLOCK_P)[None, None, :]
    dims1, dims2 = pair, pair + D // 2
    if R < D:
        dims1 = tl.where(pair < R // 2, pair, pair + R // 2)
        dims2 = tl.where(pair < R // 2, pair + R // 2, pair + D // 2)
    if INTERLEAVED:
        dims1 = tl.where(pair < R // 2, 2 * pair, dims1)
        dims2 = tl.where(pair < R // 2, 2 * pair + 1, dims2)
    return dims1, dims2, pair < D // 2


@_jit
def _load_pairs(
    x, dims1, dims2, mask_P, token_T, N, T, sb, st, sh, sd, H: tl.constexpr, BLOCK_H: tl.constexpr
):
    token = token_T[:, None, None]
    head = tl.arange(0, BLOCK_H)[None, :, None]
    mask_THP = (token < N) & (head < H) & mask_P
    # int64 throughout: a slice of a long fused row passes 2³¹ elements.
    start = x + (token // T).to(tl.int64) * sb + (token % T).to(tl.int64) * st + head.to(tl.int64) * sh
    x1_THP = tl.load(start + dims1.to(tl.int64) * sd, mask=mask_THP, other=0.0)
    x2_THP = tl.load(start + dims2.to(tl.int64) * sd, mask=mask_THP, other=0.0)
    return x1_THP.to(tl.float32), x2_THP.to(tl.float32)


@_jit
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


@_jit
def _table_rows(position_ids, token_T, N, T, lookup_sb, lookup_st, table_sr):
    """Where each token's row of cos and sin starts."""
    row_T = (token_T // T).to(tl.int64) * lookup_sb + (token_T % T).to(tl.int64) * lookup_st
    if position_ids is not None:
        row_T = tl.load(position_ids + row_T, mask=token_T < N, other=0).to(tl.int64) * table_sr
    return row_T


@_jit
def _load_angles(cos, sin, row_T, token_T, N, table_sc, R: tl.constexpr, BLOCK_P: tl.constexpr):
    """cos θ and sin θ of each pair, `[T, P]`; θ is 0 for the pairs of dims past R."""
    pair = tl.arange(0, BLOCK_P)[None, :]
    mask_TP = (token_T[:, None] < N) & (pair < R // 2)
    where = row_T[:, None] + pair.to(tl.int64) * table_sc
    cos_TP = tl.load(cos + where, mask=mask_TP, other=1.0).to(tl.float32)
    sin_TP = tl.load(sin + where, mask=mask_TP, other=0.0).to(tl.float32)
    return cos_TP, sin_TP


@_jit
def _rotate(x1_THP, x2_THP, cos_TP, sin_TP):
    cos, sin = cos_TP[:, None, :], sin_TP[:, None, :]
    return x1_THP * cos - x2_THP * sin, x2_THP * cos + x1_THP * sin


@_jit
def _mean(x_THP, H: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr):
    """The mean over what one norm spans, given the sums of pairs: `[T, H, 1]`, or `[T, 1, 1]` when flat."""
    total = tl.sum(x_THP, axis=2, keep_dims=True)
    if FLAT:
        total = tl.sum(total, axis=1, keep_dims=True) / H
    return total / D


@_jit
def _inverse_rms(x1_THP, x2_THP, eps, H: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr):
    mean_square = _mean(x1_THP * x1_THP + x2_THP * x2_THP, H, D, FLAT)
    return tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))  # tl.rsqrt approximates


@_jit
def _through_rms(gn1, gn2, n1, n2, scale, H: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr):
    """The gradient of x from the gradient gn of n = x * scale: scale * (gn - n * mean(gn * n))."""
    mean = _mean(gn1 * n1 + gn2 * n2, H, D, FLAT)
    return scale * (gn1 - n1 * mean), scale * (gn2 - n2 * mean)


@_jit
def _load_weight(
    weight, offset, dims1, dims2, mask_P,
    H: tl.constexpr, D: tl.constexpr, FLAT: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """offset + weight by pairs: `[1, 1, P]`, or `[1, H, P]` when flat."""
    if FLAT:
        head = tl.arange(0, BLOCK_H)[None, :, None]
        dims1, dims2, mask_P = head * D + dims1, head * D + dims2, (head < H) & mask_P
    w1 = tl.load(weight + dims1, mask=mask_P, other=0.0).to(tl.float32)
    w2 = tl.load(weight + dims2, mask=mask_P, other=0.0).to(tl.float32)
    return offset + w1, offset + w2


@_jit
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

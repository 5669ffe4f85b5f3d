"""The Triton kernels of `varlen_attention`: tiles of one segment, forward and backward.

In the kernels, G query heads share a key head (a group). A program owns one key head and a tile of one
segment. A tile of queries has BLOCK_Q rows (Q): G heads for each of its TOKENS = BLOCK_Q // G tokens. A tile
of keys has BLOCK_J rows (J). So the heads of a group share the keys that a program loads. With `parents` a
tile of queries goes from the keys of its own segment to those of the parent and on up. A tile of keys goes on
from the queries of its own segment to those of all descendants. Loops skip tiles that are fully masked. They
mask every other tile: with a second, unmasked loop ptxas serialises the matrix products (triton 3.6, sm_90).
Logits are in units of ln 2, for `exp2`.

In 16 bits the weights of a query are exp2(z - shift), with its log-sum-exp as shift. In float32 they are
norm * exp2(z - shift), with its greatest logit as shift and 1 / the sum of exponentials as norm: a rounding
error of the log-sum-exp would be in all weights of a query and add up in sums over queries.
"""

from __future__ import annotations

from typing import no_type_check

from unsloth_pack.kernels.head import logit_and_slope
from unsloth_pack.kernels.launch import jit, tl


@jit(do_not_specialize=["n_segments", "window"])  # one compilation serves all rows and windows
@no_type_check
def forward_kernel(
    q, k, v, sinks, out, shift, norm, cu_seqlens, parents, n_segments, scale, softcap, window,
    q_sn, q_sh, k_sn, k_sh, v_sn, v_sh,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write out `[N, K * G, D]`, and shift and norm `[N, K * G]` of every query. norm: only in float32.

    sinks: `[K * G]` or None.
    Grid: tiles of queries times key heads. The last tiles see most keys and come first.
    """
    head, tile = tl.program_id(0) % K, (tl.num_programs(0) - 1 - tl.program_id(0)) // K
    segment, start, length, first = _segment_of_tile(cu_seqlens, n_segments, tile, BLOCK_Q // G)
    if first >= length:
        return
    token_Q, member_Q, is_query_Q = _queries(length - first, G, BLOCK_Q)
    q += (start + first) * q_sn + head * G * q_sh
    q_QD = _load(q, token_Q * q_sn + member_Q * q_sh, is_query_Q, D, BLOCK_D)
    k += head * k_sh
    v += head * v_sh

    max_Q = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    sum_Q = tl.zeros([BLOCK_Q], tl.float32)
    out_QD = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    BRANCHED: tl.constexpr = parents is not None
    if BRANCHED:
        run, n_keys, before = start, length, first
        while segment >= 0:
            max_Q, sum_Q, out_QD = _attend_run(
                q_QD, k, v, run, n_keys, before, token_Q, max_Q, sum_Q, out_QD, scale, softcap, window,
                k_sn, v_sn, D, CAPPED, WINDOWED, BRANCHED, BLOCK_Q // G, BLOCK_J, BLOCK_D,
            )  # fmt: skip
            segment, run, n_keys, before = _parent_of(parents, cu_seqlens, segment, before)
    else:
        max_Q, sum_Q, out_QD = _attend_run(
            q_QD, k, v, start, length, first, token_Q, max_Q, sum_Q, out_QD, scale, softcap, window,
            k_sn, v_sn, D, CAPPED, WINDOWED, BRANCHED, BLOCK_Q // G, BLOCK_J, BLOCK_D,
        )  # fmt: skip

    if sinks is not None:
        sink_Q = tl.load(sinks + head * G + member_Q).to(tl.float32) * 1.4426950408889634
        new_max_Q = tl.maximum(max_Q, sink_Q)
        decay_Q = tl.exp2(max_Q - new_max_Q)
        sum_Q = sum_Q * decay_Q + tl.exp2(sink_Q - new_max_Q)
        out_QD *= decay_Q[:, None]
        max_Q = new_max_Q
    place = (start + first) * (K * G) + head * G
    place_Q = token_Q * (K * G) + member_Q
    if norm is None:
        tl.store(shift + place + place_Q, max_Q + tl.log2(sum_Q), mask=is_query_Q)
    else:
        tl.store(shift + place + place_Q, max_Q, mask=is_query_Q)
        tl.store(norm + place + place_Q, 1.0 / sum_Q, mask=is_query_Q)
    _store(out + place * D, place_Q * D, out_QD / sum_Q[:, None], is_query_Q, D, BLOCK_D)


@jit
def _attend_run(
    q_QD, k, v, start, length, first, token_Q, max_Q, sum_Q, out_QD, scale, softcap, window, k_sn, v_sn,
    D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, BRANCHED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of one segment, whose token 0 stands `first` before the tile's first query."""
    begin, end = _keys_of_queries(first, length, window, WINDOWED, TOKENS, BLOCK_J)
    for key in range(begin, end, BLOCK_J):
        k_JD = _load_run(k, start + key, length - key, k_sn, D, BLOCK_J, BLOCK_D)
        z_QJ, _slope = _logit_and_slope(_dot(q_QD, k_JD.T), scale, softcap, CAPPED, k_JD.dtype)
        key_J = key + tl.arange(0, BLOCK_J)
        z_QJ = _hide(z_QJ, -float("inf"), first + token_Q[:, None], key_J[None, :], window, WINDOWED)
        if BRANCHED:
            z_QJ = tl.where(key_J[None, :] < length, z_QJ, -float("inf"))
        new_max_Q = tl.maximum(max_Q, tl.max(z_QJ, 1))
        shift_Q = new_max_Q
        if WINDOWED:  # a query may have seen no key yet
            shift_Q = tl.where(new_max_Q == -float("inf"), 0.0, new_max_Q)
        weight_QJ = tl.exp2(z_QJ - shift_Q[:, None])
        decay_Q = tl.exp2(max_Q - shift_Q)
        sum_Q = sum_Q * decay_Q + tl.sum(weight_QJ, 1)
        max_Q = new_max_Q
        v_JD = _load_run(v, start + key, length - key, v_sn, D, BLOCK_J, BLOCK_D)
        out_QD = _dot(weight_QJ.to(v_JD.dtype), v_JD, out_QD * decay_Q[:, None])
    return max_Q, sum_Q, out_QD


@jit(do_not_specialize=["n_segments", "window"])
@no_type_check
def q_gradient_kernel(
    q, k, v, out, shift, norm, g_out, gq, delta, cu_seqlens, parents, n_segments, scale, softcap, window,
    q_sn, q_sh, k_sn, k_sh, v_sn, v_sh, g_sn, g_sh,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write gq `[N, K * G, D]` and delta `[N, K * G]` = out · g_out. Grid: as `forward_kernel`."""
    head, tile = tl.program_id(0) % K, (tl.num_programs(0) - 1 - tl.program_id(0)) // K
    segment, start, length, first = _segment_of_tile(cu_seqlens, n_segments, tile, BLOCK_Q // G)
    if first >= length:
        return
    token_Q, member_Q, is_query_Q = _queries(length - first, G, BLOCK_Q)
    place = (start + first) * (K * G) + head * G
    place_Q = token_Q * (K * G) + member_Q
    g_out += (start + first) * g_sn + head * G * g_sh
    g_QD = _load(g_out, token_Q * g_sn + member_Q * g_sh, is_query_Q, D, BLOCK_D)
    out_QD = _load(out + place * D, place_Q * D, is_query_Q, D, BLOCK_D)
    delta_Q = tl.sum(out_QD.to(tl.float32) * g_QD.to(tl.float32), 1)
    tl.store(delta + place + place_Q, delta_Q, mask=is_query_Q)
    shift_Q, norm_Q = _shift_and_norm(shift, norm, place + place_Q, is_query_Q)
    q += (start + first) * q_sn + head * G * q_sh
    q_QD = _load(q, token_Q * q_sn + member_Q * q_sh, is_query_Q, D, BLOCK_D)
    k += head * k_sh
    v += head * v_sh

    gq_QD = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    BRANCHED: tl.constexpr = parents is not None
    if BRANCHED:
        while segment >= 0:
            gq_QD = _q_gradient_of_run(
                q_QD, k, v, g_QD, shift_Q, norm_Q, delta_Q, start, length, first, token_Q, gq_QD, scale,
                softcap, window, k_sn, v_sn, norm is not None, D, CAPPED, WINDOWED, BRANCHED, BLOCK_Q // G,
                BLOCK_J, BLOCK_D,
            )  # fmt: skip
            segment, start, length, first = _parent_of(parents, cu_seqlens, segment, first)
    else:
        gq_QD = _q_gradient_of_run(
            q_QD, k, v, g_QD, shift_Q, norm_Q, delta_Q, start, length, first, token_Q, gq_QD, scale,
            softcap, window, k_sn, v_sn, norm is not None, D, CAPPED, WINDOWED, BRANCHED, BLOCK_Q // G,
            BLOCK_J, BLOCK_D,
        )  # fmt: skip
    _store(gq + place * D, place_Q * D, gq_QD * scale, is_query_Q, D, BLOCK_D)


@jit
def _q_gradient_of_run(
    q_QD, k, v, g_QD, shift_Q, norm_Q, delta_Q, start, length, first, token_Q, gq_QD, scale, softcap, window,
    k_sn, v_sn, NORMED: tl.constexpr,
    D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, BRANCHED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add what the keys of one segment contribute; `first` as in `_attend_run`."""
    begin, end = _keys_of_queries(first, length, window, WINDOWED, TOKENS, BLOCK_J)
    for key in range(begin, end, BLOCK_J):
        k_JD = _load_run(k, start + key, length - key, k_sn, D, BLOCK_J, BLOCK_D)
        v_JD = _load_run(v, start + key, length - key, v_sn, D, BLOCK_J, BLOCK_D)
        z_QJ, slope_QJ = _logit_and_slope(_dot(q_QD, k_JD.T), scale, softcap, CAPPED, k_JD.dtype)
        weight_QJ = tl.exp2(z_QJ - shift_Q[:, None])
        if NORMED:
            weight_QJ *= norm_Q[:, None]
        key_J = key + tl.arange(0, BLOCK_J)
        weight_QJ = _hide(weight_QJ, 0.0, first + token_Q[:, None], key_J[None, :], window, WINDOWED)
        if BRANCHED:
            weight_QJ = tl.where(key_J[None, :] < length, weight_QJ, 0.0)
        g_product_QJ = weight_QJ * (_dot(g_QD, v_JD.T) - delta_Q[:, None]) * slope_QJ
        gq_QD = _dot(g_product_QJ.to(k_JD.dtype), k_JD, gq_QD)
    return gq_QD


@jit(do_not_specialize=["n_segments", "window", "part_elements"])
@no_type_check
def kv_gradient_kernel(
    q, k, v, shift, norm, g_out, delta, gk, gv, part_elements, cu_seqlens, parents, n_segments,
    scale, softcap, window,
    q_sn, q_sh, k_sn, k_sh, v_sn, v_sh, g_sn, g_sh,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Write gk, gv `[G // MEMBERS, N, K, D]`: parts of the gradients, to be summed over the first axis.

    Each part sums over MEMBERS heads of a group. gk or gv may be None. delta comes from `q_gradient_kernel`.
    Grid: tiles of keys times key heads; parts. Most queries see the first tiles of a segment: they come
        first.
    """
    head, tile, part = tl.program_id(0) % K, tl.program_id(0) // K, tl.program_id(1)
    first_head = head * G + part * MEMBERS
    segment, start, length, first = _segment_of_tile(cu_seqlens, n_segments, tile, BLOCK_J)
    if first >= length:
        return
    k_JD = _load_run(k + head * k_sh, start + first, length - first, k_sn, D, BLOCK_J, BLOCK_D)
    v_JD = _load_run(v + head * v_sh, start + first, length - first, v_sn, D, BLOCK_J, BLOCK_D)
    q += first_head * q_sh
    g_out += first_head * g_sh

    gk_JD = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    gv_JD = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    key_J = tl.arange(0, BLOCK_J)
    n_tokens = length
    if parents is not None:
        last = _last_below(parents, segment, n_segments)
        if not WINDOWED:  # all tokens below the segment see its keys, and lie directly behind it
            n_tokens = (tl.load(cu_seqlens + last + 1) - start).to(tl.int32)
    end = n_tokens
    if WINDOWED:
        end = tl.minimum(first + BLOCK_J - 1 + window, n_tokens)
    gk_JD, gv_JD = _kv_gradient_of_run(
        q, k_JD, v_JD, shift, norm, g_out, delta, gk, gv, start, first, end, n_tokens, first, first_head,
        gk_JD, gv_JD, scale, softcap, window, q_sn, q_sh, g_sn, g_sh,
        K, G, D, CAPPED, WINDOWED, BLOCK_Q, BLOCK_J, BLOCK_D, MEMBERS,
    )  # fmt: skip
    if parents is not None and WINDOWED:
        for below in range(segment + 1, last + 1):
            branch, n_tokens = _bounds(cu_seqlens, below)
            distance, above = length, tl.load(parents + below)
            while above > segment:
                _start, n_above = _bounds(cu_seqlens, above)
                distance += n_above
                above = tl.load(parents + above)
            end = tl.minimum(first + BLOCK_J - 1 + window - distance, n_tokens)
            gk_JD, gv_JD = _kv_gradient_of_run(
                q, k_JD, v_JD, shift, norm, g_out, delta, gk, gv, branch, 0, end, n_tokens, first - distance,
                first_head, gk_JD, gv_JD, scale, softcap, window, q_sn, q_sh, g_sn, g_sh,
                K, G, D, CAPPED, WINDOWED, BLOCK_Q, BLOCK_J, BLOCK_D, MEMBERS,
            )  # fmt: skip

    place = ((start + first) * K + head) * D + part.to(tl.int64) * part_elements
    if gk is not None:
        _store(gk + place, key_J * (K * D), gk_JD * scale, first + key_J < length, D, BLOCK_D)
    if gv is not None:
        _store(gv + place, key_J * (K * D), gv_JD, first + key_J < length, D, BLOCK_D)


@jit
def _kv_gradient_of_run(
    q, k_JD, v_JD, shift, norm, g_out, delta, gk, gv, start, begin, end, n_tokens, first, first_head,
    gk_JD, gv_JD, scale, softcap, window, q_sn, q_sh, g_sn, g_sh,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `begin` to `end` of a run of `n_tokens` from `start` on contribute.

    The tile's first key stands `first` behind the run's first token.
    """
    key_J = tl.arange(0, BLOCK_J)
    for token in range(begin, end, BLOCK_Q // MEMBERS):
        token_Q, member_Q, is_query_Q = _queries(n_tokens - token, MEMBERS, BLOCK_Q)
        here = start + token
        q_QD = _load(q + here * q_sn, token_Q * q_sn + member_Q * q_sh, is_query_Q, D, BLOCK_D)
        g_QD = _load(g_out + here * g_sn, token_Q * g_sn + member_Q * g_sh, is_query_Q, D, BLOCK_D)
        place_Q = here * (K * G) + first_head + token_Q * (K * G) + member_Q
        shift_Q, norm_Q = _shift_and_norm(shift, norm, place_Q, is_query_Q)
        z_JQ, slope_JQ = _logit_and_slope(_dot(k_JD, q_QD.T), scale, softcap, CAPPED, k_JD.dtype)
        weight_JQ = tl.exp2(z_JQ - shift_Q[None, :])
        if norm is not None:
            weight_JQ *= norm_Q[None, :]
        weight_JQ = _hide(weight_JQ, 0.0, token + token_Q[None, :], first + key_J[:, None], window, WINDOWED)
        if gv is not None:
            gv_JD = _dot(weight_JQ.to(g_QD.dtype), g_QD, gv_JD)
        if gk is not None:
            delta_Q = tl.load(delta + place_Q, mask=is_query_Q, other=0.0)
            g_product_JQ = weight_JQ * (_dot(v_JD, g_QD.T) - delta_Q[None, :]) * slope_JQ
            gk_JD = _dot(g_product_JQ.to(q_QD.dtype), q_QD, gk_JD)
    return gk_JD, gv_JD


@jit
def _segment_of_tile(cu_seqlens, n_segments, tile, TOKENS: tl.constexpr):
    """Find the segment of a tile.

    Segment s owns the tiles from `cu_seqlens[s] // TOKENS + s` on: enough for any length, so the number of
    tiles depends on no length, and a few are empty. All bounds are compared, many at a time: a binary search
    would wait for one load after the other.

    Returns:
        The segment, its first token as int64, its length, and the tile's first token in it; past the last one
        if the tile is empty.
    """
    BOUNDS: tl.constexpr = 256
    segment = tile * 0 - 1
    start = tile * 0
    end = start + 2147483647
    for first in range(0, n_segments + 1, BOUNDS):
        s = first + tl.arange(0, BOUNDS)
        bound = tl.load(cu_seqlens + s, mask=s <= n_segments, other=2147483647)
        starts_by = (bound // TOKENS + s <= tile) & (s < n_segments)
        segment += tl.sum(starts_by.to(tl.int32), 0)
        start = tl.maximum(start, tl.max(tl.where(starts_by, bound, 0), 0))
        end = tl.minimum(end, tl.min(tl.where(starts_by, 2147483647, bound), 0))
    return segment, start.to(tl.int64), end - start, (tile - segment - start // TOKENS) * TOKENS


@jit
def _bounds(cu_seqlens, segment):
    """Return a segment's first token as int64, and its length."""
    start = tl.load(cu_seqlens + segment)
    return start.to(tl.int64), tl.load(cu_seqlens + segment + 1) - start


@jit
def _parent_of(parents, cu_seqlens, segment, first):
    """Return the parent or -1, its first token and length, and how far `first` stands behind that token."""
    parent = tl.load(parents + segment)
    start, length = _bounds(cu_seqlens, tl.maximum(parent, 0))
    return parent, start, length, first + length


@jit
def _last_below(parents, segment, n_segments):
    """Return the last segment below this one, or itself: the next one below none of them is a sibling."""
    BOUNDS: tl.constexpr = 256
    last = n_segments - 1
    for first in range(segment + 1, n_segments, BOUNDS):
        s = first + tl.arange(0, BOUNDS)
        parent = tl.load(parents + s, mask=s < n_segments, other=-1)
        last = tl.minimum(last, tl.min(tl.where(parent < segment, s - 1, 2147483647), 0))
    return last


@jit
def _queries(n_tokens, G: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Return each query's token in the tile, its head in the group, and whether it is among `n_tokens`."""
    query_Q = tl.arange(0, BLOCK_Q)
    token_Q, member_Q = query_Q // G, query_Q % G
    is_query_Q = token_Q < n_tokens
    if BLOCK_Q % G != 0:
        is_query_Q = is_query_Q & (token_Q < BLOCK_Q // G)
    return token_Q, member_Q, is_query_Q


@jit
def _keys_of_queries(
    first, length, window, WINDOWED: tl.constexpr, TOKENS: tl.constexpr, BLOCK_J: tl.constexpr
):
    """Return begin and end of the keys that the tile's queries see."""
    begin = first * 0
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0) // BLOCK_J * BLOCK_J
    return begin, tl.minimum(first + TOKENS, length)


@jit
def _shift_and_norm(shift, norm, place_Q, is_query_Q):
    shift_Q = tl.load(shift + place_Q, mask=is_query_Q, other=0.0)
    norm_Q = 1.0
    if norm is not None:
        norm_Q = tl.load(norm + place_Q, mask=is_query_Q, other=0.0)
    return shift_Q, norm_Q


@jit
def _hide(x, hidden, token, key, window, WINDOWED: tl.constexpr):
    """Replace x by `hidden` where the token does not see the key."""
    x = tl.where(key <= token, x, hidden)
    if WINDOWED:
        x = tl.where(token < key + window, x, hidden)
    return x


@jit
def _logit_and_slope(product, scale, softcap, CAPPED: tl.constexpr, dtype: tl.constexpr):
    """Return the logits of q · k in units of ln 2, and their slope: 1 - tanh(u)² of softcap * tanh(u)."""
    log2_e: tl.constexpr = 1.4426950408889634
    if not CAPPED:
        return product * (scale * log2_e), 1.0
    elif dtype == tl.float32:
        z, slope = logit_and_slope(product, scale, softcap, CAPPED)
        return z * log2_e, slope / scale
    else:  # an absolute error of about softcap * 1e-7 matters in float32 only
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(product * (scale / softcap * (2 * log2_e))))
        return tanh * (softcap * log2_e), 1.0 - tanh * tanh


@jit
def _dot(x, y, total=None):
    """Compute total + x y; in float32 by three products of TF32, which keep 22 bits of each number."""
    return tl.dot(x, y, total, input_precision="tf32x3")


@jit
def _load_run(x, first, n_rows, stride, D: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load `[BLOCK_J, BLOCK_D]`: the rows from `first` (int64) on; 0 past `n_rows` of them."""
    row_J = tl.arange(0, BLOCK_J)
    return _load(x + first * stride, row_J * stride, row_J < n_rows, D, BLOCK_D)


@jit
def _load(x, where_R, is_row_R, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the rows at `where_R` as `[R, BLOCK_D]`; 0 past D and where there is no row."""
    dim_D = tl.arange(0, BLOCK_D)
    mask_RD = is_row_R[:, None] & (dim_D < D)[None, :]
    return tl.load(x + where_R[:, None] + dim_D[None, :], mask=mask_RD, other=0.0)


@jit
def _store(x, where_R, x_RD, is_row_R, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dim_D = tl.arange(0, BLOCK_D)
    mask_RD = is_row_R[:, None] & (dim_D < D)[None, :]
    tl.store(x + where_R[:, None] + dim_D[None, :], x_RD.to(x.dtype.element_ty), mask=mask_RD)

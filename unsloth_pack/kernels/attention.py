"""Causal attention over a packed row in three Triton kernels, with softcap and sliding window.

N tokens in segments, H query heads, K key heads (K divides H), D head dim. For each query, over the keys that
it sees in its own segment:

    z = softcap * tanh(scale * q·k / softcap), or scale * q·k without one     p = softmax(z)     out = Σ p v

    g_z = p (g_out·v - out·g_out)     g(q·k) = scale * (1 - (z / softcap)²) g_z     gv = Σ p g_out

A sink is one more logit of every query of a head, without a value: the other weights then sum to less than 1.
Its gradient is -Σ p out·g_out over the queries of its head, where p is the sink's own weight.

The forward pass saves the normalizer of p. The backward pass computes p again, once for the gradient of q and
once for those of k and v. With few tiles of keys, several programs share the heads of a group, and their sums
are added afterwards. No sum depends on the order of programs: the same inputs give the same bits.
The host never reads `cu_seqlens` and the grids depend on shapes only, so CUDA graphs can capture the kernels.

In the kernels, G query heads share a key head (a group). A program owns one key head and a tile of one
segment. A tile of queries has BLOCK_Q rows (Q): G heads for each of its TOKENS = BLOCK_Q // G tokens. A tile
of keys has BLOCK_J rows (J). So the heads of a group share the keys that a program loads. Loops skip tiles
that are fully masked. They mask every other tile: with a second, unmasked loop ptxas serialises the matrix
products (triton 3.6, sm_90). Logits are in units of ln 2, for `exp2`.

In 16 bits the weights of a query are exp2(z - shift), with its log-sum-exp as shift. In float32 they are
norm * exp2(z - shift), with its greatest logit as shift and 1 / the sum of exponentials as norm: a rounding
error of the log-sum-exp would be in all weights of a query and add up in sums over queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.kernels import reference
from unsloth_pack.kernels.head import logit_and_slope
from unsloth_pack.kernels.launch import jit, once_differentiable, takes_fused_path, tl, triton

# One compilation serves all rows and windows
_jit = jit(do_not_specialize=["n_segments", "window", "part_elements"])


@_jit
def forward_kernel(
    q, k, v, sinks, out, shift, norm, cu_seqlens, n_segments, scale, softcap, window,
    q_sn, q_sh, k_sn, k_sh, v_sn, v_sh,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write out `[N, K * G, D]`, and shift and norm `[N, K * G]` of every query. norm: only in float32.

    sinks: `[K * G]` or None.
    Grid: tiles of queries times key heads. The last tiles see most keys and come first.
    """
    head, tile = tl.program_id(0) % K, (tl.num_programs(0) - 1 - tl.program_id(0)) // K
    start, length, first = _segment_of_tile(cu_seqlens, n_segments, tile, BLOCK_Q // G)
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
    begin, end = _keys_of_queries(first, length, window, WINDOWED, BLOCK_Q // G, BLOCK_J)
    for key in range(begin, end, BLOCK_J):
        k_JD = _load_run(k, start + key, length - key, k_sn, D, BLOCK_J, BLOCK_D)
        z_QJ, _slope = _logit_and_slope(_dot(q_QD, k_JD.T), scale, softcap, CAPPED, k_JD.dtype)
        key_J = key + tl.arange(0, BLOCK_J)
        z_QJ = _hide(z_QJ, -float("inf"), first + token_Q[:, None], key_J[None, :], window, WINDOWED)
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


@_jit
def q_gradient_kernel(
    q, k, v, out, shift, norm, g_out, gq, delta, cu_seqlens, n_segments, scale, softcap, window,
    q_sn, q_sh, k_sn, k_sh, v_sn, v_sh, g_sn, g_sh,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write gq `[N, K * G, D]` and delta `[N, K * G]` = out · g_out. Grid: as `forward_kernel`."""
    head, tile = tl.program_id(0) % K, (tl.num_programs(0) - 1 - tl.program_id(0)) // K
    start, length, first = _segment_of_tile(cu_seqlens, n_segments, tile, BLOCK_Q // G)
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
    begin, end = _keys_of_queries(first, length, window, WINDOWED, BLOCK_Q // G, BLOCK_J)
    for key in range(begin, end, BLOCK_J):
        k_JD = _load_run(k, start + key, length - key, k_sn, D, BLOCK_J, BLOCK_D)
        v_JD = _load_run(v, start + key, length - key, v_sn, D, BLOCK_J, BLOCK_D)
        z_QJ, slope_QJ = _logit_and_slope(_dot(q_QD, k_JD.T), scale, softcap, CAPPED, k_JD.dtype)
        weight_QJ = tl.exp2(z_QJ - shift_Q[:, None])
        if norm is not None:
            weight_QJ *= norm_Q[:, None]
        key_J = key + tl.arange(0, BLOCK_J)
        weight_QJ = _hide(weight_QJ, 0.0, first + token_Q[:, None], key_J[None, :], window, WINDOWED)
        g_product_QJ = weight_QJ * (_dot(g_QD, v_JD.T) - delta_Q[:, None]) * slope_QJ
        gq_QD = _dot(g_product_QJ.to(k_JD.dtype), k_JD, gq_QD)
    _store(gq + place * D, place_Q * D, gq_QD * scale, is_query_Q, D, BLOCK_D)


@_jit
def kv_gradient_kernel(
    q, k, v, shift, norm, g_out, delta, gk, gv, part_elements, cu_seqlens, n_segments, scale, softcap, window,
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
    start, length, first = _segment_of_tile(cu_seqlens, n_segments, tile, BLOCK_J)
    if first >= length:
        return
    k_JD = _load_run(k + head * k_sh, start + first, length - first, k_sn, D, BLOCK_J, BLOCK_D)
    v_JD = _load_run(v + head * v_sh, start + first, length - first, v_sn, D, BLOCK_J, BLOCK_D)
    q += first_head * q_sh
    g_out += first_head * g_sh

    gk_JD = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    gv_JD = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    key_J = tl.arange(0, BLOCK_J)
    end = length
    if WINDOWED:
        end = tl.minimum(first + BLOCK_J - 1 + window, length)
    for token in range(first, end, BLOCK_Q // MEMBERS):
        token_Q, member_Q, is_query_Q = _queries(length - token, MEMBERS, BLOCK_Q)
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

    place = ((start + first) * K + head) * D + part.to(tl.int64) * part_elements
    if gk is not None:
        _store(gk + place, key_J * (K * D), gk_JD * scale, first + key_J < length, D, BLOCK_D)
    if gv is not None:
        _store(gv + place, key_J * (K * D), gv_JD, first + key_J < length, D, BLOCK_D)


@_jit
def _segment_of_tile(cu_seqlens, n_segments, tile, TOKENS: tl.constexpr):
    """Find the segment of a tile.

    Segment s owns the tiles from `cu_seqlens[s] // TOKENS + s` on: enough for any length, so the number of
    tiles depends on no length, and a few are empty. All bounds are compared, many at a time: a binary search
    would wait for one load after the other.

    Returns:
        The segment's first token as int64, its length, and the tile's first token in it; past the last one if
        the tile is empty.
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
    return start.to(tl.int64), end - start, (tile - segment - start // TOKENS) * TOKENS


@_jit
def _queries(n_tokens, G: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Return each query's token in the tile, its head in the group, and whether it is among `n_tokens`."""
    query_Q = tl.arange(0, BLOCK_Q)
    token_Q, member_Q = query_Q // G, query_Q % G
    is_query_Q = token_Q < n_tokens
    if BLOCK_Q % G != 0:
        is_query_Q = is_query_Q & (token_Q < BLOCK_Q // G)
    return token_Q, member_Q, is_query_Q


@_jit
def _keys_of_queries(
    first, length, window, WINDOWED: tl.constexpr, TOKENS: tl.constexpr, BLOCK_J: tl.constexpr
):
    """Return begin and end of the keys that the tile's queries see."""
    begin = first * 0
    if WINDOWED:
        begin = tl.maximum(first - window + 1, 0) // BLOCK_J * BLOCK_J
    return begin, tl.minimum(first + TOKENS, length)


@_jit
def _shift_and_norm(shift, norm, place_Q, is_query_Q):
    shift_Q = tl.load(shift + place_Q, mask=is_query_Q, other=0.0)
    norm_Q = 1.0
    if norm is not None:
        norm_Q = tl.load(norm + place_Q, mask=is_query_Q, other=0.0)
    return shift_Q, norm_Q


@_jit
def _hide(x, hidden, token, key, window, WINDOWED: tl.constexpr):
    """Replace x by `hidden` where the token does not see the key."""
    x = tl.where(key <= token, x, hidden)
    if WINDOWED:
        x = tl.where(token < key + window, x, hidden)
    return x


@_jit
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


@_jit
def _dot(x, y, total=None):
    """Compute total + x y; in float32 by three products of TF32, which keep 22 bits of each number."""
    return tl.dot(x, y, total, input_precision="tf32x3")


@_jit
def _load_run(x, first, n_rows, stride, D: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load `[BLOCK_J, BLOCK_D]`: the rows from `first` (int64) on; 0 past `n_rows` of them."""
    row_J = tl.arange(0, BLOCK_J)
    return _load(x + first * stride, row_J * stride, row_J < n_rows, D, BLOCK_D)


@_jit
def _load(x, where_R, is_row_R, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load the rows at `where_R` as `[R, BLOCK_D]`; 0 past D and where there is no row."""
    dim_D = tl.arange(0, BLOCK_D)
    mask_RD = is_row_R[:, None] & (dim_D < D)[None, :]
    return tl.load(x + where_R[:, None] + dim_D[None, :], mask=mask_RD, other=0.0)


@_jit
def _store(x, where_R, x_RD, is_row_R, D: tl.constexpr, BLOCK_D: tl.constexpr):
    dim_D = tl.arange(0, BLOCK_D)
    mask_RD = is_row_R[:, None] & (dim_D < D)[None, :]
    tl.store(x + where_R[:, None] + dim_D[None, :], x_RD.to(x.dtype.element_ty), mask=mask_RD)


MAX_HEAD_DIM = 256
_ENOUGH_PROGRAMS = 256  # two for each multiprocessor of an H100 or H200
_MAX_STRIDE = 2**23  # elements, so that a tile's offsets fit into 32 bits


@dataclass(frozen=True)
class Tile:
    """The size of a program: queries and keys at a time, warps, and tiles to load ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of each kernel. With `v_gradient`, k and v have a launch each: registers do not hold both."""

    forward: Tile
    q_gradient: Tile
    kv_gradient: Tile
    v_gradient: Tile | None = None


# By (bytes of an element, padded head dim from 64 on), then by the KiB of shared memory that a program needs.
# In 16 bits none spills registers, the larger on sm_90 and the smaller on sm_80 (triton 3.6). In float32 some
# do: three products of TF32 need more.
TILES = {
    (2, 64): {96: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))},
    (2, 128): {
        193: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
        96: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    },
    (2, 256): {
        193: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), Tile(64, 128, 8, 2)),
        96: Tiles(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(32, 32, 8, 2)),
    },
    (4, 64): {96: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1))},
    (4, 128): {96: Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1))},
    (4, 256): {96: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 4, 1), Tile(16, 16, 8, 1))},
}


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally within each segment.

    Args:
        q: `[N, H, D]`, any strides, D up to 256. bfloat16, float16 or float32; float64 takes the reference
            path.
        k, v: `[N, K, D]`; K divides H, and query head h reads key head h // (H / K).
        cu_seqlens: `[segments + 1]` int32, from 0 to N, not descending; segments may be empty. Not checked:
            a check would synchronise the device.
        scale: factor on q · k, before the softcap.
        window: number of keys that a query sees, its own included; None for all up to its own.
        softcap: logits become softcap * tanh(logits / softcap).
        sinks: `[H]`, any float dtype: one more logit of every query of a head, without value or softcap.

    Returns:
        `[N, H, D]`, contiguous, in q's dtype; computed in float32 and rounded once.

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit together.

    Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2, with a loop of its own for the gradient of q;
    Gemma Team 2024 (Gemma 2) for the softcap; OpenAI 2025 (gpt-oss) for the sinks.
    """
    _check(q, k, v, cu_seqlens, scale, window, softcap, sinks)
    if not takes_fused_path(q, k):
        return reference.varlen_attention(
            q, k, v, cu_seqlens, scale, window=window, softcap=softcap, sinks=sinks
        )
    return _VarlenAttention.apply(q, k, v, cu_seqlens.contiguous(), sinks, (float(scale), window, softcap))


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, sinks, options):
        q, k, v = _as_readable(q), _as_readable(k), _as_readable(v)
        out, shift, norm = _forward(q, k, v, cu_seqlens, sinks, options)
        ctx.save_for_backward(q, k, v, out, shift, norm, cu_seqlens, sinks)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g_out):
        *saved, sinks = ctx.saved_tensors
        gq, gk, gv, delta = _backward(saved, _as_readable(g_out), ctx.options)
        g_sinks = None
        if ctx.needs_input_grad[4]:
            g_sinks = _sinks_gradient(sinks, saved[4], saved[5], delta)
        return gq, gk, gv, None, g_sinks, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sinks: Tensor | None, options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the output, and shift and norm `[N, H]`; norm is None except in float32."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shift = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    norm = torch.empty_like(shift) if q.dtype == torch.float32 else None
    tile = _tiles(q).forward
    with torch.cuda.device_of(q):
        tensors = (q, k, v, None if sinks is None else sinks.contiguous(), out, shift, norm)
        _launch(forward_kernel, tile, True, tensors, (q, k, v), cu_seqlens, options)
    return out, shift, norm


def _backward(saved: Sequence[Any], g_out: Tensor, options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, and out · g_out of every query, `[N, H]`."""
    q, k, v, out, shift, norm, cu_seqlens = saved
    gq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(shift)
    tiles, strided = _tiles(q), (q, k, v, g_out)
    members = _count_members(q, k, tiles.kv_gradient)
    parts = q.shape[1] // k.shape[1] // members
    wide = q.dtype if parts == 1 else torch.float32
    gk_and_gv = torch.empty((2, parts, *k.shape), dtype=wide, device=q.device)
    gk, gv = gk_and_gv.unbind()
    with torch.cuda.device_of(q):
        tensors: tuple[Tensor | None, ...] = (q, k, v, out, shift, norm, g_out, gq, delta)
        _launch(q_gradient_kernel, tiles.q_gradient, True, tensors, strided, cu_seqlens, options)
        launches: list[tuple[Tile, Tensor | None, Tensor | None]] = [(tiles.kv_gradient, gk, gv)]
        if tiles.v_gradient is not None:
            launches = [(tiles.kv_gradient, gk, None), (tiles.v_gradient, None, gv)]
        for tile, into_gk, into_gv in launches:
            arguments = (q, k, v, shift, norm, g_out, delta, into_gk, into_gv, k.numel())
            _launch(kv_gradient_kernel, tile, False, arguments, strided, cu_seqlens, options, members)
    gk, gv = (gk_and_gv[:, 0] if parts == 1 else gk_and_gv.sum(1).to(q.dtype)).unbind()
    return gq, gk, gv, delta


def _sinks_gradient(sinks: Tensor, shift: Tensor, norm: Tensor | None, delta: Tensor) -> Tensor:
    """Return the gradient of sinks, `[H]`; shift is in units of ln 2."""
    weight = torch.exp2(sinks.float() / math.log(2) - shift)
    if norm is not None:
        weight = weight * norm
    return -(weight * delta).sum(0).to(sinks.dtype)


def _count_members(q: Tensor, k: Tensor, tile: Tile) -> int:
    """Count the query heads that a program sums over for the gradients of k and v.

    As many as leave enough programs to keep a device busy. It depends on shapes only.
    """
    (N, K, _), G = k.shape, q.shape[1] // k.shape[1]
    programs = max(1, N // tile.keys) * K
    fitting = [members for members in range(G, 0, -1) if G % members == 0]
    return next((members for members in fitting if programs * (G // members) >= _ENOUGH_PROGRAMS), 1)


def _launch(
    kernel,
    tile: Tile,
    by_queries: bool,
    tensors: tuple[Tensor | int | None, ...],
    strided: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    options,
    members: int | None = None,
) -> None:
    """Run one kernel over all tiles of queries, or of keys.

    Args:
        tensors: the kernel's first arguments.
        strided: tensors whose strides of token and head it takes.
        members: query heads of a group that one program holds; None for all.
    """
    (N, H, D), K = strided[0].shape, strided[1].shape[1]
    scale, window, softcap = options
    heads = members or H // K
    queries = max(tile.queries, triton.next_power_of_2(heads))
    n_segments = len(cu_seqlens) - 1
    n_tiles = N // (queries // heads if by_queries else tile.keys) + n_segments
    kernel[(K * n_tiles, H // K // heads)](
        *tensors, cu_seqlens, n_segments, scale, softcap or 1.0, window or N,
        *(stride for x in strided for stride in x.stride()[:2]),
        K=K, G=H // K, D=D, CAPPED=softcap is not None, WINDOWED=window is not None and window < N,
        BLOCK_Q=queries, BLOCK_J=tile.keys, BLOCK_D=_padded(D), num_warps=tile.warps, num_stages=tile.stages,
        **({} if members is None else {"MEMBERS": members}),
    )  # fmt: skip


def _tiles(q: Tensor) -> Tiles:
    """Choose the largest tiles that fit into the shared memory of q's device."""
    by_memory = TILES[q.element_size(), max(64, _padded(q.shape[-1]))]
    if not q.is_cuda:
        return next(iter(by_memory.values()))
    memory = _get_shared_memory(q.get_device())
    return next((tiles for needed, tiles in by_memory.items() if needed <= memory), [*by_memory.values()][-1])


@functools.cache
def _get_shared_memory(device: int) -> int:
    """Return the KiB of shared memory that a program may use."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"] // 1024


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _as_readable(x: Tensor) -> Tensor:
    """Return x, or a copy if a kernel cannot read it in place."""
    return x if x.stride(-1) == 1 and max(x.stride()) < _MAX_STRIDE else x.contiguous()


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Raise ValueError unless shapes, dtypes and devices fit together."""
    shapes = f"q {[*q.shape]}, k {[*k.shape]} and v {[*v.shape]}"
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape:
        raise ValueError(f"{shapes}: pass [N, H, D] and twice [N, K, D]")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes} may differ in heads (axis 1) only, those of k dividing those of q")
    if not 0 < q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"head dim {q.shape[2]}: pass one from 1 to {MAX_HEAD_DIM}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: cast all to one floating dtype")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens is {[*cu_seqlens.shape]} of {cu_seqlens.dtype}: pass [segments + 1] of torch.int32"
        )
    for name, x in (("k", k), ("v", v), ("cu_seqlens", cu_seqlens)):
        if x.device != q.device:
            raise ValueError(f"q is on {q.device} but {name} on {x.device}: move it there")
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.device != q.device):
        raise ValueError(f"sinks are {[*sinks.shape]} on {sinks.device}: pass [{q.shape[1]}] on {q.device}")
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}: pass a finite one")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: pass at least 1, the query's own key, or None")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}: pass a positive one, or None")

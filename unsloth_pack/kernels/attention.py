"""Causal attention over a packed row in three Triton kernels, with softcap and sliding window.

N tokens in segments, H query heads, K key heads (K divides H), D head dim. For each query, over the keys that
it sees in its own segment and its ancestors:

    z = softcap * tanh(scale * q·k / softcap), or scale * q·k without one     p = softmax(z)     out = Σ p v

    g_z = p (g_out·v - out·g_out)     g(q·k) = scale * (1 - (z / softcap)²) g_z     gv = Σ p g_out

A sink is one more logit of every query of a head, without a value: the other weights then sum to less than 1.
Its gradient is -Σ p out·g_out over the queries of its head, where p is the sink's own weight.

A segment may continue another, its parent, as answers continue one prompt. Its queries see all ancestors, and
a window counts on into them. Descendants follow a segment directly, so the queries that see its keys lie in
one run. Rows without parents compile to kernels that know of none.

The forward pass saves the normalizer of p. The backward pass computes p again, once for the gradient of q and
once for those of k and v. With few tiles of keys, several programs share the heads of a group, and their sums
are added afterwards. No sum depends on the order of programs: the same inputs give the same bits.
The host never reads `cu_seqlens` and the grids depend on shapes only, so CUDA graphs can capture the kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsloth_pack.kernels import reference
from unsloth_pack.kernels.attention_kernels import forward_kernel, kv_gradient_kernel, q_gradient_kernel
from unsloth_pack.kernels.launch import (
    apply,
    check_dtypes,
    check_shapes,
    once_differentiable,
    takes_fused_path,
    triton,
)

MAX_HEAD_DIM = 256
_ENOUGH_PROGRAMS = 256  # two for each multiprocessor of an H100 or H200
UNEVEN = 4  # so many times as many in a row that branches, where few of them have most queries
_MAX_STRIDE = 2**23  # elements, so that a tile's offsets fit into 32 bits

_Options = tuple[float, int | None, float | None]  # scale, window and softcap


class Tile(NamedTuple):
    """The size of a program: queries and keys at a time, warps, and tiles to load ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
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
    parents: Tensor | None = None,
) -> Tensor:
    """Attend causally within each segment, and to the segments that it continues.

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
        parents: `[segments]` int32, the segment that each continues, or -1; in preorder. Not checked either.
            None if no segment continues another.

    Returns:
        `[N, H, D]`, contiguous, in q's dtype; computed in float32 and rounded once.

    Source: Dao 2023 (FlashAttention-2), algorithms 1 and 2, with a loop of its own for the gradient of q;
    Gemma Team 2024 (Gemma 2) for the softcap; OpenAI 2025 (gpt-oss) for the sinks.
    """
    tensors = dict(q=("NHD", q), k=("NKD", k), v=("NKD", v), sinks=("H", sinks))
    check_shapes(**tensors, cu_seqlens=("S", cu_seqlens))
    check_dtypes(q=q, k=k, v=v)
    (_, H, D), K = q.shape, k.shape[1]
    if not K or H % K or not 0 < D <= MAX_HEAD_DIM:
        raise ValueError(f"{H} and {K} heads of {D}: pass a multiple, and a size from 1 to {MAX_HEAD_DIM}")
    if cu_seqlens.dtype != torch.int32 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype}: pass [segments + 1] of torch.int32")
    if parents is not None and (parents.dtype, len(parents)) != (torch.int32, len(cu_seqlens) - 1):
        raise ValueError(f"parents is {len(parents)} of {parents.dtype}: pass [segments] of torch.int32")
    if (window is not None and window < 1) or (softcap is not None and not 0 < softcap < math.inf):
        raise ValueError(f"window is {window} and softcap {softcap}: pass positive ones, or None")
    if not takes_fused_path(q, k):
        return reference.varlen_attention(
            q, k, v, cu_seqlens, scale, window=window, softcap=softcap, sinks=sinks, parents=parents
        )
    row = cu_seqlens.contiguous(), None if parents is None else parents.contiguous()
    return apply(_VarlenAttention, q, k, v, *row, sinks, (float(scale), window, softcap))


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        parents: Tensor | None,
        sinks: Tensor | None,
        options: _Options,
    ) -> Tensor:
        q, k, v = map(_as_readable, (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        shift = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        norm = torch.empty_like(shift) if q.dtype == torch.float32 else None
        row = cu_seqlens, parents
        tensors = (q, k, v, None if sinks is None else sinks.contiguous(), out, shift, norm)
        _launch(forward_kernel, _tiles(q).forward, True, tensors, (q, k, v), row, options)
        ctx.save_for_backward(q, k, v, out, shift, norm, sinks, *row)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, shift, norm, sinks, *row = ctx.saved_tensors
        g_out, options, tiles = _as_readable(g_out), ctx.options, _tiles(q)
        strided = q, k, v, g_out
        gq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(shift)
        members = _count_members(q, k, tiles.kv_gradient, is_branched=row[1] is not None)
        parts = q.shape[1] // k.shape[1] // members
        wide = q.dtype if parts == 1 else torch.float32
        gk_and_gv = torch.empty((2, parts, *k.shape), dtype=wide, device=q.device)
        gk, gv = gk_and_gv.unbind()
        tensors = (q, k, v, out, shift, norm, g_out, gq, delta)
        _launch(q_gradient_kernel, tiles.q_gradient, True, tensors, strided, row, options)
        launches: list[tuple[Tile, Tensor | None, Tensor | None]] = [(tiles.kv_gradient, gk, gv)]
        if tiles.v_gradient is not None:
            launches = [(tiles.kv_gradient, gk, None), (tiles.v_gradient, None, gv)]
        for tile, *into in launches:
            tensors = (q, k, v, shift, norm, g_out, delta, *into, k.numel())
            _launch(kv_gradient_kernel, tile, False, tensors, strided, row, options, members)
        gk, gv = (gk_and_gv[:, 0] if parts == 1 else gk_and_gv.sum(1).to(q.dtype)).unbind()
        g_sinks = None
        if ctx.needs_input_grad[5]:  # shift is in units of ln 2
            weight = torch.exp2(sinks.float() / math.log(2) - shift) * (1 if norm is None else norm)
            g_sinks = -(weight * delta).sum(0).to(sinks.dtype)
        return gq, gk, gv, None, None, g_sinks, None


def _count_members(q: Tensor, k: Tensor, tile: Tile, is_branched: bool = False) -> int:
    """Count the query heads that a program sums over for the gradients of k and v.

    As many as leave enough programs to keep a device busy. It depends on shapes only.
    """
    (N, K, _), G = k.shape, q.shape[1] // k.shape[1]
    programs, enough = max(1, N // tile.keys) * K, _ENOUGH_PROGRAMS * (UNEVEN if is_branched else 1)
    fitting = [members for members in range(G, 0, -1) if G % members == 0]
    return next((members for members in fitting if programs * (G // members) >= enough), 1)


def _launch(
    kernel: Any,
    tile: Tile,
    by_queries: bool,
    tensors: tuple[Tensor | int | None, ...],
    strided: tuple[Tensor, ...],
    row: Sequence[Any],  # `cu_seqlens` and `parents`, or None without branches
    options: _Options,
    members: int | None = None,
) -> None:
    """Run one kernel over all tiles of queries, or of keys; `members` query heads of a group in a program."""
    (N, H, D), K = strided[0].shape, strided[1].shape[1]
    scale, window, softcap = options
    heads = members or H // K
    queries = max(tile.queries, triton.next_power_of_2(heads))
    n_segments = len(row[0]) - 1
    n_tiles = N // (queries // heads if by_queries else tile.keys) + n_segments
    kernel[(K * n_tiles, H // K // heads)](
        *tensors, *row, n_segments, scale, softcap or 1.0, window or N,
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
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return int(properties["max_shared_mem"]) // 1024


def _padded(head_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(head_dim)))


def _as_readable(x: Tensor) -> Tensor:
    """Return x, or a copy if a kernel cannot read it in place."""
    return x if x.stride(-1) == 1 and max(x.stride()) < _MAX_STRIDE else x.contiguous()

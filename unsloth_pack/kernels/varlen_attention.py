"""Causal attention over a packed row in three Triton kernels, with softcap and sliding window.

N tokens in segments, H query heads, K key heads (K divides H), D head dim. For each query, over the keys of
its own segment that it sees:

    z = softcap * tanh(scale * q·k / softcap), or scale * q·k without one     p = softmax(z)     out = Σ p v

    g_z = p (g_out·v - out·g_out)     g(q·k) = scale * (1 - (z / softcap)²) g_z     gv = Σ p g_out

A sink is one more logit of every query of a head. It has no value, so the weights of the others sum to less
than 1. Once the forward pass has added it to the sum of exponentials, all of the above holds. Its own
gradient is -Σ p out·g_out over the queries of its head, p being the sink's own weight.

The forward pass keeps what turns z into p. The backward pass computes p again from it: once for the gradient
of q, a sum over keys, and once for those of k and v, sums over queries. Where there are few tiles of keys,
the heads of a group are shared out among several programs, and their sums are added afterwards. No sum
depends on the order in which programs run, so the same inputs give the same bits.

The host reads nothing of `cu_seqlens`, and the grids depend on shapes only: CUDA graphs can hold the kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import reference
from . import varlen_attention_kernels as kernels
from .backward import once_differentiable
from .launch import takes_fused_path, triton

MAX_HEAD_DIM = 256
_ENOUGH_PROGRAMS = 256  # two for each multiprocessor of an H100 or H200
_FARTHEST = 2**23  # elements between neighbours, so that a tile's offsets fit into 32 bits


@dataclass(frozen=True)
class Tile:
    """Queries and keys that a program holds at a time, its warps, and the tiles that it loads ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of each kernel. With `v_gradient` the gradients of k and v are launches of their own: one
    program has no registers for both."""

    forward: Tile
    q_gradient: Tile
    kv_gradient: Tile
    v_gradient: Tile | None = None


# By bytes of an element and padded head dim (the least is 64), and by the KiB of shared memory that a program
# needs at most. In 16 bits none spills registers to memory, the larger on sm_90 and the smaller on sm_80
# (triton 3.6). In float32 some do: three products of TF32 need more.
TILES = {
    (2, 64): {
        96: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    },
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
    """Attention in which a token sees itself and the tokens before it in its segment.

    Args:
        q: `[N, H, D]`, any strides, D up to 256. bfloat16, float16 or float32; float64 takes the reference
            path.
        k, v: `[N, K, D]`; K divides H, and query head h reads key head h // (H / K).
        cu_seqlens: `[segments + 1]` int32, from 0 to N, not descending; segments may be empty. Not checked,
            which would synchronise the device.
        scale: factor on q · k, before the softcap.
        window: how many keys a query sees, its own included; None for all up to its own.
        softcap: logits become softcap * tanh(logits / softcap).
        sinks: `[H]`, any float dtype: one more logit of every query of a head, without a value or a softcap.

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
        q, k, v = _laid_out(q), _laid_out(k), _laid_out(v)
        out, shift, norm = _forward(q, k, v, cu_seqlens, sinks, options)
        ctx.save_for_backward(q, k, v, out, shift, norm, cu_seqlens, sinks)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g_out):
        *saved, sinks = ctx.saved_tensors
        gq, gk, gv, delta = _backward(saved, _laid_out(g_out), ctx.options)
        g_sinks = None
        if ctx.needs_input_grad[4]:
            _, _, _, _, shift, norm, _ = saved
            g_sinks = _sinks_gradient(sinks, shift, norm, delta)
        return gq, gk, gv, None, g_sinks, None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, sinks: Tensor | None, options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, and shift and norm `[N, H]`, of which norm is None but in float32."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shift = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    norm = torch.empty_like(shift) if q.dtype == torch.float32 else None
    tile = _tiles(q).forward
    with torch.cuda.device_of(q):
        tensors = (q, k, v, None if sinks is None else sinks.contiguous(), out, shift, norm)
        _launch(kernels.forward_kernel, tile, True, tensors, (q, k, v), cu_seqlens, options)
    return out, shift, norm


def _backward(saved: Sequence[Any], g_out: Tensor, options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, given what `forward` saved; and out · g_out of every query, `[N, H]`."""
    q, k, v, out, shift, norm, cu_seqlens = saved
    gq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(shift)
    tiles, strided = _tiles(q), (q, k, v, g_out)
    members = _members(q, k, tiles.kv_gradient)
    parts = q.shape[1] // k.shape[1] // members
    wide = q.dtype if parts == 1 else torch.float32
    gk_and_gv = torch.empty((2, parts, *k.shape), dtype=wide, device=q.device)
    gk, gv = gk_and_gv.unbind()
    with torch.cuda.device_of(q):
        tensors: tuple[Tensor | None, ...] = (q, k, v, out, shift, norm, g_out, gq, delta)
        _launch(kernels.q_gradient_kernel, tiles.q_gradient, True, tensors, strided, cu_seqlens, options)
        launches: list[tuple[Tile, Tensor | None, Tensor | None]] = [(tiles.kv_gradient, gk, gv)]
        if tiles.v_gradient is not None:
            launches = [(tiles.kv_gradient, gk, None), (tiles.v_gradient, None, gv)]
        for tile, into_gk, into_gv in launches:
            arguments = (q, k, v, shift, norm, g_out, delta, into_gk, into_gv, k.numel())
            kernel = kernels.kv_gradient_kernel
            _launch(kernel, tile, False, arguments, strided, cu_seqlens, options, members=members)
    gk, gv = (gk_and_gv[:, 0] if parts == 1 else gk_and_gv.sum(1).to(q.dtype)).unbind()
    return gq, gk, gv, delta


def _sinks_gradient(sinks: Tensor, shift: Tensor, norm: Tensor | None, delta: Tensor) -> Tensor:
    """`[H]`; shift is in units of ln 2."""
    weight = torch.exp2(sinks.float() / math.log(2) - shift)
    if norm is not None:
        weight = weight * norm
    return -(weight * delta).sum(0).to(sinks.dtype)


def _members(q: Tensor, k: Tensor, tile: Tile) -> int:
    """How many query heads of a group a program sums over, for the gradients of k and v: as many as leave
    enough programs to keep a device busy. It depends on shapes only."""
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
        tensors: its first arguments.
        strided: those whose strides of token and head it takes.
        members: query heads of a group that a program holds, where they are not all of them.
    """
    (N, H, D), K = strided[0].shape, strided[1].shape[1]
    scale, window, softcap = options
    held = members or H // K
    queries = max(tile.queries, triton.next_power_of_2(held))
    n_segments = len(cu_seqlens) - 1
    n_tiles = N // (queries // held if by_queries else tile.keys) + n_segments
    kernel[(K * n_tiles, H // K // held)](
        *tensors, cu_seqlens, n_segments, scale, softcap or 1.0, window or N,
        *(stride for x in strided for stride in x.stride()[:2]),
        K=K, G=H // K, D=D, CAPPED=softcap is not None, WINDOWED=window is not None and window < N,
        BLOCK_Q=queries, BLOCK_J=tile.keys, BLOCK_D=_padded(D), num_warps=tile.warps, num_stages=tile.stages,
        **({} if members is None else {"MEMBERS": members}),
    )  # fmt: skip


def _tiles(q: Tensor) -> Tiles:
    """The greatest tiles that the shared memory of q's device holds."""
    by_memory = TILES[q.element_size(), max(64, _padded(q.shape[-1]))]
    if not q.is_cuda:
        return next(iter(by_memory.values()))
    held = _shared_memory(q.get_device())
    return next((tiles for needed, tiles in by_memory.items() if needed <= held), [*by_memory.values()][-1])


@functools.cache
def _shared_memory(device: int) -> int:
    """The KiB of shared memory that a program may have."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"] // 1024


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _laid_out(x: Tensor) -> Tensor:
    """x, or a copy where a kernel cannot read it as it lies in memory."""
    return x if x.stride(-1) == 1 and max(x.stride()) < _FARTHEST else x.contiguous()


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
    """Raise ValueError unless the arguments fit together, by their shapes, dtypes and devices alone."""
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

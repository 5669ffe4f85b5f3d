"""QK-norm and rotary embedding of q and k in one launch, forward and backward.

A program owns a few tokens of both q and k, so it reads their angles once. The rotation's transpose is the
rotation by -θ: the backward is the same kernel and needs nothing of q and k. With a norm it reads them again
and recomputes their scale.

B rows of T tokens, N = B * T, H heads (HQ of q, HK of k), D head dim, R <= D rotated dims, P = D / 2 pairs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import reference
from . import rope_kernels as kernels
from .backward import once_differentiable
from .launch import MAX_WARPS, PER_THREAD, floor_power_of_2, takes_fused_path, triton
from .reference import QKNorm

_TILE = 4096  # elements a program aims to hold
_WEIGHT_GRAD_PROGRAMS = 512  # at most so many partial sums when a norm's weights are trained


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
    """Normalise q and k, where asked, and turn each pair of dims by its token's angle.

    Args:
        q, k: `[T, H, D]` or `[B, H, T, D]`, D even, any strides; k may have fewer heads. bfloat16, float16 or
            float32; float64 takes the reference path. Neither is copied nor written to.
        cos, sin: with position_ids tables `[positions, R]`; without them a row for each token: `[T, R]`,
            `[1, T, R]` or `[B, T, R]`. R even, R <= D; dims from R on pass through. The second half of R
            repeats the first, as in transformers, and is not read. Any float dtype. They get no gradient.
        position_ids: int32 or int64, `[T]`, `[1, T]` or `[B, T]`: each token's row of the tables, any order.
            Not checked against the tables' length, which would synchronise the device.
        qk_norm: RMSNorm of q and k before the rotation. Its weights get gradients if they require them.
        interleaved: the pairs are the dims (2i, 2i + 1); otherwise (i, i + R/2).

    Returns:
        q and k turned: fresh tensors of the inputs' shapes and dtype, computed in float32 and rounded once.
        From the kernel `[T, H, D]` is contiguous, `[B, H, T, D]` a view of a contiguous `[B, T, H, D]`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.

    Source: Su et al. 2021 (RoFormer), eq. 34; Zhang & Sennrich 2019 (RMSNorm), eq. 4.
    """
    _check(q, k, cos, sin, position_ids)
    if qk_norm is not None:
        _check_norm(qk_norm, q, k)
    if not takes_fused_path(q, k):
        tables = cos.detach(), sin.detach()
        return reference.rope_qk(q, k, *tables, position_ids, qk_norm=qk_norm, interleaved=interleaved)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    if qk_norm is None:
        return _RopeQK.apply(q, k, cos, sin, position_ids, None, None, None, interleaved)
    weights = qk_norm.q_weight.contiguous(), qk_norm.k_weight.contiguous()
    return _RopeQK.apply(q, k, cos, sin, position_ids, *weights, qk_norm, interleaved)


class _RopeQK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids, q_weight, k_weight, norm: QKNorm | None, interleaved):
        q_and_k = (None, None) if norm is None else (q, k)
        ctx.save_for_backward(*q_and_k, cos, sin, position_ids, q_weight, k_weight)
        ctx.norm, ctx.interleaved = norm, interleaved
        return _turn(q, k, cos, sin, position_ids, q_weight, k_weight, norm, interleaved=interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx, gq_out, gk_out):
        q, k, cos, sin, position_ids, q_weight, k_weight = ctx.saved_tensors
        if ctx.norm is None:
            turned = (gq_out, gk_out, cos, sin, position_ids)
            gq, gk = _turn(*turned, interleaved=ctx.interleaved, inverse=True)
            return gq, gk, None, None, None, None, None, None, None
        gq, gk, gq_weight, gk_weight = _norm_backward(
            gq_out, gk_out, q, k, cos, sin, position_ids, q_weight, k_weight, ctx.norm,
            interleaved=ctx.interleaved, weight_grads=any(ctx.needs_input_grad[5:7]),
        )  # fmt: skip
        return gq, gk, None, None, None, gq_weight, gk_weight, None, None


def _turn(
    q, k, cos, sin, position_ids, q_weight=None, k_weight=None, norm=None, *, interleaved, inverse=False
):
    N, T, HQ, HK, D = _sizes(q, k)
    q_out, k_out = _empty_like(q), _empty_like(k)
    eps, offset, flat = (None, None, False) if norm is None else (norm.eps, norm.offset, norm.flat)
    blocks = _blocks(HQ, HK, D, 1)
    with torch.cuda.device_of(q):
        kernels.turn_kernel[(-(-N // blocks["BLOCK_T"]),)](
            q, k, q_out, k_out, cos, sin, position_ids, q_weight, k_weight,
            eps, offset, -1.0 if inverse else 1.0,
            N, T, *_strides(q), *_strides(k), *_table_strides(cos, position_ids),
            HQ=HQ, HK=HK, D=D, R=cos.shape[-1], INTERLEAVED=interleaved, FLAT=flat, **blocks,
        )  # fmt: skip
    return q_out, k_out


def _norm_backward(
    gq_out, gk_out, q, k, cos, sin, position_ids, q_weight, k_weight, norm: QKNorm, *,
    interleaved: bool, weight_grads: bool,
):  # fmt: skip
    """The gradients of q, k and, where asked (else None), of the norm's weights."""
    N, T, HQ, HK, D = _sizes(q, k)
    gq, gk = _empty_like(q), _empty_like(k)
    blocks = _blocks(HQ, HK, D, 3 if weight_grads else 2)
    programs, STEPS = -(-N // blocks["BLOCK_T"]), 1
    q_partial = k_partial = None
    if weight_grads:
        STEPS = triton.next_power_of_2(max(1, -(-programs // _WEIGHT_GRAD_PROGRAMS)))
        programs = -(-programs // STEPS)
        # A row a program, summed in a fixed order below: the same bits every run, unlike atomics.
        q_partial = q_weight.new_empty((programs, q_weight.shape[0]), dtype=torch.float32)
        k_partial = k_weight.new_empty((programs, k_weight.shape[0]), dtype=torch.float32)
    with torch.cuda.device_of(q):
        kernels.norm_backward_kernel[(programs,)](
            gq_out, gk_out, q, k, gq, gk, cos, sin, position_ids, q_weight, k_weight, q_partial, k_partial,
            norm.eps, norm.offset,
            N, T, *_strides(gq_out), *_strides(gk_out), *_strides(q), *_strides(k),
            *_table_strides(cos, position_ids),
            HQ=HQ, HK=HK, D=D, R=cos.shape[-1], INTERLEAVED=interleaved, FLAT=norm.flat, STEPS=STEPS,
            **blocks,
        )  # fmt: skip
    if q_partial is None or k_partial is None:
        return gq, gk, None, None
    return gq, gk, q_partial.sum(0).to(q_weight.dtype), k_partial.sum(0).to(k_weight.dtype)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int, int, int]:
    """N, T, HQ, HK, D."""
    if q.dim() == 3:
        T, HQ, D = q.shape
        return T, T, HQ, k.shape[1], D
    B, HQ, T, D = q.shape
    return B * T, T, HQ, k.shape[1], D


def _strides(x: Tensor) -> tuple[int, ...]:
    """The strides of the row, token, head and dim."""
    if x.dim() == 3:
        return 0, *x.stride()
    row, head, token, dim = x.stride()
    return row, token, head, dim


def _table_strides(cos: Tensor, position_ids: Tensor | None) -> tuple[int, ...]:
    """The strides of row and token in what a token reads first (position_ids or cos), and cos's last two."""
    *rows, table_row, table_column = cos.stride()
    if position_ids is None:
        one_a_row, token = len(rows) == 1 and cos.shape[0] > 1, table_row
    else:
        *rows, token = position_ids.stride()
        one_a_row = len(rows) == 1 and position_ids.shape[0] > 1
    return rows[0] if one_a_row else 0, token, table_row, table_column


def _empty_like(x: Tensor) -> Tensor:
    """`[T, H, D]`, or the memory of `[B, T, H, D]` seen as `[B, H, T, D]`."""
    if x.dim() == 3:
        return x.new_empty(x.shape)
    _, H, T, D = x.shape
    return x.new_empty_strided(x.shape, (T * H * D, D, H * D, 1))


@functools.cache
def _blocks(HQ: int, HK: int, D: int, tiles: int) -> dict[str, int]:
    """Tile sizes and warps for a kernel that holds `tiles` tiles of q and k at a time."""
    BLOCK_HQ, BLOCK_HK, BLOCK_P = (triton.next_power_of_2(n) for n in (HQ, HK, D // 2))
    per_token = tiles * (BLOCK_HQ + BLOCK_HK) * 2 * BLOCK_P
    BLOCK_T = floor_power_of_2(_TILE // per_token)
    num_warps = min(MAX_WARPS, floor_power_of_2(BLOCK_T * per_token // (32 * PER_THREAD)))
    return {
        "BLOCK_T": BLOCK_T,
        "BLOCK_HQ": BLOCK_HQ,
        "BLOCK_HK": BLOCK_HK,
        "BLOCK_P": BLOCK_P,
        "num_warps": num_warps,
    }


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> None:
    """Raise ValueError unless the arguments fit together, by their shapes, dtypes and devices alone."""
    q_shape, k_shape, table_shape, rank = q.shape, k.shape, cos.shape, q.dim()
    if rank not in (3, 4) or k.dim() != rank:
        raise ValueError(
            f"q {[*q_shape]} and k {[*k_shape]} must both be [T, H, D] or [B, H, T, D]: reshape them"
        )
    if q_shape[0] != k_shape[0] or q_shape[2:] != k_shape[2:]:
        raise ValueError(
            f"q {[*q_shape]} and k {[*k_shape]} may differ in heads (axis 1) only: pass one row's both"
        )
    if q.dtype != k.dtype or not q.is_floating_point():
        raise ValueError(f"q is {q.dtype} and k is {k.dtype}: cast both to one floating dtype")
    if table_shape != sin.shape or len(table_shape) < 2:
        raise ValueError(
            f"cos {[*table_shape]} and sin {[*sin.shape]} must have one shape, [.., R]: pass a pair"
        )
    D, R = q_shape[-1], table_shape[-1]
    if D % 2 or R % 2 or not 0 < R <= D:
        raise ValueError(
            f"cos and sin have {R} columns for head dim {D}: both must be even, 0 < columns <= head dim"
        )
    B, T = (1, q_shape[0]) if rank == 3 else (q_shape[0], q_shape[2])
    token_shapes = (T,), (1, T), (B, T)
    if position_ids is None:
        if table_shape[:-1] not in token_shapes:
            raise ValueError(
                f"cos {[*table_shape]} without position_ids must have a row a token, [{T}, R] or "
                f"[{B}, {T}, R]: pass position_ids with a table"
            )
    else:
        if position_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"position_ids are {position_ids.dtype}: cast them to int32 or int64")
        if position_ids.shape not in token_shapes or len(table_shape) != 2:
            raise ValueError(
                f"position_ids {[*position_ids.shape]} with cos {[*table_shape]}: pass [{T}] or [{B}, {T}], "
                "and tables [P, R]"
            )
    for other in (k, cos, sin) if position_ids is None else (k, cos, sin, position_ids):
        if other.device != q.device:
            raise ValueError(
                f"q is on {q.device} but k, cos, sin or position_ids on {other.device}: move it there"
            )


def _check_norm(norm: QKNorm, q: Tensor, k: Tensor) -> None:
    if norm.eps <= 0:
        raise ValueError(f"QKNorm.eps is {norm.eps}: pass a positive one, such as 1e-6")
    for name, x, weight in (("q", q, norm.q_weight), ("k", k, norm.k_weight)):
        features = x.shape[1] * x.shape[-1] if norm.flat else x.shape[-1]
        if weight.shape != (features,) or weight.device != x.device:
            raise ValueError(
                f"{name}_weight is {[*weight.shape]} on {weight.device}: a norm of {name} {[*x.shape]} with "
                f"flat={norm.flat} needs [{features}] on {x.device}"
            )

"""Routed experts: grouped GEMMs, the weighted product of gate and up, and the sum over experts.

A token's row is repeated for each of its k experts, and the rows are sorted by expert. The product takes in
the router's weight, before the GEMM of down:

    out_n = Σ_k w_nk down_e(product_e(x_n)) = Σ_k down_e(w_nk product_e(x_n))

So the gradient of w is a sum over the F features inside an expert, and the outputs of down need not be saved.
An adapter's output is a matrix of its own; the kernels add it as they read both.

N tokens of k rows each, S = N * k rows, F features inside, C features of a token. In grouped GEMMs S rows lie
in E groups of I inputs and O outputs, and the device reads where the groups end: torch does so in bfloat16
from compute capability 8.0 on. Elsewhere the host reads it and the groups run one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.kernels import reference
from unsloth_pack.kernels.arguments import Gate, InnerSum, Scaled
from unsloth_pack.kernels.elementwise import product_and_gradients
from unsloth_pack.kernels.launch import jit, takes_fused_path, tl, triton

_BLOCK = 1024  # columns of a row that a program takes at a time
_WARPS = 4


def routed_gate_(inner: InnerSum, weight: Tensor, gate: Gate, keep: bool) -> Tensor:
    """Compute the product of gate and up, times the router's weight of each row. Without autograd.

    Args:
        inner: the outputs of gate and up, `[S, 2F]` of one dtype, each contiguous. With `keep` its base
            becomes the whole sum.
        weight: `[S]`, any float dtype.
        gate: the kind of product.

    Returns:
        `[S, F]`, fresh and contiguous, computed in float32 from the rounded sums and rounded once.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6; OpenAI 2025, "gpt-oss model card",
    section 2.2, for the limit and the offset.
    """
    if not takes_fused_path(inner.base, weight):
        return reference.routed_gate_(inner, weight, gate, keep)
    S, F = len(inner.base), inner.base.shape[1] // 2
    out = inner.base.new_empty((S, F))
    of_sum, of_gate = _flatten(inner, gate)
    _routed_gate_kernel[(S,)](
        *(*of_sum, weight, weight.stride(0), out, F, *of_gate),
        *(keep, gate.activation, gate.interleaved, _choose_block(F)),
        num_warps=_WARPS,
    )
    return out


def routed_gate_backward_(
    g_out: Tensor, of_g_out: Scaled | None, inner: InnerSum, weight: Tensor, gate: Gate, g_inner: Tensor
) -> Tensor:
    """Run the backward pass of `routed_gate_`, and compute the weighted product again.

    Args:
        g_out: `[S, F]`, contiguous; with `of_g_out` added, the gradient of the weighted product. Overwritten
            by the weighted product.
        of_g_out: `[S, F]`, contiguous, and its scale, or None.
        inner, weight, gate: as for `routed_gate_`.
        g_inner: `[S, 2F]`, contiguous; the gradient of the sum is written there. May be the sum's base.

    Returns:
        The gradient of `weight`: `[S]` float32, float64 for float64.
    """
    more, scale = (None, 0.0) if of_g_out is None else of_g_out
    S, F = g_out.shape
    if not takes_fused_path(inner.base, weight):
        return reference.routed_gate_backward_(g_out, of_g_out, inner, weight, gate, g_inner)
    g_weight = torch.empty(S, dtype=torch.float32, device=g_out.device)
    of_sum, of_gate = _flatten(inner, gate)
    _routed_gate_backward_kernel[(S,)](
        *(g_out, more, scale, *of_sum, weight, weight.stride(0), g_inner, g_weight, F, *of_gate),
        *(gate.activation, gate.interleaved),
        _choose_block(F),
        num_warps=_WARPS,
    )
    return g_weight


def sum_of_rows(parts: list[Scaled], places: Tensor) -> Tensor:
    """Sum each token's rows, in the order of `places`.

    Args:
        parts: one or two matrices `[S, C]`, contiguous and of one dtype, with their scales; they are added.
        places: `[N, k]` int64, contiguous: the rows of each token.

    Returns:
        `[N, C]`, computed in float32 (float64 for float64) and rounded once.
    """
    first, scale = parts[0]
    if not takes_fused_path(first, first):
        return reference.sum_of_rows(parts, places)
    (N, k), C = places.shape, first.shape[1]
    out = first.new_empty((N, C))
    more, more_scale = parts[1] if len(parts) > 1 else (None, 0.0)
    block = _choose_block(C)
    _sum_of_rows_kernel[(N * triton.cdiv(C, block),)](
        *(first, scale, more, more_scale, places, out, C, k, block), num_warps=_WARPS
    )
    return out


def _choose_block(columns: int) -> int:
    return min(_BLOCK, int(triton.next_power_of_2(columns)))


def _flatten(inner: InnerSum, gate: Gate) -> tuple[list[Tensor | float | None], list[float]]:
    """Return the arguments of a kernel for the sum, and for the product."""
    low_rank, scale = (None, 0.0) if inner.low_rank is None else inner.low_rank
    limit = float("inf") if gate.limit is None else gate.limit
    return [inner.base, low_rank, scale, inner.bias, inner.expert], [gate.alpha, limit, gate.offset]


# F and C are specialised: Triton must know that 16 divides them for 16-byte accesses.
@jit
def _routed_gate_kernel(
    base, low_rank, low_rank_scale, bias, expert, weight, weight_stride, out, F, alpha, limit, offset,
    KEEP: tl.constexpr, ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out `[S, F]`; with KEEP base `[S, 2F]` becomes the sum. Grid: S rows."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + row * weight_stride).to(tl.float32)
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < F
        at_gate, at_up = _places(column, F, INTERLEAVED)
        x = _inner(base, low_rank, low_rank_scale, bias, expert, row, at_gate, inside, F)
        u = _inner(base, low_rank, low_rank_scale, bias, expert, row, at_up, inside, F)
        if KEEP:
            tl.store(base + row * 2 * F + at_gate, x.to(base.dtype.element_ty), mask=inside)
            tl.store(base + row * 2 * F + at_up, u.to(base.dtype.element_ty), mask=inside)
        x, u = tl.minimum(x, limit), tl.clamp(u, -limit, limit) + offset
        product, _gx, _gu = product_and_gradients(
            0.0, alpha * x, u / alpha, base.dtype.element_ty, ACTIVATION
        )
        tl.store(out + row * F + column, (w * product).to(out.dtype.element_ty), mask=inside)


@jit
def _routed_gate_backward_kernel(
    g_out, of_g_out, g_scale, base, low_rank, low_rank_scale, bias, expert, weight, weight_stride,
    g_inner, g_weight, F, alpha, limit, offset,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write g_inner `[S, 2F]`, g_weight `[S]`; g_out `[S, F]` becomes the weighted product. Grid: S rows."""
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weight + row * weight_stride).to(tl.float32)
    of_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < F
        at_gate, at_up = _places(column, F, INTERLEAVED)
        x = _inner(base, low_rank, low_rank_scale, bias, expert, row, at_gate, inside, F)
        u = _inner(base, low_rank, low_rank_scale, bias, expert, row, at_up, inside, F)
        g = tl.load(g_out + row * F + column, mask=inside, other=0.0).to(tl.float32)
        if of_g_out is not None:
            g += g_scale * tl.load(of_g_out + row * F + column, mask=inside, other=0.0).to(tl.float32)
        capped_u = tl.clamp(u, -limit, limit) + offset
        product, gx, gu = product_and_gradients(
            w * g, alpha * tl.minimum(x, limit), capped_u / alpha, base.dtype.element_ty, ACTIVATION
        )
        gx = tl.where(x <= limit, alpha * gx, 0.0)
        gu = tl.where((u >= -limit) & (u <= limit), gu / alpha, 0.0)
        tl.store(g_inner + row * 2 * F + at_gate, gx.to(g_inner.dtype.element_ty), mask=inside)
        tl.store(g_inner + row * 2 * F + at_up, gu.to(g_inner.dtype.element_ty), mask=inside)
        tl.store(g_out + row * F + column, (w * product).to(g_out.dtype.element_ty), mask=inside)
        of_weight += tl.where(inside, g * product, 0.0)
    tl.store(g_weight + row, tl.sum(of_weight))


@jit
def _places(column, F, INTERLEAVED: tl.constexpr):
    """Return where gate and up of these columns are in a row of both."""
    if INTERLEAVED:
        return 2 * column, 2 * column + 1
    else:
        return column, F + column


@jit
def _inner(base, low_rank, scale, bias, expert, row, column, inside, F):
    """Compute columns of a row of the sum in float32, rounded like the stored sum."""
    x = tl.load(base + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    if low_rank is not None:
        x += scale * tl.load(low_rank + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        own = tl.load(expert + row).to(tl.int64)
        x += tl.load(bias + own * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    return x.to(base.dtype.element_ty).to(tl.float32)


@jit
def _sum_of_rows_kernel(
    first, scale, more, more_scale, places, out, C, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write out `[N, C]`. Grid: the blocks of BLOCK columns of each token in turn."""
    blocks = tl.cdiv(C, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < C
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(K):
        start = tl.load(places + token * K + k) * C
        total += scale * tl.load(first + start + column, mask=inside, other=0.0).to(tl.float32)
        if more is not None:
            total += more_scale * tl.load(more + start + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * C + column, total.to(out.dtype.element_ty), mask=inside)


_BYTES = 16  # rows of a grouped GEMM must be multiples of this


def grouped_mm(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply the rows of every group by the group's matrix: `[S, O]`. Without autograd.

    Args:
        x_SI: rows, sorted by group; every row is in one.
        weight_EIO: of the same dtype; a transposed view is read in place.
        ends_E: int32, the first row after each group.
    """
    if _run_grouped(x_SI, weight_EIO, x_SI.shape[1], weight_EIO.shape[2]):
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    return reference.grouped_mm(x_SI, weight_EIO, ends_E)


def grouped_outer(left_SI: Tensor, right_SO: Tensor, ends_E: Tensor) -> Tensor:
    """Compute leftᵀ right of every group: `[E, I, O]`, zeros for a group without rows. Without autograd.

    Args:
        left_SI, right_SO: rows, sorted by group, of one dtype.
        ends_E: as for `grouped_mm`.
    """
    if _run_grouped(left_SI, right_SO, left_SI.shape[1], right_SO.shape[1]):
        product_EIO = F.grouped_mm(left_SI.t(), right_SO, offs=ends_E)
        # A GEMM of no rows may leave its output uninitialised
        is_empty_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)) == 0
        return product_EIO.masked_fill_(is_empty_E[:, None, None], 0)
    return reference.grouped_outer(left_SI, right_SO, ends_E)


def why_not_grouped(dtype: torch.dtype, device: torch.device, *sizes: int) -> str | None:
    """Explain why GEMMs of these inputs and outputs run group by group; None if as one grouped GEMM."""
    if dtype != torch.bfloat16:
        return f"torch has no grouped GEMM in {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's grouped GEMM needs compute capability 8.0"
    if odd := [size for size in sizes if size * dtype.itemsize % _BYTES]:
        return f"torch's grouped GEMM needs sizes that are multiples of 8, one is {odd[0]}"
    return None


def _run_grouped(left: Tensor, right: Tensor, *sizes: int) -> bool:
    is_aligned = left.data_ptr() % _BYTES == right.data_ptr() % _BYTES == 0
    return is_aligned and len(left) > 0 and why_not_grouped(right.dtype, right.device, *sizes) is None

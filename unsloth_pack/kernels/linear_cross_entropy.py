"""The loss of hidden states through a language model's head, without its T x V logits, forward and backward.

For each row x of hidden, l = W x + b, and z = softcap * tanh(scale * l / softcap), or scale * l without one:

    loss = log Σ exp(z) - z[label]
    gl   = (softmax(z) - onehot(label)) * dz/dl
    gx   = Wᵀ gl,  gW = Σ gl xᵀ,  gb = Σ gl

Rows are taken in chunks. A chunk's logits are one GEMM into a buffer that all chunks share; one kernel reads
each row of it, writes the row's loss and puts gl in the row's place; another GEMM or two make gradients of
that. So the gradients are ready when the forward is, logits are computed once, and the backward scales what
is kept: the gradient of the rows that have a label, in float32, because it is rounded after the scaling only.

Shapes: T tokens, N of them with a label, C features, V outputs of the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsloth_pack.host_copy import HostCopy

from .launch import MAX_WARPS, PER_THREAD, floor_power_of_2, jit, takes_fused_path, tl, triton

IGNORE_INDEX = -100

_CHUNK_BYTES = 2**28  # of logits that exist at a time, or these rows if they take more
_LEAST_ROWS = 1024  # on a GPU, where a GEMM of fewer is far from the device's best
_STEP = 128  # rows of a chunk are a multiple of this, as GEMMs like them
_BLOCK = 8192  # logits that a program holds at a time


class LabelledRows:
    """Which rows carry a label, found on the device without waiting for it.

    Skipping the others needs their number on the host. Made before the decoder runs, this asks for it then,
    see `HostCopy`; made by the loss itself, it waits for all before it.

    Args:
        labels: int32 or int64, any shape; row i's label is the i-th, already shifted.
        ignore_index: what stands for no label.
    """

    def __init__(self, labels: Tensor, ignore_index: int = IGNORE_INDEX):
        self.labels = labels
        has_label = labels.reshape(-1) != ignore_index
        self._order = has_label.logical_not().argsort(stable=True)
        self._count = HostCopy(has_label.sum())

    @cached_property
    def count(self) -> int:
        """N, once the device has counted."""
        return int(self._count.read())

    @property
    def rows(self) -> Tensor:
        """`[N]` int64, ascending."""
        return self._order[: self.count]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | LabelledRows,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """The mean cross-entropy of labels under the logits scale * (hidden Wᵀ + bias), softcapped if asked.

    Args:
        hidden: `[..., C]`, any strides; bfloat16, float16, float32 or float64. Under autocast it, weight and
            bias are cast as `torch.nn.functional.linear` casts them.
        weight: `[V, C]`, of hidden's dtype. Gets a gradient if it requires one, summed in float32.
        labels: `[...]` int32 or int64 in [0, V), or -100 for none; already shifted: row i's label is
            labels[i]. As a `LabelledRows` made earlier they cost no wait, and another number may mark none.
        bias: `[V]`, of hidden's dtype. Gets a gradient if it requires one.
        softcap: logits become softcap * tanh(logits / softcap), after the scale.
        num_items: the sum of losses is divided by this, where given, instead of by the number of labels.

    Returns:
        The loss, a number, in float32 (float64 for float64); NaN, with zero gradients, where no row has a
        label and num_items is not given, as in `torch.nn.functional.cross_entropy`. At most 2²⁸ bytes of
        logits exist at a time, or 1,024 rows if that is more.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together; or labels beyond the head. On a GPU, where
            looking would wait for it, those make the loss NaN.

    Source: Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", whose linear
    cross-entropy also takes rows in chunks and makes gradients in the forward pass.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    labelled = labels if isinstance(labels, LabelledRows) else LabelledRows(labels)
    _check(hidden, weight, labelled, bias, softcap)
    total = _LinearCrossEntropy.apply(hidden, weight, bias, labelled, scale, softcap, torch.is_grad_enabled())
    if num_items is None:
        return total / labelled.count
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labelled: LabelledRows, scale: float, softcap, with_grad: bool):
        (V, C), N, rows = weight.shape, labelled.count, labelled.rows
        hidden_TC, labels_N = hidden.reshape(-1, C), labelled.labels.reshape(-1).index_select(0, rows)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses_N = hidden.new_empty(N, dtype=wide)
        for_hidden, for_weight, for_bias = (with_grad and needed for needed in ctx.needs_input_grad[:3])
        g_NC = hidden.new_empty((N, C), dtype=wide) if for_hidden else None
        g_weight = weight.new_zeros((V, C), dtype=wide) if for_weight else None
        g_bias = bias.new_zeros(V, dtype=wide) if for_bias else None
        most = _most_rows(V, hidden)
        # Sized by T, not N: a size that recurs every step is memory that PyTorch reuses.
        buffer_LV = hidden.new_empty((min(most, len(hidden_TC)), V))
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _even_chunks(N, most):
                x_LC = hidden_TC.index_select(0, rows[chunk])
                logits_LV = buffer_LV[: len(x_LC)]
                if bias is None:
                    torch.mm(x_LC, weight.t(), out=logits_LV)
                else:
                    torch.addmm(bias, x_LC, weight.t(), out=logits_LV)
                want = for_hidden or for_weight or for_bias
                _cross_entropy(logits_LV, labels_N[chunk], losses_N[chunk], scale, softcap, want)
                if g_NC is not None:
                    _multiply(logits_LV, weight, g_NC[chunk])
                if g_weight is not None:
                    _add_product(logits_LV.t(), x_LC, g_weight)
                if g_bias is not None:
                    g_bias += logits_LV.sum(0, dtype=wide)
        ctx.save_for_backward(rows, g_NC, g_weight, g_bias)
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return losses_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        rows, g_NC, g_weight, g_bias = ctx.saved_tensors
        g_hidden = None
        if g_NC is not None:
            g_hidden = g_NC.new_zeros(ctx.shape, dtype=ctx.dtype)
            g_hidden.view(-1, ctx.shape[-1]).index_copy_(0, rows, _scaled(g_NC, g, ctx.dtype))
        if not len(rows):
            g = torch.zeros_like(g)  # the mean over no row has an infinite one
        g_weight, g_bias = (x if x is None else _scaled(x, g, ctx.dtype) for x in (g_weight, g_bias))
        return g_hidden, g_weight, g_bias, None, None, None, None


def _most_rows(V: int, like: Tensor) -> int:
    """Rows of logits that the budget holds."""
    fit = _CHUNK_BYTES // (V * like.element_size())
    return max(_LEAST_ROWS if like.is_cuda else _STEP, fit - fit % _STEP)


def _even_chunks(N: int, most: int) -> Iterator[slice]:
    """As few chunks as can be, with no small one at the end."""
    size = -(-N // max(1, -(-N // most)))
    size = max(1, -(-size // _STEP)) * _STEP
    return (slice(start, min(start + size, N)) for start in range(0, N, size))


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b in out's dtype, which is that of a and b or float32."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a b, likewise."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x * factor, a number, rounded once. x stays: the backward may run again."""
    return torch.mul(x, factor.view(1), out=torch.empty_like(x, dtype=dtype))


def _cross_entropy(logits: Tensor, labels: Tensor, losses: Tensor, scale: float, softcap, with_grad) -> None:
    """losses `[L]` of logits `[L, V]`, which become the gradient of their sum where it is wanted."""
    if not takes_fused_path(logits, logits):
        _plain_cross_entropy(logits, labels, losses, scale, softcap, with_grad)
        return
    L, V = logits.shape
    BLOCK = min(_BLOCK, triton.next_power_of_2(V))
    num_warps = min(MAX_WARPS, floor_power_of_2(BLOCK // (32 * PER_THREAD)))
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(L,)](
            *(logits, labels, losses, float(scale), float(softcap or 1), V),
            *(softcap is not None, with_grad, BLOCK),
            num_warps=num_warps,
        )


def _plain_cross_entropy(
    logits: Tensor, labels: Tensor, losses: Tensor, scale: float, softcap, with_grad
) -> None:
    """In plain torch, in place where the dtype allows."""
    labels = labels.long()[:, None]
    z = logits.to(losses.dtype).mul_(scale)
    slope: Tensor | float = scale
    if softcap is not None:
        z.div_(softcap).tanh_()
        if with_grad:
            slope = (1 - z.square()).mul_(scale)
        z.mul_(softcap)
    log_p = z.log_softmax(-1)
    losses.copy_(log_p.gather(1, labels)[:, 0].neg_())
    if with_grad:
        p = log_p.exp_()
        p.scatter_add_(1, labels, p.new_full((), -1).expand_as(labels))
        logits.copy_(p.mul_(slope))


def _check(hidden: Tensor, weight: Tensor, labelled: LabelledRows, bias: Tensor | None, softcap) -> None:
    """Raise ValueError unless the arguments fit together; labels are looked at on a CPU only."""
    labels = labelled.labels
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or not weight.numel():
        raise ValueError(f"hidden {[*hidden.shape]} and weight {[*weight.shape]}: pass [.., C] and [V, C]")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {[*labels.shape]}, hidden {[*hidden.shape]}: pass one label a row")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {[*bias.shape]}, weight {[*weight.shape]}: pass one number an output")
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels are {labels.dtype}: cast them to int64")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and (x.dtype != hidden.dtype or not x.is_floating_point()):
            raise ValueError(
                f"hidden is {hidden.dtype} and {name} {x.dtype}: cast both to one floating dtype"
            )
    for name, x in (("weight", weight), ("bias", bias), ("labels", labels)):
        if x is not None and x.device != hidden.device:
            raise ValueError(f"hidden is on {hidden.device} but {name} on {x.device}: move it there")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}: pass a positive one, or None")
    if labels.device.type == "cpu" and labelled.count:
        low, high = labels.reshape(-1)[labelled.rows].aminmax()
        if low < 0 or high >= len(weight):
            raise ValueError(
                f"labels reach from {low} to {high}, the head has {len(weight)} outputs: pass -100 for none"
            )


# V is specialised, unlike the kernels' other sizes: whole 16-byte accesses need to know that 16 divides it.


@jit
def _cross_entropy_kernel(
    logits, labels, losses, scale, softcap, V,
    CAPPED: tl.constexpr, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """losses `[L]`; logits `[L, V]` become their gradient, WITH_GRAD. Grid: L."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    label = tl.load(labels + row).to(tl.int64)
    is_valid = (label >= 0) & (label < V)
    x_label = tl.load(start + label, mask=is_valid, other=float("nan")).to(tl.float32)
    peak = -3e38  # finite: a row may begin with a block of -inf
    total = 0.0
    for first in range(0, V, BLOCK):
        x_B, mask_B = _load_block(start, first, V, BLOCK)
        z_B, _ = _logit_and_slope(x_B, scale, softcap, CAPPED)
        z_B = tl.where(mask_B, z_B, float("-inf"))
        higher = tl.maximum(peak, tl.max(z_B))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(z_B - higher))
        peak = higher
    z_label, _ = _logit_and_slope(x_label, scale, softcap, CAPPED)
    tl.store(losses + row, tl.log(total) - (z_label - peak))
    if WITH_GRAD:
        per_total = tl.div_rn(1.0, total)
        for first in range(0, V, BLOCK):
            x_B, mask_B = _load_block(start, first, V, BLOCK)
            z_B, slope_B = _logit_and_slope(x_B, scale, softcap, CAPPED)
            column_B = first + tl.arange(0, BLOCK)
            g_B = tl.exp(z_B - peak) * per_total - tl.where(column_B == label, 1.0, 0.0)
            tl.store(start + column_B, (g_B * slope_B).to(logits.dtype.element_ty), mask=mask_B)


@jit
def _load_block(start, first, V, BLOCK: tl.constexpr):
    column_B = first + tl.arange(0, BLOCK)
    return tl.load(start + column_B, mask=column_B < V, other=0.0).to(tl.float32), column_B < V


@jit
def _logit_and_slope(x, scale, softcap, CAPPED: tl.constexpr):
    """z of logits x, and dz/dx."""
    if CAPPED:
        u = x * (scale / softcap)
        e = tl.exp(-2 * tl.abs(u))
        r = 1 / (1 + e)
        far = (1 - e) * r
        far = tl.where(u < 0, -far, far)
        u2 = u * u  # near 0 the difference cancels: tanh's series
        near = u * (1 + u2 * (-1 / 3 + u2 * (2 / 15 + u2 * (-17 / 315 + u2 * (62 / 2835)))))
        return softcap * tl.where(tl.abs(u) < 0.25, near, far), scale * (4 * e * r * r)
    else:
        return x * scale, scale

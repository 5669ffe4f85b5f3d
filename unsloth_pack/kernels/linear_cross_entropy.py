"""Cross-entropy of hidden states through a language model's head, without its T x V logits.

For each row x of hidden, l = W x + b, and z = softcap * tanh(scale * l / softcap), or scale * l without one:

    loss = log Σ exp(z) - z[label]
    gl   = (softmax(z) - onehot(label)) * dz/dl
    gx   = Wᵀ gl,  gW = Σ gl xᵀ,  gb = Σ gl

An adapter on the head, or trained tokens, change l: see `ExtraLogits`. Chunks of rows: see `head`.

One kernel reads a chunk's logits, writes the losses and overwrites the logits by gl; one or two more GEMMs
turn gl into gradients. So the forward pass already computes all gradients, from logits that are computed
once. The
backward pass only scales them: they stay in float32 because they are rounded after the scaling.

Shapes: T tokens, N of them with a label, C features, V outputs of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unsloth_pack.kernels.head import (
    ExtraLogits,
    ExtraRows,
    LabelledRows,
    block_and_warps,
    load_block,
    logit_and_slope,
    max_chunk_rows,
    prepare_head_inputs,
    project_to_logits,
    scale_and_cap,
    scatter_rows,
    split_evenly,
)
from unsloth_pack.kernels.launch import add_product, jit, multiply, once_differentiable, takes_fused_path, tl


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | LabelledRows,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    extra: ExtraLogits | None = None,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Compute the mean cross-entropy of labels under the logits scale * (hidden Wᵀ + bias).

    Args:
        hidden: `[..., C]`, any strides; bfloat16, float16, float32 or float64. Under autocast it, weight and
            bias are cast as `torch.nn.functional.linear` casts them.
        weight: `[V, C]`, of hidden's dtype. Gets a gradient if it requires one, summed in float32.
        labels: `[...]` int32 or int64 in [0, V), or -100 for none; already shifted: row i's label is
            labels[i]. An earlier `LabelledRows` costs no wait, and may use another number for none.
        bias: `[V]`, of hidden's dtype. Gets a gradient if it requires one.
        softcap: logits become softcap * tanh(logits / softcap), after the scale.
        extra: changes hidden Wᵀ + bias.
        num_items: the divisor of the sum of losses; None for the number of labels.

    Returns:
        The loss `[]` in float32 (float64 for float64). Without labels and num_items: NaN with zero gradients,
        as in `torch.nn.functional.cross_entropy`. At most 2²⁸ bytes of logits exist at a time, or 1,024 rows
        if that is more.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together; or labels beyond the head. On a GPU those
            make the loss NaN instead: a check would wait for the device.

    Source: Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", whose linear
    cross-entropy also chunks rows and computes gradients in the forward pass.
    """
    hidden, weight, bias, extra, labelled = prepare_head_inputs(hidden, weight, bias, labels, softcap, extra)
    options = (labelled, scale, softcap, torch.is_grad_enabled())
    total = _LinearCrossEntropy.apply(hidden, weight, bias, *(extra or (None,) * 3), *options)
    if num_items is None:
        return total / labelled.count
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


class _LinearCrossEntropy(torch.autograd.Function):
    """Compute the sum of the losses."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, h, b, outputs, labelled: LabelledRows, scale: float, softcap, with_grad
    ):
        (V, C), N, rows = weight.shape, labelled.count, labelled.rows
        hidden_TC, labels_N = hidden.reshape(-1, C), labelled.labels.reshape(-1).index_select(0, rows)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses_N = hidden.new_empty(N, dtype=wide)
        needed = [with_grad and needs for needs in ctx.needs_input_grad[:5]]
        for_hidden, for_weight, for_bias = needed[:3]
        g_NC = hidden.new_empty((N, C), dtype=wide) if for_hidden else None
        g_weight = weight.new_zeros((V, C), dtype=wide) if for_weight else None
        g_bias = bias.new_zeros(V, dtype=wide) if for_bias else None
        extra = ExtraRows(h, b, outputs, rows, needed[3:])
        most = max_chunk_rows(V, hidden)
        # Sized by T, not N: PyTorch reuses the memory of a size that recurs every step.
        buffer_LV = hidden.new_empty((min(most, len(hidden_TC)), V))
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in split_evenly(N, most):
                x_LC = hidden_TC.index_select(0, rows[chunk])
                logits_LV = extra.apply_to(project_to_logits(x_LC, weight, bias, buffer_LV), chunk)
                _cross_entropy(logits_LV, labels_N[chunk], losses_N[chunk], scale, softcap, any(needed))
                if any(needed):
                    extra.collect_gradients(logits_LV, chunk)
                if g_NC is not None:
                    multiply(logits_LV, weight, g_NC[chunk])
                if g_weight is not None:
                    add_product(logits_LV.t(), x_LC, g_weight)
                if g_bias is not None:
                    g_bias += logits_LV.sum(0, dtype=wide)
        ctx.save_for_backward(rows, g_NC, g_weight, g_bias, extra.g_h, extra.g_b)
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return losses_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        rows, g_NC, g_weight, g_bias, g_h_NR, g_b = ctx.saved_tensors
        g_hidden, g_h = (
            x if x is None else scatter_rows(_scale(x, g, ctx.dtype), rows, ctx.shape[:-1])
            for x in (g_NC, g_h_NR)
        )
        if not len(rows):
            g = torch.zeros_like(g)  # infinite for the mean over no row
        head = (g_weight, g_bias, g_b)
        g_weight, g_bias, g_b = (x if x is None else _scale(x, g, ctx.dtype) for x in head)
        return g_hidden, g_weight, g_bias, g_h, g_b, None, None, None, None, None


def _scale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * factor, rounded once. x stays: the backward may run again."""
    return torch.mul(x, factor.view(1), out=torch.empty_like(x, dtype=dtype))


def _cross_entropy(logits: Tensor, labels: Tensor, losses: Tensor, scale: float, softcap, with_grad) -> None:
    """Write losses `[L]` of logits `[L, V]`. In place, with_grad: logits -> d(sum of losses) / d(logits)."""
    if not takes_fused_path(logits, logits):
        _plain_cross_entropy(logits, labels, losses, scale, softcap, with_grad)
        return
    L, V = logits.shape
    BLOCK, num_warps = block_and_warps(V)
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(L,)](
            *(logits, labels, losses, float(scale), float(softcap or 1), V),
            *(softcap is not None, with_grad, BLOCK),
            num_warps=num_warps,
        )


def _plain_cross_entropy(
    logits: Tensor, labels: Tensor, losses: Tensor, scale: float, softcap, with_grad
) -> None:
    """Do the same in plain torch."""
    labels = labels.long()[:, None]
    z, slope = scale_and_cap(logits, scale, softcap)
    log_p = z.log_softmax(-1)
    losses.copy_(log_p.gather(1, labels)[:, 0].neg_())
    if with_grad:
        p = log_p.exp_()
        p.scatter_add_(1, labels, p.new_full((), -1).expand_as(labels))
        logits.copy_(p.mul_(slope))


# V is specialised: Triton must know that 16 divides it for 16-byte accesses.
@jit
def _cross_entropy_kernel(
    logits, labels, losses, scale, softcap, V,
    CAPPED: tl.constexpr, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write losses `[L]`; WITH_GRAD logits `[L, V]` become their gradient. Grid: L."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    label = tl.load(labels + row).to(tl.int64)
    is_valid = (label >= 0) & (label < V)
    x_label = tl.load(start + label, mask=is_valid, other=float("nan")).to(tl.float32)
    peak = -3e38  # finite: a row may begin with a block of -inf
    total = 0.0
    for first in range(0, V, BLOCK):
        x_B, mask_B = load_block(start, first, V, BLOCK)
        z_B, _ = logit_and_slope(x_B, scale, softcap, CAPPED)
        z_B = tl.where(mask_B, z_B, float("-inf"))
        higher = tl.maximum(peak, tl.max(z_B))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(z_B - higher))
        peak = higher
    z_label, _ = logit_and_slope(x_label, scale, softcap, CAPPED)
    tl.store(losses + row, tl.log(total) - (z_label - peak))
    if WITH_GRAD:
        per_total = tl.div_rn(1.0, total)
        for first in range(0, V, BLOCK):
            x_B, mask_B = load_block(start, first, V, BLOCK)
            z_B, slope_B = logit_and_slope(x_B, scale, softcap, CAPPED)
            column_B = first + tl.arange(0, BLOCK)
            g_B = tl.exp(z_B - peak) * per_total - tl.where(column_B == label, 1.0, 0.0)
            tl.store(start + column_B, (g_B * slope_B).to(logits.dtype.element_ty), mask=mask_B)

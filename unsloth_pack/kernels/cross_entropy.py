"""Cross-entropy of hidden states through a language model's head, without its T x V logits.

For each row of hidden with a label, of logits l and z as in `head.py`:

    loss = log Σ exp(z) - z[label]
    gl   = (softmax(z) - onehot(label)) * dz/dl

One kernel reads a chunk's logits, writes the losses and overwrites the logits by gl. So the forward pass
already computes all gradients, from logits that are computed once. The backward pass only scales them: they
stay in float32 because they are rounded afterwards.

Shapes: T tokens, N of them with a label, L of a chunk, V outputs of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unsloth_pack.kernels.arguments import ExtraLogits
from unsloth_pack.kernels.head import (
    HeadPass,
    Inputs,
    LabelledRows,
    Options,
    load_block,
    logit_and_slope,
    prepare_head_inputs,
    scale_rounded_once,
    score_plainly,
    spread_gradients,
)
from unsloth_pack.kernels.launch import (
    MAX_WARPS,
    PER_THREAD,
    apply,
    floor_power_of_2,
    jit,
    once_differentiable,
    takes_fused_path,
    tl,
    triton,
    wide_dtype,
)

_BLOCK = 8192  # logits that a program holds at a time


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
    inputs, labelled = prepare_head_inputs(hidden, weight, bias, labels, softcap, extra)
    total = apply(_LinearCrossEntropy, labelled, (scale, softcap), torch.is_grad_enabled(), *inputs)
    if num_items is None:
        return total / labelled.count
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


class _LinearCrossEntropy(torch.autograd.Function):
    """Compute the sum of the losses."""

    @staticmethod
    def forward(
        ctx: Any, labelled: LabelledRows, options: Options, with_grad: bool, *inputs: *Inputs
    ) -> Tensor:
        N, rows = labelled.count, labelled.rows
        hidden = inputs[0]
        losses_N = hidden.new_empty(N, dtype=wide_dtype(hidden))
        needed = [with_grad and needs for needs in ctx.needs_input_grad[3:8]]
        head = HeadPass(inputs, labelled, needed, options)

        def turn(logits_LV: Tensor, labels_L: Tensor, chunk: slice) -> None:
            _cross_entropy(logits_LV, labels_L, losses_N[chunk], options, any(needed))

        head.run(turn, losses_N, sign=-1.0)
        ctx.save_for_backward(rows, *head.gradients)
        ctx.shape, ctx.dtype = hidden.shape[:-1], hidden.dtype
        return losses_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows, *gradients = ctx.saved_tensors
        if not len(rows):
            g = torch.zeros_like(g)  # infinite for the mean over no row
        gradients = [scale_rounded_once(x, g.view(1), ctx.dtype) for x in gradients]
        return None, None, None, *spread_gradients(gradients, rows, ctx.shape), None


def _cross_entropy(logits: Tensor, labels: Tensor, losses: Tensor, options: Options, with_grad: bool) -> None:
    """Write losses `[L]` of logits `[L, V]`. In place, with_grad: logits -> d(sum of losses) / d(logits)."""
    if not takes_fused_path(logits, logits):
        upstream = [torch.full_like(losses, -1)] if with_grad else []
        losses.copy_(-score_plainly(logits, labels, options, (), upstream).log_prob)
        return
    (L, V), (scale, softcap) = logits.shape, options
    BLOCK = min(_BLOCK, triton.next_power_of_2(V))
    num_warps = min(MAX_WARPS, floor_power_of_2(BLOCK // (32 * PER_THREAD)))
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(L,)](
            *(logits, labels, losses, float(scale), float(softcap or 1), V),
            *(softcap is not None, with_grad, BLOCK),
            num_warps=num_warps,
        )


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

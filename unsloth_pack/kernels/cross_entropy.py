"""Cross-entropy of hidden states through a language model's head, without its T x V logits.

For each row of hidden with a label, of logits l and z as in `head.py`:

    loss = log Σ exp(z) - z[label]
    gl   = (softmax(z) - onehot(label)) * dz/dl

One kernel reads a chunk's logits, writes log-probabilities and overwrites the logits by their gradient, -gl.
So the forward pass already computes all gradients, from logits that are computed once. The backward pass only
scales them: they stay in float32 because they are rounded afterwards.

Shapes: N tokens with a label, L of a chunk, V outputs of the head.
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
    prepare_head_inputs,
    scale_gradients,
)
from unsloth_pack.kernels.launch import apply, once_differentiable, wide_dtype
from unsloth_pack.kernels.token_scores import score_logits


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
        hidden = inputs[0]
        log_probs_N = hidden.new_empty(labelled.count, dtype=wide_dtype(hidden))
        needed = [with_grad and needs for needs in ctx.needs_input_grad[3:8]]
        head = HeadPass(inputs, labelled, needed, options)

        def turn(logits_LV: Tensor, labels_L: Tensor, chunk: slice) -> None:
            score_logits(logits_LV, labels_L, options, any(needed), log_probs_N[chunk])

        head.run(turn, log_probs_N)
        ctx.save_for_backward(labelled.rows, *head.gradients)
        ctx.shape, ctx.dtype = hidden.shape[:-1], hidden.dtype
        return -log_probs_N.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *scale_gradients(ctx, -g), None

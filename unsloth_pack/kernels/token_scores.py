"""Scores of each label under a language model's head, without its T x V logits.

For each row x of hidden with a label: l = W x + b, z = softcap * tanh(scale * l / softcap), or scale * l
without a softcap, and p = softmax(z):

    log_prob          z[label] - log Σ exp(z)
    entropy           -Σ p log p
    is_top1           whether z[label] is the first greatest z
    mean_logit        Σ z / V
    log_sum_sq_probs  log Σ p²

    d log_prob / dl = (onehot(label) - p) * dz/dl
    d entropy / dl  = -p (log p + entropy) * dz/dl

A loss weighs each token's log_prob, but only the backward pass knows the weights. The forward pass computes
the gradient for weight 1 while it has the chunk's logits, and the backward pass multiplies it. So a step
computes logits once. It computes them again only if a gradient reaches the entropy, or if the head's weight,
bias or adapter is trained.

Shapes: T tokens, N of them with a label, L of a chunk, C features, V outputs of the head.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from unsloth_pack.kernels.arguments import ExtraLogits, Field, TokenScores
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
from unsloth_pack.kernels.launch import apply, jit, once_differentiable, takes_fused_path, tl, wide_dtype


@jit
def score_kernel(
    logits, labels, log_probs, entropies, tops, means, squares, g_log_probs, g_entropies, scale, softcap, V,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, TOP1: tl.constexpr, MEAN: tl.constexpr,
    SQUARES: tl.constexpr, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scores `[L]`; WITH_GRAD logits `[L, V]` become the gradient of the weighted scores. Grid: L.

    g_log_probs, g_entropies: the weights `[L]`; None for 1 and for 0.
    """
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    label = tl.load(labels + row).to(tl.int64)
    is_valid = (label >= 0) & (label < V)
    x_label = tl.load(start + label, mask=is_valid, other=float("nan")).to(tl.float32)
    z_label, _slope = logit_and_slope(x_label, scale, softcap, CAPPED)
    peak, total, weighted, squared, summed, before = _softmax_sums(
        start, V, scale, softcap, label, CAPPED, ENTROPY, TOP1, MEAN, SQUARES, BLOCK
    )
    log_total = tl.log(total)
    tl.store(log_probs + row, (z_label - peak) - log_total)
    if ENTROPY:
        entropy = log_total - weighted / total
        tl.store(entropies + row, entropy)
    if TOP1:
        is_top = (z_label >= peak) & (z_label > before)
        tl.store(tops + row, is_top.to(tl.float32))
    if MEAN:
        tl.store(means + row, summed / V)
    if SQUARES:
        tl.store(squares + row, tl.log(squared) - 2 * log_total)
    if WITH_GRAD:
        per_total = tl.div_rn(1.0, total)
        for first in range(0, V, BLOCK):
            x_B, mask_B = load_block(start, first, V, BLOCK)
            z_B, slope_B = logit_and_slope(x_B, scale, softcap, CAPPED)
            column_B = first + tl.arange(0, BLOCK)
            p_B = tl.exp(z_B - peak) * per_total
            g_B = -p_B
            if (first <= label) & (label < first + BLOCK):
                g_B += tl.where(column_B == label, 1.0, 0.0)
            if g_log_probs is not None:
                g_B *= tl.load(g_log_probs + row)
            if g_entropies is not None:
                log_p_B = tl.where(p_B > 0, z_B - peak - log_total, 0.0)
                g_B -= tl.load(g_entropies + row) * p_B * (log_p_B + entropy)
            tl.store(start + column_B, (g_B * slope_B).to(logits.dtype.element_ty), mask=mask_B)


@jit
def _softmax_sums(
    start, V, scale, softcap, label,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, TOP1: tl.constexpr, MEAN: tl.constexpr,
    SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return a row's greatest z, Σ e, Σ e (z - greatest), Σ e², Σ z, and the greatest z before the label.

    e = exp(z - greatest). The flags choose what is computed. Every lane has its own sums, added once at the
    end: within a block the lanes share only its greatest z.
    """
    peak = -3e38  # finite: a row may begin with a block of -inf
    before = float("-inf")
    total_B = tl.zeros([BLOCK], dtype=tl.float32)
    weighted_B = tl.zeros([BLOCK], dtype=tl.float32)
    squared_B = tl.zeros([BLOCK], dtype=tl.float32)
    summed_B = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, V, BLOCK):
        x_B, mask_B = load_block(start, first, V, BLOCK)
        z_B, _slope = logit_and_slope(x_B, scale, softcap, CAPPED)
        if MEAN:
            summed_B += z_B  # 0 beyond the row
        if first + BLOCK > V:
            z_B = tl.where(mask_B, z_B, float("-inf"))
        greatest = tl.max(z_B)
        if TOP1:
            if first + BLOCK <= label:
                before = tl.maximum(before, greatest)
            elif first < label:
                is_before_B = first + tl.arange(0, BLOCK) < label
                before = tl.maximum(before, tl.max(tl.where(is_before_B, z_B, float("-inf"))))
        if greatest > peak:
            shrunk = tl.exp(peak - greatest)
            if ENTROPY:
                weighted_B = shrunk * (weighted_B + total_B * (peak - greatest))
            if SQUARES:
                squared_B *= shrunk * shrunk
            total_B *= shrunk
            peak = greatest
        e_B = tl.exp(z_B - peak)
        total_B += e_B
        if ENTROPY:
            weighted_B += e_B * tl.maximum(z_B - peak, -3e38)  # 0 * -inf would be NaN
        if SQUARES:
            squared_B += e_B * e_B
    return peak, tl.sum(total_B), tl.sum(weighted_B), tl.sum(squared_B), tl.sum(summed_B), before


FIELDS = get_args(Field)
_BLOCK = 4096  # logits that a program holds at a time; like the warps, the fastest on an H200


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | LabelledRows,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    extra: ExtraLogits | None = None,
    fields: Collection[Field] = (),
) -> TokenScores:
    """Compute scores of labels under the logits scale * (hidden Wᵀ + bias).

    Args:
        hidden, weight, labels, bias, softcap, scale, extra: as for `linear_cross_entropy`.
        fields: the scores to compute beside log_prob.

    Returns:
        The scores. At most 2²⁸ bytes of logits exist at a time, or 1,024 rows if that is more.

    Raises:
        ValueError: as for `linear_cross_entropy`; or a field is unknown.
    """
    if isinstance(fields, str) or not set(fields) <= set(FIELDS):
        raise ValueError(f"fields are {fields!r}: pass a collection of {', '.join(FIELDS)}")
    inputs, labelled = prepare_head_inputs(hidden, weight, bias, labels, softcap, extra)
    wanted = tuple(field in fields for field in FIELDS)
    is_training = torch.is_grad_enabled()
    log_prob, *others = apply(_TokenScores, labelled, (scale, softcap), wanted, is_training, *inputs)
    assert log_prob is not None
    shape = labelled.labels.shape
    return TokenScores(log_prob.view(shape), *(None if x is None else x.view(shape) for x in others))


class _TokenScores(torch.autograd.Function):
    """Compute each score, `[T]`."""

    @staticmethod
    def forward(
        ctx: Any, labelled: LabelledRows, options: Options, wanted: tuple[bool, ...], with_grad: bool,
        *inputs: *Inputs
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)  # a score that no loss reads costs nothing
        N, rows = labelled.count, labelled.rows
        hidden = inputs[0]
        wide = wide_dtype(hidden)
        needed = [with_grad and needs for needs in ctx.needs_input_grad[4:9]]
        trains_head = needed[1] or needed[2] or needed[4]
        at_once = (needed[0] or needed[3]) and not trains_head
        head = HeadPass(inputs, labelled, needed if at_once else [False] * 5, options)
        log_probs_N = hidden.new_empty(N, dtype=wide)
        others_N = [hidden.new_empty(N, dtype=wide) if wants else None for wants in wanted]

        def turn(logits_LV: Tensor, labels_L: Tensor, chunk: slice) -> None:
            others = [None if score is None else score[chunk] for score in others_N]
            score_logits(logits_LV, labels_L, options, at_once, log_probs_N[chunk], others)

        head.run(turn, log_probs_N)
        needs_logits_again = trains_head or (at_once and wanted[0])
        again = inputs if needs_logits_again else (None,) * 6
        ctx.save_for_backward(head.gradients[0], head.gradients[3], *again)
        ctx.labelled, ctx.shape, ctx.dtype, ctx.options = labelled, hidden.shape[:-1], hidden.dtype, options
        T = labelled.labels.numel()
        scores_T = [
            x if x is None else x.new_zeros(T).index_copy_(0, rows, x) for x in (log_probs_N, *others_N)
        ]
        if scores_T[2] is not None:
            scores_T[2] = scores_T[2].bool()
        ctx.mark_non_differentiable(*(score for score in scores_T[2:] if score is not None))
        return tuple(scores_T)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, g_log_prob_T: Tensor | None, g_entropy_T: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        g_hidden, g_h, *inputs = ctx.saved_tensors
        rows, needed = ctx.labelled.rows, ctx.needs_input_grad[4:9]
        if g_log_prob_T is None:
            if g_entropy_T is None:
                return (None,) * 10
            g_log_prob_T = torch.zeros_like(g_entropy_T)
        g_log_prob_N = g_log_prob_T.reshape(-1)[rows]
        g_entropy_N = None if g_entropy_T is None else g_entropy_T.reshape(-1)[rows]
        if g_entropy_N is not None or needed[1] or needed[2] or needed[4]:
            head = HeadPass(inputs, ctx.labelled, needed, ctx.options)

            def turn(logits_LV: Tensor, labels_L: Tensor, chunk: slice) -> None:
                upstream = g_log_prob_N[chunk], None if g_entropy_N is None else g_entropy_N[chunk]
                log_prob, entropy = (None if g is None else torch.empty_like(g) for g in upstream)
                assert log_prob is not None
                others = (entropy, None, None, None)
                score_logits(logits_LV, labels_L, ctx.options, True, log_prob, others, upstream)

            head.run(turn)
            gradients = [None if g is None else g.to(ctx.dtype) for g in head.gradients]
        else:
            weights_N1 = g_log_prob_N[:, None]
            g_hidden, g_h = (scale_rounded_once(x, weights_N1, ctx.dtype) for x in (g_hidden, g_h))
            gradients = [g_hidden, None, None, g_h, None]
        return *(None,) * 4, *spread_gradients(gradients, rows, ctx.shape), None


def score_logits(
    logits: Tensor,
    labels: Tensor,
    options: Options,
    with_grad: bool,
    log_prob: Tensor,
    others: Sequence[Tensor | None] = (None,) * len(FIELDS),
    upstream: Sequence[Tensor | None] = (None, None),
) -> None:
    """Write log_prob and `others`, each `[L]`, of logits `[L, V]`; with_grad: logits -> the gradient.

    It is that of the sum of log_prob and entropy weighted by `upstream`, `[L]` each; None for 1 and for 0.
    """
    if not takes_fused_path(logits, logits):
        fields = [field for field, other in zip(FIELDS, others, strict=True) if other is not None]
        g_log_prob, g_entropy = upstream
        g_log_prob = torch.ones_like(log_prob) if g_log_prob is None else g_log_prob
        weights = [g_log_prob, g_entropy] if with_grad else []
        plain = score_plainly(logits, labels, options, fields, weights)
        for score, value in zip((log_prob, *others), plain, strict=True):
            if score is not None and value is not None:
                score.copy_(value)
        return
    (L, V), (scale, softcap) = logits.shape, options
    score_kernel[(L,)](
        *(logits, labels, log_prob, *(log_prob if other is None else other for other in others), *upstream),
        *(float(scale), float(softcap or 1), V),
        *(softcap is not None, *(other is not None for other in others), with_grad, _BLOCK),
        num_warps=4 if any(other is not None for other in others) else 8,
    )

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

from collections.abc import Collection
from typing import get_args

import torch
from torch import Tensor

from unsloth_pack.kernels.head import (
    ExtraLogits,
    ExtraRows,
    LabelledRows,
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
from unsloth_pack.kernels.reference import Field, TokenScores


@jit
def score_kernel(
    logits, labels, log_probs, entropies, tops, means, squares, scale, softcap, V,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, TOP1: tl.constexpr, MEAN: tl.constexpr,
    SQUARES: tl.constexpr, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scores `[L]`; WITH_GRAD logits `[L, V]` become log_probs' gradient. Grid: L."""
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
        tl.store(entropies + row, log_total - weighted / total)
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
            g_B = -tl.exp(z_B - peak) * per_total
            if (first <= label) & (label < first + BLOCK):
                g_B += tl.where(column_B == label, 1.0, 0.0)
            tl.store(start + column_B, (g_B * slope_B).to(logits.dtype.element_ty), mask=mask_B)


@jit
def score_gradient_kernel(
    logits, labels, g_log_probs, g_entropies, scale, softcap, V,
    CAPPED: tl.constexpr, FOR_LOG_PROB: tl.constexpr, FOR_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace logits `[L, V]` by the gradient of the weighted scores. Grid: L."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    label = tl.load(labels + row).to(tl.int64)
    peak, total, weighted, _squared, _summed, _before = _softmax_sums(
        start, V, scale, softcap, label, CAPPED, True, False, False, False, BLOCK
    )
    log_total = tl.log(total)
    entropy = log_total - weighted / total
    per_total = tl.div_rn(1.0, total)
    for first in range(0, V, BLOCK):
        x_B, mask_B = load_block(start, first, V, BLOCK)
        z_B, slope_B = logit_and_slope(x_B, scale, softcap, CAPPED)
        column_B = first + tl.arange(0, BLOCK)
        p_B = tl.exp(z_B - peak) * per_total
        g_B = p_B * 0.0
        if FOR_LOG_PROB:
            g_B += tl.load(g_log_probs + row) * (tl.where(column_B == label, 1.0, 0.0) - p_B)
        if FOR_ENTROPY:
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
    hidden, weight, bias, extra, labelled = prepare_head_inputs(hidden, weight, bias, labels, softcap, extra)
    wanted = tuple(field in fields for field in FIELDS)
    options = (labelled, scale, softcap, wanted, torch.is_grad_enabled())
    log_prob, *others = _TokenScores.apply(hidden, weight, bias, *(extra or (None,) * 3), *options)
    shape = labelled.labels.shape
    return TokenScores(log_prob.view(shape), *(None if x is None else x.view(shape) for x in others))


class _TokenScores(torch.autograd.Function):
    """Compute each score, `[T]`."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, h, b, outputs, labelled: LabelledRows, scale, softcap, wanted, with_grad
    ):
        ctx.set_materialize_grads(False)  # a score that no loss reads costs nothing
        (V, C), N, rows = weight.shape, labelled.count, labelled.rows
        hidden_TC, labels_N = hidden.reshape(-1, C), labelled.labels.reshape(-1).index_select(0, rows)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        for_hidden, for_weight, for_bias, for_h, for_b = (
            with_grad and needed for needed in ctx.needs_input_grad[:5]
        )
        trains_head = for_weight or for_bias or for_b
        at_once = (for_hidden or for_h) and not trains_head
        needs_logits_again = trains_head or (at_once and wanted[0])
        g_NC = hidden.new_empty((N, C), dtype=wide) if for_hidden and at_once else None
        extra = ExtraRows(h, b, outputs, rows, (for_h and at_once, False))
        scores_N = [hidden.new_empty(N, dtype=wide) if wants else None for wants in (True, *wanted)]
        most = max_chunk_rows(V, hidden)
        # Sized by T, not N: PyTorch reuses the memory of a size that recurs every step.
        buffer_LV = hidden.new_empty((min(most, len(hidden_TC)), V))
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in split_evenly(N, most):
                x_LC = hidden_TC.index_select(0, rows[chunk])
                logits_LV = extra.apply_to(project_to_logits(x_LC, weight, bias, buffer_LV), chunk)
                parts = [None if score is None else score[chunk] for score in scores_N]
                _score(logits_LV, labels_N[chunk], parts, scale, softcap, at_once)
                if at_once:
                    extra.collect_gradients(logits_LV, chunk)
                if g_NC is not None:
                    multiply(logits_LV, weight, g_NC[chunk])
        again = (hidden_TC, weight, bias, h, b, outputs, labels_N) if needs_logits_again else (None,) * 7
        ctx.save_for_backward(rows, g_NC, extra.g_h, *again)
        ctx.shape, ctx.dtype, ctx.options = hidden.shape, hidden.dtype, (scale, softcap)
        scores_T = [_with_zeros(score, rows, len(hidden_TC)) for score in scores_N]
        if scores_T[2] is not None:
            scores_T[2] = scores_T[2].bool()
        ctx.mark_non_differentiable(*(score for score in scores_T[2:] if score is not None))
        return tuple(scores_T)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_log_prob_T, g_entropy_T, *_):
        rows, g_NC, g_h, hidden_TC, weight, bias, h, b, outputs, labels_N = ctx.saved_tensors
        needed = ctx.needs_input_grad[:5]
        if g_log_prob_T is None and g_entropy_T is None:
            return (None,) * 11
        g_log_prob_N, g_entropy_N = (
            None if g is None else g.reshape(-1).index_select(0, rows) for g in (g_log_prob_T, g_entropy_T)
        )
        g_weight = g_bias = g_b = None
        if g_entropy_N is not None or needed[1] or needed[2] or needed[4]:
            upstream = (g_log_prob_N, g_entropy_N)
            x_NC = hidden_TC.index_select(0, rows)
            extra = ExtraRows(h, b, outputs, rows, needed[3:])
            g_NC, g_weight, g_bias = _weighted_gradients(
                x_NC, weight, bias, extra, labels_N, upstream, ctx.options, needed
            )
            g_h, g_b = extra.g_h, None if extra.g_b is None else extra.g_b.to(ctx.dtype)
        else:
            assert g_log_prob_N is not None
            g_NC, g_h = (x if x is None else _weigh(x, g_log_prob_N, ctx.dtype) for x in (g_NC, g_h))
        g_hidden, g_h = (
            x if x is None else scatter_rows(x.to(ctx.dtype), rows, ctx.shape[:-1]) for x in (g_NC, g_h)
        )
        return g_hidden, g_weight, g_bias, g_h, g_b, None, None, None, None, None, None


def _weigh(x_NX: Tensor, weights_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows by their weights, rounded once. x stays: the backward may run again."""
    return torch.mul(x_NX, weights_N[:, None], out=torch.empty_like(x_NX, dtype=dtype))


def _with_zeros(score_N: Tensor | None, rows: Tensor, n_tokens: int) -> Tensor | None:
    """Return a score `[T]` with 0 where there is no label."""
    return None if score_N is None else score_N.new_zeros(n_tokens).index_copy_(0, rows, score_N)


def _weighted_gradients(
    x_NC: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    extra: ExtraRows,
    labels_N: Tensor,
    upstream: tuple[Tensor | None, Tensor | None],
    options: tuple[float, float | None],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute logits again, and from them the gradients of hidden's rows `[N, C]` (wide), weight and bias."""
    (V, _), N = weight.shape, len(x_NC)
    scale, softcap = options
    wide = torch.promote_types(x_NC.dtype, torch.float32)
    g_NC = x_NC.new_empty(x_NC.shape, dtype=wide) if needed[0] else None
    g_weight = weight.new_zeros(weight.shape, dtype=wide) if needed[1] else None
    g_bias = weight.new_zeros(V, dtype=wide) if needed[2] else None
    most = max_chunk_rows(V, x_NC)
    buffer_LV = x_NC.new_empty((min(most, N), V))
    upstream_N = [None if g is None else g.to(wide).contiguous() for g in upstream]
    with torch.autocast(x_NC.device.type, enabled=False):
        for chunk in split_evenly(N, most):
            g_LV = extra.apply_to(project_to_logits(x_NC[chunk], weight, bias, buffer_LV), chunk)
            weights = [None if g is None else g[chunk] for g in upstream_N]
            _to_gradient(g_LV, labels_N[chunk], weights, scale, softcap)
            extra.collect_gradients(g_LV, chunk)
            if g_NC is not None:
                multiply(g_LV, weight, g_NC[chunk])
            if g_weight is not None:
                add_product(g_LV.t(), x_NC[chunk], g_weight)
            if g_bias is not None:
                g_bias += g_LV.sum(0, dtype=wide)
    g_weight, g_bias = (None if g is None else g.to(x_NC.dtype) for g in (g_weight, g_bias))
    return g_NC, g_weight, g_bias


def _score(
    logits: Tensor, labels: Tensor, scores: list[Tensor | None], scale: float, softcap, with_grad: bool
) -> None:
    """Write scores `[L]` (log_prob, then `FIELDS`) of logits `[L, V]`, which become log_prob's gradient."""
    if not takes_fused_path(logits, logits):
        _plain_score(logits, labels, scores, scale, softcap, with_grad)
        return
    L, V = logits.shape
    log_prob, *others = scores
    with torch.cuda.device_of(logits):
        score_kernel[(L,)](
            *(logits, labels, log_prob, *(log_prob if other is None else other for other in others)),
            *(float(scale), float(softcap or 1), V),
            *(softcap is not None, *(other is not None for other in others), with_grad, _BLOCK),
            num_warps=4 if any(other is not None for other in others) else 8,
        )


def _to_gradient(
    logits: Tensor, labels: Tensor, upstream: list[Tensor | None], scale: float, softcap
) -> None:
    """In place: logits `[L, V]` -> d(sum(g_log_prob * log_prob + g_entropy * entropy)) / d(logits)."""
    if not takes_fused_path(logits, logits):
        _plain_to_gradient(logits, labels, upstream, scale, softcap)
        return
    L, V = logits.shape
    g_log_prob, g_entropy = upstream
    some = g_log_prob if g_entropy is None else g_entropy
    with torch.cuda.device_of(logits):
        score_gradient_kernel[(L,)](
            *(logits, labels, some if g_log_prob is None else g_log_prob, some),
            *(float(scale), float(softcap or 1), V),
            *(softcap is not None, g_log_prob is not None, g_entropy is not None, _BLOCK),
            num_warps=4,
        )


def _plain_score(
    logits: Tensor, labels: Tensor, scores: list[Tensor | None], scale: float, softcap, with_grad: bool
) -> None:
    """Do the same in plain torch."""
    log_prob, entropy, is_top1, mean_logit, log_sum_sq_probs = scores
    assert log_prob is not None
    column = labels.long()[:, None]
    z, slope = scale_and_cap(logits, scale, softcap)
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    log_prob.copy_(log_p.gather(1, column)[:, 0])
    if entropy is not None:
        entropy.copy_(-torch.special.xlogy(p, p).sum(-1))
    if is_top1 is not None:
        is_top1.copy_(z.argmax(-1, keepdim=True)[:, 0] == column[:, 0])
    if mean_logit is not None:
        mean_logit.copy_(z.mean(-1))
    if log_sum_sq_probs is not None:
        log_sum_sq_probs.copy_((2 * log_p).logsumexp(-1))
    if with_grad:
        g = p.neg_().scatter_add_(1, column, p.new_ones(()).expand_as(column))
        logits.copy_(g.mul_(slope))


def _plain_to_gradient(
    logits: Tensor, labels: Tensor, upstream: list[Tensor | None], scale: float, softcap
) -> None:
    """Do the same in plain torch."""
    g_log_prob, g_entropy = upstream
    column = labels.long()[:, None]
    z, slope = scale_and_cap(logits, scale, softcap)
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    g = torch.zeros_like(p)
    if g_log_prob is not None:
        g -= p * g_log_prob[:, None]
        g.scatter_add_(1, column, g_log_prob[:, None])
    if g_entropy is not None:
        p_log_p = torch.special.xlogy(p, p)
        entropy = -p_log_p.sum(-1, keepdim=True)
        g -= g_entropy[:, None] * (p_log_p + p * entropy)
    logits.copy_(g.mul_(slope))

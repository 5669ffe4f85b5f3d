"""The Triton kernels of `token_scores`: what one program computes, a row of a chunk's logits.

Shapes: L of a chunk, V outputs of the head.
"""

from __future__ import annotations

from .chunked_head import load_block, logit_and_slope
from .launch import jit, tl


@jit
def score_kernel(
    logits, labels, log_probs, entropies, tops, means, squares, scale, softcap, V,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, TOP1: tl.constexpr, MEAN: tl.constexpr,
    SQUARES: tl.constexpr, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores `[L]`; logits `[L, V]` become log_probs' gradient, WITH_GRAD. Grid: L."""
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
    """logits `[L, V]` become the gradient of the weighted scores. Grid: L."""
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
    """Of a row's z: the greatest; Σ e with e = exp(z - greatest), Σ e (z - greatest), Σ e² and Σ z; and the
    greatest before the label. What no flag asks for is not computed.

    Every lane sums what it sees, and the lanes are summed once at the end: for a block they share only its
    greatest z.
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

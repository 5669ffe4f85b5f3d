"""Distillation of a teacher through two language-model heads, without T x V logits of either.

For each row with a label, logits z of the student and u of the teacher (scaled, capped), temperature τ,
p = softmax(z / τ), q = softmax(u / τ), m = (p + q) / 2:

    forward_kl  KL(q || p) = Σ q log(q / p)              d / dz = (p - q) / τ
    reverse_kl  KL(p || q) = Σ p log(p / q)              d / dz = p (log(p / q) - KL(p || q)) / τ
    jsd         (KL(q || m) + KL(p || m)) / 2            d / dz = p (log(p / m) - KL(p || m)) / 2τ

    loss = Σ (ce_weight * cross_entropy + kl_weight * divergence) / num_items

Logits are float32: rounded to bfloat16 they alone would make a divergence of 1e-3. As in `head`, one chunk of
rows at a time: a GEMM for the logits of each model, a kernel that reads both and writes scores and gradient,
and a GEMM for the gradient of hidden. Equal logits have a divergence of exactly 0, and so is its gradient.

Of a stored teacher only the K greatest probabilities are known. The divergence is then between distributions
over these K tokens and "any other". It equals the one above for a teacher whose other tokens are as likely,
relative to each other, as the student's: q = p (1 - Σ_K q) / (1 - Σ_K p) outside of K. So is its gradient.

Shapes: T tokens, N of them with a label, L of a chunk, C features, K stored tokens, V outputs of the heads.

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (without its factor τ²); Agarwal et
al. 2024, "On-Policy Distillation of Language Models".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from unsloth_pack.kernels.arguments import Distillation, Divergence, ExtraLogits, TeacherHead, TopLogProbs
from unsloth_pack.kernels.head import (
    HeadPass,
    Inputs,
    LabelledRows,
    Options,
    complete_teacher,
    expect,
    load_block,
    logit_and_slope,
    prepare_head_inputs,
    scale_and_cap,
    scale_gradients,
)
from unsloth_pack.kernels.launch import apply, jit, once_differentiable, takes_fused_path, tl, wide_dtype

DIVERGENCES = get_args(Divergence)
_BLOCK = 4096  # logits of each model that a program holds at a time


@dataclass(frozen=True)
class _Options:
    scale: float
    softcap: float | None
    divergence: Divergence
    kl_weight: float
    ce_weight: float
    temperature: float


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | LabelledRows,
    teacher: TeacherHead | TopLogProbs,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    extra: ExtraLogits | None = None,
    divergence: Divergence = "forward_kl",
    kl_weight: float = 1.0,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    num_items: Tensor | float | None = None,
) -> Distillation:
    """Compute a weighted sum of the cross-entropy of labels and of the divergence from a teacher.

    Args:
        hidden, weight, labels, bias, softcap, scale, extra, num_items: as for `linear_cross_entropy`.
        teacher: its hidden states and head, with the same V outputs; or its stored probabilities.
        divergence: between the distributions of the two models at `temperature`; "jsd" is symmetric.
        kl_weight, ce_weight: factors of the two parts.
        temperature: divides the logits of both models in the divergence, not in the cross-entropy. Pass for
            stored probabilities the temperature at which they were stored.

    Returns:
        The loss, and its parts by token. At most 2²⁸ bytes of logits of each model exist at a time, or 512
        rows (1,024 of float32) if that is more. A stored teacher takes several times as much.

    Raises:
        ValueError: as for `linear_cross_entropy`; the teacher has other rows or outputs; or an option is
            unknown.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence is {divergence!r}: pass one of {', '.join(DIVERGENCES)}")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: pass a positive one")
    inputs, labelled = prepare_head_inputs(hidden, weight, bias, labels, softcap, extra)
    shape = labelled.labels.shape
    V = len(teacher.weight) if isinstance(teacher, TeacherHead) else len(weight)
    if teacher[0].shape[:-1] != shape or len(weight) != V:
        theirs = f"{[*teacher[0].shape[:-1]]} rows and {V} outputs"
        raise ValueError(f"the teacher has {theirs}: pass {[*shape]} and {len(weight)}")
    options = _Options(scale, softcap, divergence, kl_weight, ce_weight, temperature)
    total, *scores = apply(_LinearDistillation, labelled, teacher, options, torch.is_grad_enabled(), *inputs)
    divisor = labelled.count if num_items is None else num_items
    if isinstance(divisor, Tensor):
        divisor = divisor.to(total.device)
    return Distillation(total / divisor, *(score.view(shape) for score in scores))


class _LinearDistillation(torch.autograd.Function):
    """Compute the weighted sum, and each score `[T]`."""

    @staticmethod
    def forward(
        ctx: Any, labelled: LabelledRows, teacher: TeacherHead | TopLogProbs, options: _Options,
        with_grad: bool, *inputs: *Inputs
    ) -> tuple[Tensor, ...]:  # fmt: skip
        N, rows = labelled.count, labelled.rows
        hidden = inputs[0]
        wide = wide_dtype(hidden)
        needed = [with_grad and needs for needs in ctx.needs_input_grad[4:9]]
        student = HeadPass(inputs, labelled, needed, (options.scale, options.softcap), is_wide=True)
        read_teacher = _reader(teacher, labelled, options)
        of_teacher: Options = options.temperature, None
        if isinstance(teacher, TeacherHead):
            of_teacher = teacher.scale, teacher.softcap
        scores_N = [hidden.new_empty(N, dtype=wide) for _ in range(4)]
        gradient_LV = None  # of hidden's dtype, if that of the logits is wider

        def turn(logits_LV: Tensor, labels_L: Tensor, chunk: slice) -> Tensor:
            nonlocal gradient_LV
            if gradient_LV is None:  # the first chunk is the largest
                is_apart = any(needed) and wide != hidden.dtype
                gradient_LV = torch.empty_like(logits_LV, dtype=hidden.dtype) if is_apart else logits_LV
            g_LV = gradient_LV[: len(logits_LV)]
            parts = [score[chunk] for score in scores_N]
            u_LV = read_teacher(logits_LV, chunk)
            _distill(logits_LV, labels_L, u_LV, of_teacher, parts, options, g_LV if any(needed) else None)
            return g_LV

        student.run(turn)
        ctx.save_for_backward(rows, *student.gradients)
        ctx.shape, ctx.dtype = hidden.shape[:-1], hidden.dtype
        total = options.ce_weight * scores_N[0].sum() + options.kl_weight * scores_N[1].sum()
        scores_T = [x.new_zeros(labelled.labels.numel()).index_copy_(0, rows, x) for x in scores_N]
        scores_T[3] = scores_T[3].bool()
        ctx.mark_non_differentiable(*scores_T)
        return total, *scores_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *(None,) * 4, *scale_gradients(ctx, g), None


def _reader(
    teacher: TeacherHead | TopLogProbs, labelled: LabelledRows, options: _Options
) -> Callable[[Tensor, slice], Tensor]:
    """Return a function from a chunk's logits to the teacher's; log-probabilities of a stored teacher."""
    if isinstance(teacher, TeacherHead):
        hidden, weight, bias, softcap, scale, extra = teacher
        inputs, _ = prepare_head_inputs(hidden, weight, bias, labelled, softcap, extra)
        head = HeadPass(inputs, labelled, [False] * 5, (scale, softcap), is_wide=True)
        buffers: list[Tensor] = []

        def compute(logits_LV: Tensor, chunk: slice) -> Tensor:
            if not buffers:  # the first chunk is the largest
                buffers.append(torch.empty_like(logits_LV))
            return head.compute_logits(buffers[0], chunk)[0]

        return compute
    stored_NK = TopLogProbs(*(x.reshape(-1, x.shape[-1]).index_select(0, labelled.rows) for x in teacher))

    def complete(logits_LV: Tensor, chunk: slice) -> Tensor:
        z_LV = scale_and_cap(logits_LV, options.scale, options.softcap) / options.temperature
        return complete_teacher(z_LV, TopLogProbs(*(x[chunk] for x in stored_NK)))

    return complete


def _distill(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor,
    of_teacher: Options,
    scores: list[Tensor],
    options: _Options,
    gradient: Tensor | None,
) -> None:
    """Write scores `[L]` of logits `[L, V]`, and their gradient, which may be `logits` itself.

    of_teacher: the scale and softcap of its logits `[L, V]`.
    """
    scale, softcap, temperature = options.scale, options.softcap, options.temperature
    teacher_scale, teacher_softcap = of_teacher
    if not takes_fused_path(logits, teacher):
        u = scale_and_cap(teacher, teacher_scale, teacher_softcap)
        *plain, g = _distill_plainly(logits, u, labels, options)
        for score, value in zip(scores, plain, strict=True):
            score.copy_(value)
        if gradient is not None:
            gradient.copy_(g)
        return
    L, V = logits.shape
    _distillation_kernel[(L,)](
        *(logits, teacher, logits if gradient is None else gradient, labels, *scores),
        *(float(scale), float(softcap or 1), float(teacher_scale), float(teacher_softcap or 1)),
        *(1 / temperature, float(options.ce_weight), float(options.kl_weight), V),
        *(softcap is not None, teacher_softcap is not None, temperature == 1),
        *(DIVERGENCES.index(options.divergence), gradient is not None, _BLOCK),
        num_warps=8,
    )


def _distill_plainly(logits: Tensor, u: Tensor, labels: Tensor, options: _Options) -> tuple[Tensor, ...]:
    """Return the four scores `[L]` and the gradient `[L, V]`: 0 where u equals z, as autograd's is not."""
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        z = scale_and_cap(leaf, options.scale, options.softcap)
    at_one = z.detach().log_softmax(-1)
    a, b = (x.log_softmax(-1) for x in (z.detach() / options.temperature, u / options.temperature))
    p, q = a.exp(), b.exp()
    if options.divergence == "forward_kl":
        divergence, g = expect(q, b - a), p - q
    elif options.divergence == "reverse_kl":
        divergence = expect(p, a - b)
        g = torch.where(p > 0, p * (a - b - divergence[:, None]), 0)
    else:
        m = torch.maximum(a, b) + (0.5 + 0.5 * (-(a - b).abs()).exp()).log()
        of_student = expect(p, a - m)
        divergence = (of_student + expect(q, b - m)) / 2
        g = torch.where(p > 0, p * (a - m - of_student[:, None]), 0) / 2
    label = labels.long()[:, None]
    onehot = torch.zeros_like(p).scatter_(1, label, 1)
    g = options.kl_weight / options.temperature * g + options.ce_weight * (at_one.exp() - onehot)
    (g_logits,) = torch.autograd.grad(z, leaf, g)
    of_label = at_one.gather(1, label)[:, 0]
    return -of_label, divergence, -expect(q, b), (of_label >= at_one.amax(-1)).to(p.dtype), g_logits


@jit
def _distillation_kernel(
    logits, teacher, gradient, labels, cross_entropies, divergences, entropies, tops,
    scale, softcap, teacher_scale, teacher_softcap, per_temperature, ce_weight, kl_weight, V,
    CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, AT_ONE: tl.constexpr, DIVERGENCE: tl.constexpr,
    WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scores `[L]`; WITH_GRAD the gradient of logits `[L, V]`. DIVERGENCE: an index. Grid: L.

    e and f are exp of the student's and the teacher's logit, over the temperature, less the greatest so far.
    """
    row = tl.program_id(0).to(tl.int64)
    start, of_teacher = logits + row * V, teacher + row * V
    label = tl.load(labels + row).to(tl.int64)
    is_valid = (label >= 0) & (label < V)
    x_label = tl.load(start + label, mask=is_valid, other=float("nan")).to(tl.float32)
    z_label, _slope = logit_and_slope(x_label, scale, softcap, CAPPED)
    peak = -3e38  # finite: a row may begin with a block of -inf
    teacher_peak = -3e38
    total_B = tl.zeros([BLOCK], dtype=tl.float32)  # Σ e
    teacher_total_B = tl.zeros([BLOCK], dtype=tl.float32)  # Σ f
    entropy_B = tl.zeros([BLOCK], dtype=tl.float32)  # Σ f (u - greatest u)
    crossed_B = tl.zeros([BLOCK], dtype=tl.float32)  # Σ f (u - z), or Σ e (z - u)
    at_one_B = tl.zeros([BLOCK], dtype=tl.float32)  # Σ e at temperature 1
    for first in range(0, V, BLOCK):
        x_B, mask_B = load_block(start, first, V, BLOCK)
        y_B, _mask_B = load_block(of_teacher, first, V, BLOCK)
        z_B, _slope_B = logit_and_slope(x_B, scale, softcap, CAPPED)
        u_B, _slope_B = logit_and_slope(y_B, teacher_scale, teacher_softcap, TEACHER_CAPPED)
        z_B = tl.where(mask_B, z_B * per_temperature, float("-inf"))
        u_B = tl.where(mask_B, u_B * per_temperature, float("-inf"))
        greatest = tl.max(z_B)
        if greatest > peak:
            shrunk = tl.exp(peak - greatest)
            total_B *= shrunk
            if DIVERGENCE == 1:
                crossed_B *= shrunk
            if not AT_ONE:
                at_one_B *= tl.exp((peak - greatest) / per_temperature)
            peak = greatest
        greatest = tl.max(u_B)
        if greatest > teacher_peak:
            shrunk = tl.exp(teacher_peak - greatest)
            entropy_B = shrunk * (entropy_B + teacher_total_B * (teacher_peak - greatest))
            teacher_total_B *= shrunk
            if DIVERGENCE == 0:
                crossed_B *= shrunk
            teacher_peak = greatest
        e_B = tl.exp(z_B - peak)
        f_B = tl.exp(u_B - teacher_peak)
        total_B += e_B
        teacher_total_B += f_B
        entropy_B += f_B * tl.maximum(u_B - teacher_peak, -3e38)  # 0 * -inf would be NaN
        if DIVERGENCE == 0:
            crossed_B += tl.where(f_B > 0, f_B * (u_B - z_B), 0.0)
        if DIVERGENCE == 1:
            crossed_B += tl.where(e_B > 0, e_B * (z_B - u_B), 0.0)
        if not AT_ONE:
            at_one_B += tl.exp((z_B - peak) / per_temperature)
    total = tl.sum(total_B)
    teacher_total = tl.sum(teacher_total_B)
    log_total = peak + tl.log(total)
    teacher_log_total = teacher_peak + tl.log(teacher_total)
    at_one = total if AT_ONE else tl.sum(at_one_B)
    peak_at_one = peak / per_temperature
    tl.store(cross_entropies + row, tl.log(at_one) - (z_label - peak_at_one))
    tl.store(entropies + row, tl.log(teacher_total) - tl.sum(entropy_B) / teacher_total)
    tl.store(tops + row, (z_label >= peak_at_one).to(tl.float32))
    log_ratio = teacher_log_total - log_total
    of_student = 0.0  # KL from the student to the teacher, or to the mean of both
    if DIVERGENCE == 0:
        divergence = tl.sum(crossed_B) / teacher_total - log_ratio
    elif DIVERGENCE == 1:
        of_student = tl.sum(crossed_B) / total + log_ratio
        divergence = of_student
    else:
        of_student_B = tl.zeros([BLOCK], dtype=tl.float32)
        to_mean_B = tl.zeros([BLOCK], dtype=tl.float32)
        for first in range(0, V, BLOCK):
            x_B, mask_B = load_block(start, first, V, BLOCK)
            y_B, _mask_B = load_block(of_teacher, first, V, BLOCK)
            z_B, _slope_B = logit_and_slope(x_B, scale, softcap, CAPPED)
            u_B, _slope_B = logit_and_slope(y_B, teacher_scale, teacher_softcap, TEACHER_CAPPED)
            a_B = tl.where(mask_B, z_B * per_temperature - log_total, float("-inf"))
            b_B = tl.where(mask_B, u_B * per_temperature - teacher_log_total, float("-inf"))
            middle_B = _log_mean(a_B, b_B)
            of_student_B += tl.where(a_B > float("-inf"), tl.exp(a_B) * (a_B - middle_B), 0.0)
            to_mean_B += tl.where(b_B > float("-inf"), tl.exp(b_B) * (b_B - middle_B), 0.0)
        of_student = tl.sum(of_student_B)
        divergence = 0.5 * (of_student + tl.sum(to_mean_B))
    tl.store(divergences + row, divergence)
    if WITH_GRAD:
        factor = kl_weight * per_temperature
        for first in range(0, V, BLOCK):
            x_B, mask_B = load_block(start, first, V, BLOCK)
            y_B, _mask_B = load_block(of_teacher, first, V, BLOCK)
            z_B, slope_B = logit_and_slope(x_B, scale, softcap, CAPPED)
            u_B, _slope_B = logit_and_slope(y_B, teacher_scale, teacher_softcap, TEACHER_CAPPED)
            column_B = first + tl.arange(0, BLOCK)
            a_B = z_B * per_temperature - log_total
            b_B = u_B * per_temperature - teacher_log_total
            p_B = tl.exp(a_B)
            if DIVERGENCE == 0:
                g_B = factor * (p_B - tl.exp(b_B))
            elif DIVERGENCE == 1:
                g_B = factor * tl.where(p_B > 0, p_B * (a_B - b_B - of_student), 0.0)
            else:
                g_B = 0.5 * factor * tl.where(p_B > 0, p_B * (a_B - _log_mean(a_B, b_B) - of_student), 0.0)
            at_one_p_B = p_B if AT_ONE else tl.exp(z_B - peak_at_one) / at_one
            g_B += ce_weight * (at_one_p_B - tl.where(column_B == label, 1.0, 0.0))
            tl.store(
                gradient + row * V + column_B, (g_B * slope_B).to(gradient.dtype.element_ty), mask=mask_B
            )


@jit
def _log_mean(a, b):
    """Return log((exp(a) + exp(b)) / 2); exactly a where b is a."""
    return tl.maximum(a, b) + tl.log(0.5 + 0.5 * tl.exp(-tl.abs(a - b)))

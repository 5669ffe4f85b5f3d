"""Element-wise kernels: activations of MLPs with and without a gate, and dropout without a stored mask.

Gated activations are x * σ(z(x)), see `gated_lora`:

    silu       z = x
    gelu_tanh  z = 2 √(2/π) (x + 0.044715 x³), because (1 + tanh u) / 2 = σ(2u)

With s = σ(z) the derivative is s * (1 + x * σ(-z) * z'). In float32 1 - s would cancel; in half precision its
error is far below a unit. Activations without a gate save only their input:

    relu2      max(x, 0)²
    xielu      α_p x² + β x  for x ≥ 0,    α_n (exp(min(x, ε)) - 1 - x) + β x  below

All is as in transformers, except the slope of xIELU at 0 (in bfloat16 an x can be exactly 0): here β, which
the formula gives without ε, in transformers β - α_n.

Dropout: with Q = ⌈C / 8⌉ for C columns, Philox turns the counter (c mod Q, n) and the seed into eight 16-bit
numbers. Element (n, c) takes number c // Q and stays where that is at least p · 2¹⁶. So one counter serves
eight elements of a row, in eight contiguous runs of Q columns, and rows may be computed in tiles.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.kernels import reference
from unsloth_pack.kernels.arguments import dropout_scale, dropout_threshold
from unsloth_pack.kernels.launch import (
    apply,
    as_rows,
    jit,
    once_differentiable,
    takes_fused_path,
    tl,
    triton,
)

_BLOCK = 1024  # elements a program takes: a 16-byte load of bf16 a thread
_WARPS = 4
_MAX_COUNTERS = 1024  # of a program that drops elements
_PER_THREAD = 8  # counters: a 16-byte load of bf16 in each run


@jit
def product_and_gradients(g, x, u, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return act(x) * u, and the gradients of x and u for its gradient g, as exact as dtype needs."""
    z = _z(x, ACTIVATION)
    s = _sigmoid(z, dtype)
    rest = _sigmoid(-z, dtype) if dtype == tl.float32 else 1 - s
    bend = x * rest * _slope_of_z(x, ACTIVATION)
    return x * s * u, g * u * (s * (1 + bend)), g * (x * s)


@jit
def _z(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu_tanh":
        return 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 √(2/π)
    else:
        return x


@jit
def _slope_of_z(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu_tanh":
        return 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
    else:
        return 1.0


@jit
def _sigmoid(z, dtype: tl.constexpr):
    if dtype == tl.float32:
        return tl.div_rn(1.0, 1.0 + tl.exp(-z))
    else:
        return 1.0 / (1.0 + tl.exp(-z))  # faster; the error is far below a half-precision unit


def relu2(x: Tensor) -> Tensor:
    """Compute max(x, 0)², element by element.

    Args:
        x: `[...]`, bfloat16, float16 or float32; other dtypes take the reference path.

    Returns:
        A fresh contiguous tensor of its shape and dtype, computed in float32 and rounded once.

    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling".
    """
    return apply(_Ungated, x, None, None, None, None) if takes_fused_path(x, x) else reference.relu2(x)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """Compute xIELU, element by element.

    Args:
        x: as for `relu2`.
        alpha_p, alpha_n: `[1]`, any float dtype; α_p = softplus(alpha_p), α_n = beta + softplus(alpha_n).
        beta, eps: one number each, any float dtype: β and ε. They get no gradient.

    Returns:
        As `relu2`.

    Source: Huang & Schlag 2024, "Deriving Activation Functions Using Integration" (arXiv 2411.13010).
    """
    if not takes_fused_path(x, x):
        return reference.xielu(x, alpha_p, alpha_n, beta, eps)
    beta, eps = beta.detach().float(), eps.detach().float()
    return apply(_Ungated, x, F.softplus(alpha_p.float()), beta + F.softplus(alpha_n.float()), beta, eps)


class _Ungated(torch.autograd.Function):
    """Take x, and xIELU's α_p, α_n, β and ε in float32; None for relu2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *constants: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *constants)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        arguments = (x.contiguous(), *constants, out, x.numel(), constants[0] is not None, _BLOCK)
        _ungated_kernel[(-(-x.numel() // _BLOCK),)](*arguments, num_warps=_WARPS)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        x, *constants = ctx.saved_tensors
        g_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        arguments = (x.contiguous(), *constants, g_x, x.numel(), constants[0] is not None, _BLOCK)
        _ungated_backward_kernel[(-(-x.numel() // _BLOCK),)](g_out.contiguous(), *arguments, num_warps=_WARPS)
        trains = any(ctx.needs_input_grad[1:3])
        g_alphas = _alpha_gradients(g_out, x, constants[-1]) if trains else (None, None)
        return g_x, *g_alphas, None, None


def _alpha_gradients(g_out: Tensor, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of α_p and α_n, in plain torch: only full fine-tuning needs them."""
    g, x = g_out.float(), x.float()
    below = torch.where(x < 0, torch.minimum(x, eps).expm1() - x, 0)
    return (g * x.clamp(min=0).square()).sum().view(1), (g * below).sum().view(1)


@jit
def _ungated_kernel(
    x, alpha_p, alpha_n, beta, eps, out, n, XIELU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write out `[n]`. Grid: blocks of BLOCK elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(x + place, mask=place < n, other=0.0).to(tl.float32)
    if XIELU:
        above = tl.load(alpha_p) * x_B * x_B
        capped_B = tl.minimum(x_B, tl.load(eps))
        below = tl.load(alpha_n) * (_exp_less_line(capped_B) + (capped_B - x_B))
        y_B = tl.where(x_B >= 0, above, below) + tl.load(beta) * x_B
    else:
        y_B = tl.where(x_B <= 0, 0.0, x_B * x_B)  # NaN stays NaN
    tl.store(out + place, y_B.to(out.dtype.element_ty), mask=place < n)


@jit
def _ungated_backward_kernel(
    g_out, x, alpha_p, alpha_n, beta, eps, g_x, n, XIELU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write g_x `[n]`: the gradient of x. Grid: as in the forward."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(x + place, mask=place < n, other=0.0).to(tl.float32)
    g_B = tl.load(g_out + place, mask=place < n, other=0.0).to(tl.float32)
    if XIELU:
        above = 2 * tl.load(alpha_p) * x_B
        below = tl.load(alpha_n) * tl.where(x_B < tl.load(eps), _exp_less_line(x_B) + x_B, -1.0)
        slope_B = tl.where(x_B >= 0, above, below) + tl.load(beta)
    else:
        slope_B = tl.where(x_B <= 0, 0.0, 2 * x_B)
    tl.store(g_x + place, (g_B * slope_B).to(g_x.dtype.element_ty), mask=place < n)


@jit
def _exp_less_line(x):
    """Compute exp(x) - 1 - x for x up to 0, without cancellation near 0."""
    series = tl.full(x.shape, 1.0, tl.float32)  # 2 (1 / 2! + x / 3! + ... + x¹¹ / 13!)
    for k in tl.static_range(11):
        series = 1 + series * x * (1 / (13 - k))
    return tl.where(x > -1, series * x * x * 0.5, tl.exp(x) - 1 - x)


def dropout(x: Tensor, seed: Tensor, p: float, first_row: int = 0, add_to: Tensor | None = None) -> Tensor:
    """Drop elements with probability p and scale the others by 1 / (1 - p). Without autograd.

    Args:
        x: `[N, C]`, bfloat16, float16 or float32; float64 takes the reference path.
        seed: one int64 on x's device; the host does not wait for it. The same seed drops the same elements.
        p: in [0, 1]; rounded to a multiple of 2⁻¹⁶.
        first_row: the mask's row for the first row of x, if x is a tile of a longer input.
        add_to: `[N, C]`, contiguous, of x's dtype: the result is added to it in place.

    Returns:
        A fresh tensor of x's shape and dtype, or `add_to`; computed in float32 and rounded once.

    Source: Srivastava et al. 2014, "Dropout"; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2,
    3" (Philox 4x32-7, the fewest rounds that pass their tests).
    """
    if not takes_fused_path(x, x):
        return reference.dropout(x, seed, p, first_row, add_to)
    n_rows, n_columns = x.shape
    rows, stride = as_rows(x)
    out = x.new_empty(x.shape) if add_to is None else add_to
    run = -(-n_columns // 8)
    block = min(triton.next_power_of_2(run), _MAX_COUNTERS)
    _dropout_kernel[(n_rows * triton.cdiv(run, block),)](
        rows, seed, add_to, out, n_columns, run, stride, first_row,
        dropout_threshold(p), dropout_scale(p), block,
        num_warps=max(1, block // (32 * _PER_THREAD)),
        enable_fp_fusion=False,  # the oracle rounds the scaled element before it adds
    )  # fmt: skip
    return out


@jit(do_not_specialize=["first_row"])
@no_type_check
def _dropout_kernel(x, seed, add_to, out, C, RUN, x_sr, first_row, threshold, scale, BLOCK: tl.constexpr):
    """Write out `[N, C]`: the dropout of x, plus add_to unless None.

    Grid: for each row in turn, the blocks of BLOCK of its RUN = ⌈C / 8⌉ counters.
    """
    blocks = tl.cdiv(RUN, BLOCK)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    counter = block * BLOCK + tl.arange(0, BLOCK)
    words = tl.philox(tl.load(seed), counter, first_row + row, 0, 0, n_rounds=7)
    row = row.to(tl.int64)
    for run in tl.static_range(8):
        col = run * RUN + counter
        mask = (counter < RUN) & (col < C)
        number = words[run % 4] >> 16 * (run // 4) & 0xFFFF
        whole = tl.load(x + row * x_sr + col, mask=mask, other=0.0)  # a mask of single elements costs width
        dropped = tl.where(number.to(tl.int32) >= threshold, whole.to(tl.float32) * scale, 0.0)
        if add_to is not None:
            dropped += tl.load(add_to + row * C + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * C + col, dropped.to(out.dtype.element_ty), mask=mask)

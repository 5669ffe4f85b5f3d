"""Activations of MLPs without a gate in one launch, forward and backward. Only the input is kept.

    relu2   max(x, 0)²
    xielu   α_p x² + β x  for x ≥ 0,    α_n (exp(min(x, ε)) - 1 - x) + β x  below

All is as in transformers, but for the slope of xIELU at 0. Here it is β, as the formula gives without ε, and
transformers gives β - α_n. In bfloat16 an x can be exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import reference
from .backward import once_differentiable
from .launch import jit, takes_fused_path, tl

_BLOCK = 1024  # elements a program takes: a 16-byte load of bf16 a thread
_WARPS = 4


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)², element by element.

    Args:
        x: `[...]`, bfloat16, float16 or float32; other dtypes take the reference path.

    Returns:
        A fresh contiguous tensor of its shape and dtype, computed in float32 and rounded once.

    Source: So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling".
    """
    return _Ungated.apply(x, None, None, None, None) if takes_fused_path(x, x) else reference.relu2(x)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU, element by element.

    Args:
        x: as for `relu2`.
        alpha_p, alpha_n: `[1]`, any float dtype; α_p = softplus(alpha_p), α_n = beta + softplus(alpha_n).
        beta, eps: one number each, any float dtype: the slope at 0, and the ε above. They get no gradient.

    Returns:
        As `relu2`.

    Source: Huang & Schlag 2024, "Deriving Activation Functions Using Integration" (arXiv 2411.13010).
    """
    if not takes_fused_path(x, x):
        return reference.xielu(x, alpha_p, alpha_n, beta, eps)
    beta, eps = beta.detach().float(), eps.detach().float()
    return _Ungated.apply(x, F.softplus(alpha_p.float()), beta + F.softplus(alpha_n.float()), beta, eps)


class _Ungated(torch.autograd.Function):
    """x, and of xIELU α_p, α_n, β and ε in float32; None for relu2."""

    @staticmethod
    def forward(ctx, x, *constants):
        ctx.save_for_backward(x, *constants)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with torch.cuda.device_of(x):
            _ungated_kernel[_grid(x)](
                x.contiguous(), *constants, out, x.numel(), constants[0] is not None, _BLOCK, num_warps=_WARPS
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g_out):
        x, *constants = ctx.saved_tensors
        g_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        with torch.cuda.device_of(x):
            _ungated_backward_kernel[_grid(x)](
                *(g_out.contiguous(), x.contiguous(), *constants, g_x, x.numel()),
                *(constants[0] is not None, _BLOCK),
                num_warps=_WARPS,
            )
        trains = any(ctx.needs_input_grad[1:3])
        g_alphas = _gradients_of_alphas(g_out, x, constants[-1]) if trains else (None, None)
        return g_x, *g_alphas, None, None


def _grid(x: Tensor) -> tuple[int]:
    return (-(-x.numel() // _BLOCK),)


def _gradients_of_alphas(g_out: Tensor, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """In plain torch: they are wanted in full fine-tuning alone."""
    g, x = g_out.float(), x.float()
    below = torch.where(x < 0, torch.minimum(x, eps).expm1() - x, 0)
    return (g * x.clamp(min=0).square()).sum().view(1), (g * below).sum().view(1)


@jit
def _ungated_kernel(
    x, alpha_p, alpha_n, beta, eps, out, n, XIELU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out `[n]`. Grid: blocks of BLOCK elements."""
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
    """g_x `[n]`: the gradient of x. Grid: as in the forward."""
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
    """exp(x) - 1 - x for x up to 0, where the difference cancels near 0."""
    series = tl.full(x.shape, 1 / 6227020800, tl.float32)  # x² / 2! + x³ / 3! + ... + x¹³ / 13!
    series = series * x + 1 / 479001600
    series = series * x + 1 / 39916800
    series = series * x + 1 / 3628800
    series = series * x + 1 / 362880
    series = series * x + 1 / 40320
    series = series * x + 1 / 5040
    series = series * x + 1 / 720
    series = series * x + 1 / 120
    series = series * x + 1 / 24
    series = series * x + 1 / 6
    series = series * x + 1 / 2
    return tl.where(x > -1, series * x * x, tl.exp(x) - 1 - x)

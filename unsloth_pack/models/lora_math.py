"""The arithmetic of LoRA layers over one input, with no copies between their GEMMs.

    y_p = x W_pᵀ + b_p + s_p · (x A_pᵀ) B_pᵀ      for each of the layers p     (Hu et al. 2021)

The A of all layers are stacked, so that x is read once for all of them, forward and backward. Factors are
cast once, and the scale rides along in a GEMM's alpha.

Shapes: N tokens, I inputs, O outputs, r rank, R ranks of all layers together; W `[O, I]`, A `[r, I]`,
B `[O, r]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unsloth_pack.kernels import Fp8Rows, fp8_linear, fp8_linear_backward, quantize_rows
from unsloth_pack.models.nf4 import Nf4Weight

Frozen = Tensor | Fp8Rows | Nf4Weight
Versions = list[tuple[Tensor | None, int]]  # of tensors that a node reads again in its backward pass


@dataclass(frozen=True)
class Layer:
    """One layer: its frozen weight, its bias and B in the dtype computed in, its place among the ranks."""

    weight: Frozen
    scaling: float
    bias: Tensor | None
    b_Or: Any
    ranks: slice


def stack(
    dtype: torch.dtype, frozen: Sequence[tuple[Frozen, float]], tensors: Sequence[Any]
) -> tuple[Tensor, list[Layer]]:
    """A `[R, I]` of all layers in the dtype, and the layers.

    Args:
        frozen: weight and scaling of each layer.
        tensors: bias (or None), A and B of each in turn.
    """
    layers, start = [], 0
    for (weight, scaling), bias, lora_a, lora_b in zip(
        frozen, tensors[::3], tensors[1::3], tensors[2::3], strict=True
    ):
        ranks = slice(start, start + lora_a.shape[0])
        cast_bias = None if bias is None else bias.to(dtype)
        layers.append(Layer(weight, scaling, cast_bias, lora_b.to(dtype), ranks))
        start = ranks.stop
    stacked = [lora_a.to(dtype) for lora_a in tensors[1::3]]
    return stacked[0] if len(stacked) == 1 else torch.cat(stacked), layers


def opened(layers: Sequence[Layer], dtype: torch.dtype) -> list[Layer]:
    """The layers with 4-bit weights dequantised, for callers that go through their tokens in parts."""
    return [
        replace(p, weight=p.weight.dequantized(dtype)) if isinstance(p.weight, Nf4Weight) else p
        for p in layers
    ]


def forward(x_NI: Tensor, a_RI: Tensor, layers: Sequence[Layer]) -> tuple[list[Tensor], Tensor]:
    """Every layer's output, and h = x Aᵀ of all."""
    h_NR = x_NI @ a_RI.t()
    x_fp8 = quantize_rows(x_NI) if any(isinstance(p.weight, Fp8Rows) for p in layers) else None
    outputs = []
    for p in layers:
        if isinstance(p.weight, Fp8Rows):
            assert x_fp8 is not None
            y_NO = fp8_linear(x_fp8, p.weight, x_NI.dtype)
            if p.bias is not None:
                y_NO += p.bias
        else:
            y_NO = F.linear(x_NI, _dense(p.weight, x_NI.dtype), p.bias)
        outputs.append(y_NO.addmm_(h_NR[:, p.ranks], p.b_Or.t(), alpha=p.scaling))
    return outputs, h_NR


def backward_to_ranks(g_NOs: Sequence[Tensor], a_RI: Tensor, layers: Sequence[Layer]) -> Tensor:
    """The gradient of h."""
    gh_NR = g_NOs[0].new_empty(g_NOs[0].shape[0], a_RI.shape[0])
    for g_NO, p in zip(g_NOs, layers, strict=True):
        gh_Nr = gh_NR[:, p.ranks]
        torch.addmm(gh_Nr, g_NO, p.b_Or, beta=0, alpha=p.scaling, out=gh_Nr)
    return gh_NR


def backward_to_input(
    g_NOs: Sequence[Tensor], gh_NR: Tensor, a_RI: Tensor, layers: Sequence[Layer]
) -> Tensor:
    """The gradient of x."""
    gx_NI: Tensor | None = None
    for g_NO, p in zip(g_NOs, layers, strict=True):
        if isinstance(p.weight, Fp8Rows):
            part = fp8_linear_backward(g_NO, p.weight)
            gx_NI = part if gx_NI is None else gx_NI.add_(part)
        else:
            weight = _dense(p.weight, g_NO.dtype)
            gx_NI = g_NO @ weight if gx_NI is None else gx_NI.addmm_(g_NO, weight)
    assert gx_NI is not None
    return gx_NI.addmm_(gh_NR, a_RI)


def backward_to_factors(
    g_NOs: Sequence[Tensor], gh_NR: Tensor, x_NI: Tensor, h_NR: Tensor, layers: Sequence[Layer]
) -> list[Tensor]:
    """The gradients of the stacked A, then of every B, in the dtype of x."""
    return [gh_NR.t() @ x_NI] + [
        torch.addmm(p.b_Or, g_NO.t(), h_NR[:, p.ranks], beta=0, alpha=p.scaling)
        for g_NO, p in zip(g_NOs, layers, strict=True)
    ]


def by_layer(
    factors: Sequence[Tensor], biases: Sequence[Tensor | None], layers: Sequence[Layer]
) -> list[Any]:
    """Gradients as `stack` takes tensors: bias (or None), A and B of each layer in turn."""
    grad_a_RI, *grad_bs = factors
    return [
        grad
        for p, bias, grad_b in zip(layers, biases, grad_bs, strict=True)
        for grad in (bias, grad_a_RI[p.ranks], grad_b)
    ]


def shaped(y_NO: Tensor, shape: Sequence[int]) -> Tensor:
    """`[..., O]` for an input of this shape. No view to autograd, which forbids changing such in place."""
    return torch.ops.aten._unsafe_view(y_NO, [*shape[:-1], y_NO.shape[-1]])


def versions(frozen: Sequence[tuple[Frozen, float]], tensors: Sequence[Tensor | None] = ()) -> Versions:
    """What `unchanged` compares with: for tensors that are kept by reference.

    What is saved the usual way has to be computed again under checkpointing, and a quantised weight is no
    tensor.
    """
    memory = [weight if isinstance(weight, Tensor) else weight[0] for weight, _ in frozen]
    return [(x, 0 if x is None or x.is_inference() else x._version) for x in (*memory, *tensors)]


def unchanged(held: Versions) -> None:
    """Ask what autograd itself would ask of saved tensors.

    Raises:
        RuntimeError: one was modified in place since the forward pass.
    """
    if any(x is not None and not x.is_inference() and x._version != version for x, version in held):
        raise RuntimeError("a layer's weight was modified in place between forward and backward")


def backward_pass(backward: Callable[..., Any]) -> Any:
    """`once_differentiable`, in the dtypes of the forward pass even where autocast is on by now."""

    @once_differentiable
    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        device = grads[0].device.type
        if not torch.is_autocast_enabled(device):
            return backward(ctx, *grads)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return run


def _dense(weight: Tensor | Nf4Weight, dtype: torch.dtype) -> Tensor:
    return weight.dequantized(dtype) if isinstance(weight, Nf4Weight) else weight

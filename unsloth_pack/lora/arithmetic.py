"""The arithmetic of LoRA layers over one input, with no copies between their GEMMs.

    y_p = x W_pᵀ + b_p + s_p · (drop_p(x) A_pᵀ) B_pᵀ      for each of the layers p     (Hu et al. 2021)

The A of all layers are stacked, so that x is read once for all of them, forward and backward. Factors are
cast once, and the scale rides along in a GEMM's alpha. Layers with dropout read x one after the other; what
they read is drawn again from a seed wherever it is needed, and never kept.

Shapes: N tokens, I inputs, O outputs, r rank, R ranks of all layers together; W `[O, I]`, A `[r, I]`,
B `[O, r]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unsloth_pack.kernels import Fp8Rows, dropout, fp8_linear, fp8_linear_backward, quantize_rows
from unsloth_pack.lora.nf4 import Nf4Weight

Weight = Tensor | Fp8Rows | Nf4Weight
Versions = list[tuple[Tensor | None, int]]  # of tensors that a node reads again in its backward pass


class Frozen(NamedTuple):
    """What no gradient reaches of a layer.

    Args:
        p: probability that an element of the adapter's input is dropped.
        seed: of what is dropped; None where p is 0.
    """

    weight: Weight
    scaling: float
    p: float = 0.0
    seed: Tensor | None = None


@dataclass(frozen=True)
class Layer:
    """One layer: what is frozen, its bias and B in the dtype computed in, its place among the ranks."""

    frozen: Frozen
    bias: Tensor | None
    b_Or: Any
    ranks: slice

    @property
    def weight(self) -> Weight:
        return self.frozen.weight

    @property
    def scaling(self) -> float:
        return self.frozen.scaling

    def dropped(self, x_NC: Tensor, first_row: int, add_to: Tensor | None = None) -> Tensor:
        """What dropout leaves of rows that lie so far into the layer's input, or of their gradient."""
        _, _, p, seed = self.frozen
        if seed is None:
            return x_NC if add_to is None else add_to.add_(x_NC)
        return dropout(x_NC, seed, p, first_row, add_to)


def stack(dtype: torch.dtype, frozen: Sequence[Frozen], tensors: Sequence[Any]) -> tuple[Tensor, list[Layer]]:
    """A `[R, I]` of all layers in the dtype, and the layers.

    Args:
        tensors: bias (or None), A and B of each in turn.
    """
    layers, start = [], 0
    for own, bias, lora_a, lora_b in zip(frozen, tensors[::3], tensors[1::3], tensors[2::3], strict=True):
        ranks = slice(start, start + lora_a.shape[0])
        cast_bias = None if bias is None else bias.to(dtype)
        layers.append(Layer(own, cast_bias, lora_b.to(dtype), ranks))
        start = ranks.stop
    stacked = [lora_a.to(dtype) for lora_a in tensors[1::3]]
    return stacked[0] if len(stacked) == 1 else torch.cat(stacked), layers


def opened(layers: Sequence[Layer], dtype: torch.dtype) -> list[Layer]:
    """The layers with 4-bit weights dequantised, for callers that go through their tokens in parts."""
    return [
        replace(p, frozen=p.frozen._replace(weight=p.weight.dequantized(dtype)))
        if isinstance(p.weight, Nf4Weight)
        else p
        for p in layers
    ]


def forward(
    x_NI: Tensor, a_RI: Tensor, layers: Sequence[Layer], first_row: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Every layer's output, and h of all. As below, x may be a tile: `first_row` is where it begins."""
    h_NR = to_ranks(x_NI, a_RI, layers, first_row)
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


def to_ranks(x_NI: Tensor, a_RI: Tensor, layers: Sequence[Layer], first_row: int = 0) -> Tensor:
    """h = drop(x) Aᵀ of all layers."""
    if not _drop(layers):
        return x_NI @ a_RI.t()
    h_NR = x_NI.new_empty(x_NI.shape[0], a_RI.shape[0])
    for p in layers:
        torch.mm(p.dropped(x_NI, first_row), a_RI[p.ranks].t(), out=h_NR[:, p.ranks])
    return h_NR


def backward_to_ranks(g_NOs: Sequence[Tensor], a_RI: Tensor, layers: Sequence[Layer]) -> Tensor:
    """The gradient of h."""
    gh_NR = g_NOs[0].new_empty(g_NOs[0].shape[0], a_RI.shape[0])
    for g_NO, p in zip(g_NOs, layers, strict=True):
        gh_Nr = gh_NR[:, p.ranks]
        torch.addmm(gh_Nr, g_NO, p.b_Or, beta=0, alpha=p.scaling, out=gh_Nr)
    return gh_NR


def backward_to_input(
    g_NOs: Sequence[Tensor], gh_NR: Tensor, a_RI: Tensor, layers: Sequence[Layer], first_row: int = 0
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
    if not _drop(layers):
        return gx_NI.addmm_(gh_NR, a_RI)
    for p in layers:
        p.dropped(gh_NR[:, p.ranks] @ a_RI[p.ranks], first_row, add_to=gx_NI)
    return gx_NI


def backward_to_factors(
    g_NOs: Sequence[Tensor],
    gh_NR: Tensor,
    x_NI: Tensor,
    h_NR: Tensor,
    layers: Sequence[Layer],
    first_row: int = 0,
) -> list[Tensor]:
    """The gradients of the stacked A, then of every B, in the dtype of x."""
    if _drop(layers):
        grads = [gh_NR[:, p.ranks].t() @ p.dropped(x_NI, first_row) for p in layers]
        grad_a_RI = grads[0] if len(grads) == 1 else torch.cat(grads)
    else:
        grad_a_RI = gh_NR.t() @ x_NI
    return [grad_a_RI] + [
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


def versions(frozen: Sequence[Frozen], tensors: Sequence[Tensor | None] = ()) -> Versions:
    """What `unchanged` compares with: for tensors that are kept by reference.

    What is saved the usual way has to be computed again under checkpointing, and a quantised weight is no
    tensor.
    """
    memory = [own.weight if isinstance(own.weight, Tensor) else own.weight[0] for own in frozen]
    return [(x, 0 if x is None or x.is_inference() else x._version) for x in (*memory, *tensors)]


def unchanged(held: Versions) -> None:
    """Ask what autograd itself would ask of saved tensors.

    Raises:
        RuntimeError: one was modified in place since the forward pass.
    """
    if any(x is not None and not x.is_inference() and x._version != version for x, version in held):
        raise RuntimeError(
            "a layer's weight was modified in place between forward and backward; change it after backward()"
        )


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


def _drop(layers: Sequence[Layer]) -> bool:
    return any(p.frozen.seed is not None for p in layers)


def _dense(weight: Tensor | Nf4Weight, dtype: torch.dtype) -> Tensor:
    return weight.dequantized(dtype) if isinstance(weight, Nf4Weight) else weight

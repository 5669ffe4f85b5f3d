"""LoRA linear layers over one input as one autograd node, with no copies between their GEMMs.

    y_p = x W_pᵀ + b_p + s_p · (x A_pᵀ) B_pᵀ      for each of the layers p     (Hu et al. 2021)

The A of all layers are stacked, so that x is read once for all of them, forward and backward.

Shapes: N tokens, I inputs, O outputs, r rank, R ranks of all layers together; W `[O, I]`, A `[r, I]`,
B `[O, r]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unsloth_pack.kernels import gated, gated_backward


class Recipe(NamedTuple):
    """How to compute an activation again in the backward pass, in place of keeping it.

    Args:
        compute: the function; gives the same bits every time.
        inputs: the tensors that it takes, kept for the backward pass anyway.
    """

    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


class FastLoraLinear(nn.Module):
    """Takes the place of a PEFT `lora.Linear`'s class; what it cannot fuse goes through PEFT's forward."""

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """The layer applied to act(gate) * up: `[..., O]` from two of `[..., I]`.

        On a GPU the product, the largest activation of a decoder layer, is not kept for the backward pass but
        computed again.
        """
        if (
            not gate.is_cuda
            or self.has_hooks
            or not self.runs_fused(gate)
            or _computes_in(gate) != gate.dtype
        ):
            return self(gated(gate, up, activation))
        return _GatedLoraLinear.apply(gate, up, activation, *self._tensors(), self._scaling)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[..., O]` from `[..., I]`."""
        if args or kwargs or not self.runs_fused(x):
            return super().forward(x, *args, **kwargs)
        return _apply_fused(x, [self])[0]

    def cast_when_used(self) -> list[Tensor]:
        """The parameters that every call casts to what it computes in: A and B, where it runs fused."""
        return list(self._tensors()[2:]) if self._is_plain else []

    def runs_fused(self, x: Tensor) -> bool:
        """Whether `forward` of this input is one autograd node."""
        return self._is_plain and self.base_layer.weight.dtype == _computes_in(x)

    @property
    def has_hooks(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks)

    @property
    def _is_plain(self) -> bool:
        return not self.disable_adapters and not self.merged and why_not_fused(self) is None

    @property
    def _scaling(self) -> Any:
        return self.scaling[self.active_adapters[0]]

    def _tensors(self) -> tuple[Any, ...]:
        """The weight, the bias or None, A and B."""
        adapter, base = self.active_adapters[0], self.base_layer
        return base.weight, base.bias, self.lora_A[adapter].weight, self.lora_B[adapter].weight


def project(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Every layer applied to `x`: `[..., O]` each from `[..., I]`.

    LoRA layers that can all be fused run as one autograd node. Where x carries a `recipe`, it is computed
    again in the backward pass.
    """
    if all(isinstance(p, FastLoraLinear) and not p.has_hooks and p.runs_fused(x) for p in layers):
        return _apply_fused(x, layers)
    return [layer(x) for layer in layers]


def why_not_fused(layer: LoraLinear) -> str | None:
    """Why a LoRA layer runs through PEFT's own forward, or None where it is fused."""
    if type(layer.base_layer) is not nn.Linear:
        return f"on a {type(layer.base_layer).__name__}"
    if layer.base_layer.weight.requires_grad:
        return "the base weight is trained"
    if len(layer.active_adapters) != 1:
        return f"{len(layer.active_adapters)} active adapters"
    adapter = layer.active_adapters[0]
    if adapter not in layer.lora_A:
        return "no adapter here"
    if adapter in layer.lora_variant:
        return type(layer.lora_variant[adapter]).__name__.removesuffix("LinearVariant")
    if layer.training and not isinstance(layer.lora_dropout[adapter], nn.Identity):
        return "LoRA dropout"
    if layer.lora_B[adapter].bias is not None:
        return "LoRA bias"
    return None


def _computes_in(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _apply_fused(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    recipe = getattr(x, "recipe", None) if x.dtype == _computes_in(x) else None
    tensors = [tensor for layer in layers for tensor in layer._tensors()]
    scalings = [layer._scaling for layer in layers]
    return list(_LoraLinears.apply(x.to(_computes_in(x)), recipe, scalings, *tensors))


@dataclass(frozen=True)
class _Layer:
    """One layer of a node: its frozen weight, its B, and its columns among the stacked ranks."""

    weight: Tensor
    bias: Tensor | None
    b_Or: Tensor
    scaling: float
    ranks: slice


class _LoraLinears(torch.autograd.Function):
    """Launch-bound on small models: factors are cast once, and the scale rides along in a GEMM's alpha."""

    @staticmethod
    def forward(ctx, x, recipe, scalings, *tensors):
        x_NI = x.reshape(-1, x.shape[-1])
        a_RI, layers = _stack(x.dtype, scalings, tensors)
        outputs, h_NR = _forward(x_NI, a_RI, layers)
        kept = (x,) if recipe is None else recipe.inputs
        ctx.save_for_backward(a_RI, h_NR, *(t for p in layers for t in (p.weight, p.b_Or)), *kept)
        ctx.recompute = None if recipe is None else recipe.compute
        ctx.scalings, ctx.shape = scalings, x.shape
        ctx.ranks = [p.ranks for p in layers]
        return tuple(y_NO.view(*x.shape[:-1], -1) for y_NO in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        a_RI, h_NR, *saved = ctx.saved_tensors
        n = len(ctx.scalings)
        layers = [
            _Layer(weight, None, b_Or, scaling, ranks)
            for weight, b_Or, scaling, ranks in zip(
                saved[: 2 * n : 2], saved[1 : 2 * n : 2], ctx.scalings, ctx.ranks, strict=True
            )
        ]
        kept = saved[2 * n :]
        x = kept[0] if ctx.recompute is None else ctx.recompute(*kept)
        g_NOs = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        gx_NI, gh_NR = _backward_to_input(g_NOs, a_RI, layers, ctx.needs_input_grad[0])
        factors = _backward_to_factors(g_NOs, gh_NR, x.reshape(-1, x.shape[-1]), h_NR, layers)
        needs_bias = ctx.needs_input_grad[4::4]
        by_layer = (
            (None, g_NO.sum(0) if trained else None, grad_a, grad_b)
            for g_NO, trained, (grad_a, grad_b) in zip(g_NOs, needs_bias, factors, strict=True)
        )
        grad_x = None if gx_NI is None else gx_NI.view(ctx.shape)
        return grad_x, None, None, *(grad for grads in by_layer for grad in grads)


class _GatedLoraLinear(torch.autograd.Function):
    """One layer over x = act(gate) * up, which the backward pass computes again."""

    @staticmethod
    def forward(ctx, gate, up, activation, weight, bias, lora_a, lora_b, scaling):
        x_NI = gated(gate, up, activation).reshape(-1, gate.shape[-1])
        a_rI, (layer,) = _stack(gate.dtype, [scaling], (weight, bias, lora_a, lora_b))
        (y_NO,), h_Nr = _forward(x_NI, a_rI, [layer])
        ctx.save_for_backward(gate, up, a_rI, h_Nr, weight, layer.b_Or)
        ctx.activation, ctx.scaling = activation, scaling
        return y_NO.view(*gate.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up, a_rI, h_Nr, weight, b_Or = ctx.saved_tensors
        layers = [_Layer(weight, None, b_Or, ctx.scaling, slice(None))]
        g_NO = grad.reshape(-1, grad.shape[-1])
        gx_NI, gh_Nr = _backward_to_input([g_NO], a_rI, layers, True)
        grad_gate, grad_up, x = gated_backward(gx_NI.view(gate.shape), gate, up, ctx.activation)
        ((grad_a, grad_b),) = _backward_to_factors([g_NO], gh_Nr, x.reshape(gx_NI.shape), h_Nr, layers)
        grad_bias = g_NO.sum(0) if ctx.needs_input_grad[4] else None
        return grad_gate, grad_up, None, None, grad_bias, grad_a, grad_b, None


def _stack(
    dtype: torch.dtype, scalings: Sequence[float], tensors: Sequence[Any]
) -> tuple[Tensor, list[_Layer]]:
    """A `[R, I]` of all layers in the dtype, and the layers; from weight, bias, A and B of each in turn."""
    layers, start = [], 0
    for weight, bias, lora_a, lora_b, scaling in zip(
        tensors[::4], tensors[1::4], tensors[2::4], tensors[3::4], scalings, strict=True
    ):
        ranks = slice(start, start + lora_a.shape[0])
        layers.append(_Layer(weight, bias, lora_b.to(dtype), scaling, ranks))
        start = ranks.stop
    stacked = [lora_a.to(dtype) for lora_a in tensors[2::4]]
    return stacked[0] if len(stacked) == 1 else torch.cat(stacked), layers


def _forward(x_NI: Tensor, a_RI: Tensor, layers: Sequence[_Layer]) -> tuple[list[Tensor], Tensor]:
    """Every layer's output, and h = x Aᵀ of all."""
    h_NR = x_NI @ a_RI.t()
    outputs = []
    for p in layers:
        y_NO = F.linear(x_NI, p.weight, p.bias)
        outputs.append(y_NO.addmm_(h_NR[:, p.ranks], p.b_Or.t(), alpha=p.scaling))
    return outputs, h_NR


def _backward_to_input(
    g_NOs: Sequence[Tensor], a_RI: Tensor, layers: Sequence[_Layer], wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradients of x, where wanted, and of h."""
    gh_NR = g_NOs[0].new_empty(g_NOs[0].shape[0], a_RI.shape[0])
    for g_NO, p in zip(g_NOs, layers, strict=True):
        gh_Nr = gh_NR[:, p.ranks]
        torch.addmm(gh_Nr, g_NO, p.b_Or, beta=0, alpha=p.scaling, out=gh_Nr)
    if not wanted:
        return None, gh_NR
    gx_NI = gh_NR @ a_RI
    for g_NO, p in zip(g_NOs, layers, strict=True):
        gx_NI.addmm_(g_NO, p.weight)
    return gx_NI, gh_NR


def _backward_to_factors(
    g_NOs: Sequence[Tensor], gh_NR: Tensor, x_NI: Tensor, h_NR: Tensor, layers: Sequence[_Layer]
) -> list[tuple[Tensor, Tensor]]:
    """The gradients of every A and B in the dtype of x; autograd casts them to the parameters'."""
    grad_a_RI = gh_NR.t() @ x_NI
    return [
        (
            grad_a_RI[p.ranks],
            torch.addmm(p.b_Or, g_NO.t(), h_NR[:, p.ranks], beta=0, alpha=p.scaling),
        )
        for g_NO, p in zip(g_NOs, layers, strict=True)
    ]

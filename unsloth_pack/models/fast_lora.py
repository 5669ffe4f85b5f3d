"""LoRA linear layers over one input as one autograd node, with no copies between their GEMMs.

    y_p = x W_pᵀ + b_p + s_p · (x A_pᵀ) B_pᵀ      for each of the layers p     (Hu et al. 2021)

The A of all layers are stacked, so that x is read once for all of them, forward and backward.

Shapes: N tokens, I inputs, O outputs, r rank, R ranks of all layers together; W `[O, I]`, A `[r, I]`,
B `[O, r]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unsloth_pack.kernels import (
    Fp8Rows,
    fp8_linear,
    fp8_linear_backward,
    gated,
    gated_backward,
    quantize_rows,
)
from unsloth_pack.models.fp8 import Fp8Linear


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
        return _GatedLoraLinear.apply(gate, up, activation, self._frozen, self._scaling, *self._tensors())

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[..., O]` from `[..., I]`."""
        if args or kwargs or not self.runs_fused(x):
            return super().forward(x, *args, **kwargs)
        return _apply_fused(x, [self])[0]

    def cast_when_used(self) -> list[Tensor]:
        """The parameters that every call casts to what it computes in: A and B, where it runs fused."""
        return list(self._tensors()[1:]) if self._is_plain else []

    def runs_fused(self, x: Tensor) -> bool:
        """Whether `forward` of this input is one autograd node."""
        base = self.base_layer
        dtype = base.compute_dtype if isinstance(base, Fp8Linear) else base.weight.dtype
        return self._is_plain and dtype == _computes_in(x)

    @property
    def has_hooks(self) -> bool:
        return bool(self._forward_hooks or self._forward_pre_hooks)

    @property
    def _is_plain(self) -> bool:
        return not self.disable_adapters and not self.merged and why_not_fused(self) is None

    @property
    def _scaling(self) -> Any:
        return self.scaling[self.active_adapters[0]]

    @property
    def _frozen(self) -> Any:
        """The weight, a tensor or `Fp8Rows`."""
        base = self.base_layer
        return base.rows if isinstance(base, Fp8Linear) else base.weight

    def _tensors(self) -> tuple[Any, ...]:
        """What may be trained: the bias or None, A and B."""
        adapter = self.active_adapters[0]
        return self.base_layer.bias, self.lora_A[adapter].weight, self.lora_B[adapter].weight


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
    if type(layer.base_layer) not in (nn.Linear, Fp8Linear):
        return f"on a {type(layer.base_layer).__name__}"
    if is_gathered_by_module(layer.base_layer.weight):
        return "ZeRO-3 gathers the weights of one module at a time"
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


def is_gathered_by_module(parameter: Tensor) -> bool:
    """Whether a parameter is empty outside the forward of its own module, as ZeRO-3 leaves it."""
    return hasattr(parameter, "ds_id")


def _computes_in(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _apply_fused(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    recipe = getattr(x, "recipe", None) if x.dtype == _computes_in(x) else None
    frozen = [(layer._frozen, layer._scaling) for layer in layers]
    tensors = [tensor for layer in layers for tensor in layer._tensors()]
    return list(_LoraLinears.apply(x.to(_computes_in(x)), recipe, frozen, *tensors))


@dataclass(frozen=True)
class _Layer:
    """One layer of a node: its frozen weight, its B, and its place among the stacked ranks."""

    weight: Tensor | Fp8Rows
    scaling: float
    bias: Tensor | None
    b_Or: Any
    ranks: slice


class _LoraLinears(torch.autograd.Function):
    """Launch-bound on small models: factors are cast once, and the scale rides along in a GEMM's alpha."""

    @staticmethod
    def forward(ctx, x, recipe, frozen, *tensors):
        x_NI = x.reshape(-1, x.shape[-1])
        a_RI, layers = _stack(x.dtype, frozen, tensors)
        outputs, h_NR = _forward(x_NI, a_RI, layers)
        kept = (x,) if recipe is None else recipe.inputs
        ctx.save_for_backward(a_RI, h_NR, *(p.b_Or for p in layers), *kept)
        ctx.recompute = None if recipe is None else recipe.compute
        ctx.layers, ctx.shape = [replace(p, bias=None, b_Or=None) for p in layers], x.shape
        return tuple(y_NO.view(*x.shape[:-1], -1) for y_NO in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        a_RI, h_NR, *saved = ctx.saved_tensors
        b_Ors, kept = saved[: len(ctx.layers)], saved[len(ctx.layers) :]
        layers = [replace(p, b_Or=b_Or) for p, b_Or in zip(ctx.layers, b_Ors, strict=True)]
        x = kept[0] if ctx.recompute is None else ctx.recompute(*kept)
        g_NOs = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        gx_NI, gh_NR = _backward_to_input(g_NOs, a_RI, layers, ctx.needs_input_grad[0])
        factors = _backward_to_factors(g_NOs, gh_NR, x.reshape(-1, x.shape[-1]), h_NR, layers)
        trains_bias = ctx.needs_input_grad[3::3]
        by_layer = (
            (g_NO.sum(0) if trained else None, grad_a, grad_b)
            for g_NO, trained, (grad_a, grad_b) in zip(g_NOs, trains_bias, factors, strict=True)
        )
        grad_x = None if gx_NI is None else gx_NI.view(ctx.shape)
        return grad_x, None, None, *(grad for grads in by_layer for grad in grads)


class _GatedLoraLinear(torch.autograd.Function):
    """One layer over x = act(gate) * up, which the backward pass computes again."""

    @staticmethod
    def forward(ctx, gate, up, activation, weight, scaling, bias, lora_a, lora_b):
        x_NI = gated(gate, up, activation).reshape(-1, gate.shape[-1])
        a_rI, (layer,) = _stack(gate.dtype, [(weight, scaling)], (bias, lora_a, lora_b))
        (y_NO,), h_Nr = _forward(x_NI, a_rI, [layer])
        ctx.save_for_backward(gate, up, a_rI, h_Nr, layer.b_Or)
        ctx.activation, ctx.layer = activation, replace(layer, bias=None, b_Or=None)
        return y_NO.view(*gate.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up, a_rI, h_Nr, b_Or = ctx.saved_tensors
        layers = [replace(ctx.layer, b_Or=b_Or)]
        g_NO = grad.reshape(-1, grad.shape[-1])
        gx_NI, gh_Nr = _backward_to_input([g_NO], a_rI, layers, True)
        grad_gate, grad_up, x = gated_backward(gx_NI.view(gate.shape), gate, up, ctx.activation)
        ((grad_a, grad_b),) = _backward_to_factors([g_NO], gh_Nr, x.reshape(gx_NI.shape), h_Nr, layers)
        grad_bias = g_NO.sum(0) if ctx.needs_input_grad[5] else None
        return grad_gate, grad_up, None, None, None, grad_bias, grad_a, grad_b


def _stack(
    dtype: torch.dtype, frozen: Sequence[tuple[Tensor | Fp8Rows, float]], tensors: Sequence[Any]
) -> tuple[Tensor, list[_Layer]]:
    """A `[R, I]` of all layers in the dtype, and the layers; `tensors` are bias, A and B of each in turn."""
    layers, start = [], 0
    for (weight, scaling), bias, lora_a, lora_b in zip(
        frozen, tensors[::3], tensors[1::3], tensors[2::3], strict=True
    ):
        ranks = slice(start, start + lora_a.shape[0])
        layers.append(_Layer(weight, scaling, bias, lora_b.to(dtype), ranks))
        start = ranks.stop
    stacked = [lora_a.to(dtype) for lora_a in tensors[1::3]]
    return stacked[0] if len(stacked) == 1 else torch.cat(stacked), layers


def _forward(x_NI: Tensor, a_RI: Tensor, layers: Sequence[_Layer]) -> tuple[list[Tensor], Tensor]:
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
            y_NO = F.linear(x_NI, p.weight, p.bias)
        outputs.append(y_NO.addmm_(h_NR[:, p.ranks], p.b_Or.t(), alpha=p.scaling))
    return outputs, h_NR


def _backward_to_input(
    g_NOs: Sequence[Tensor], a_RI: Tensor, layers: Sequence[_Layer], wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradients of x, where wanted, and of h."""
    gh_NR = g_NOs[0].new_empty(g_NOs[0].shape[0], a_RI.shape[0])
    gx_NI: Tensor | None = None
    for g_NO, p in zip(g_NOs, layers, strict=True):
        gh_Nr = gh_NR[:, p.ranks]
        torch.addmm(gh_Nr, g_NO, p.b_Or, beta=0, alpha=p.scaling, out=gh_Nr)
        if not wanted:
            continue
        if isinstance(p.weight, Fp8Rows):
            part = fp8_linear_backward(g_NO, p.weight)
            gx_NI = part if gx_NI is None else gx_NI.add_(part)
        else:
            gx_NI = g_NO @ p.weight if gx_NI is None else gx_NI.addmm_(g_NO, p.weight)
    return None if gx_NI is None else gx_NI.addmm_(gh_NR, a_RI), gh_NR


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

"""A LoRA linear layer as one autograd node: three GEMMs forward, five backward, no copies between them.

    y = x Wᵀ + b + s · (x Aᵀ) Bᵀ           (Hu et al. 2021)

Shapes: N tokens, I inputs, O outputs, r rank; W `[O, I]`, A `[r, I]`, B `[O, r]`.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.kernels import gated, gated_backward


class FastLoraLinear(nn.Module):
    """Takes the place of a PEFT `lora.Linear`'s class; what it cannot fuse goes through PEFT's forward."""

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """The layer applied to act(gate) * up: `[..., O]` from two of `[..., I]`.

        On a GPU the product, the largest activation of a decoder layer, is not kept for the backward pass but
        computed again.
        """
        fused = bool(self.cast_when_used()) and self.base_layer.weight.dtype == gate.dtype
        if not gate.is_cuda or not fused or self._forward_hooks or self._forward_pre_hooks:
            return self(gated(gate, up, activation))
        adapter = self.active_adapters[0]
        factors = (self.lora_A[adapter].weight, self.lora_B[adapter].weight, self.scaling[adapter])
        base = self.base_layer
        return _GatedLoraLinear.apply(gate, up, activation, base.weight, base.bias, *factors)

    def cast_when_used(self) -> list[Tensor]:
        """The parameters that every call casts to what it computes in: A and B, where it runs fused."""
        if self.disable_adapters or self.merged or why_not_fused(self) is not None:
            return []
        adapter = self.active_adapters[0]
        return [self.lora_A[adapter].weight, self.lora_B[adapter].weight]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[..., O]` from `[..., I]`."""
        if args or kwargs or self.disable_adapters or self.merged or why_not_fused(self) is not None:
            return super().forward(x, *args, **kwargs)
        base, adapter = self.base_layer, self.active_adapters[0]
        compute = (
            torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        )
        if base.weight.dtype != compute:
            return super().forward(x)
        return _LoraLinear.apply(
            x.to(compute),
            base.weight,
            base.bias,
            self.lora_A[adapter].weight,
            self.lora_B[adapter].weight,
            self.scaling[adapter],
        )


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


class _LoraLinear(torch.autograd.Function):
    """Launch-bound on small models: A and B are cast once, and the scale rides along in a GEMM's alpha."""

    @staticmethod
    def forward(ctx, x, weight, bias, lora_a, lora_b, scaling):
        x_NI = x.reshape(-1, x.shape[-1])
        y_NO, saved = _forward(x_NI, weight, bias, lora_a, lora_b, scaling)
        ctx.save_for_backward(x_NI, *saved)
        ctx.scaling = scaling
        ctx.shape = x.shape
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x_NI, *saved = ctx.saved_tensors
        g_NO = grad.reshape(-1, grad.shape[-1])
        gx_NI, gh_Nr = _backward_to_input(g_NO, *saved, ctx.scaling, ctx.needs_input_grad[0])
        grad_a, grad_b = _backward_to_factors(g_NO, gh_Nr, x_NI, *saved, ctx.scaling)
        grad_x = None if gx_NI is None else gx_NI.view(ctx.shape)
        return grad_x, None, g_NO.sum(0) if ctx.needs_input_grad[2] else None, grad_a, grad_b, None


class _GatedLoraLinear(torch.autograd.Function):
    """The same over x = act(gate) * up, which the backward pass computes again."""

    @staticmethod
    def forward(ctx, gate, up, activation, weight, bias, lora_a, lora_b, scaling):
        x_NI = gated(gate, up, activation).reshape(-1, gate.shape[-1])
        y_NO, saved = _forward(x_NI, weight, bias, lora_a, lora_b, scaling)
        ctx.save_for_backward(gate, up, *saved)
        ctx.activation, ctx.scaling = activation, scaling
        return y_NO.view(*gate.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        gate, up, *saved = ctx.saved_tensors
        g_NO = grad.reshape(-1, grad.shape[-1])
        gx_NI, gh_Nr = _backward_to_input(g_NO, *saved, ctx.scaling, True)
        grad_gate, grad_up, x = gated_backward(gx_NI.view(gate.shape), gate, up, ctx.activation)
        grad_a, grad_b = _backward_to_factors(g_NO, gh_Nr, x.reshape(gx_NI.shape), *saved, ctx.scaling)
        grad_bias = g_NO.sum(0) if ctx.needs_input_grad[4] else None
        return grad_gate, grad_up, None, None, grad_bias, grad_a, grad_b, None


def _forward(x_NI, weight, bias, lora_a, lora_b, scaling):
    """y, and what the backward pass needs beside x."""
    a_rI, b_Or = lora_a.to(x_NI.dtype), lora_b.to(x_NI.dtype)
    y_NO = F.linear(x_NI, weight, bias)
    h_Nr = x_NI @ a_rI.t()
    y_NO.addmm_(h_Nr, b_Or.t(), alpha=scaling)
    return y_NO, (weight, a_rI, b_Or, h_Nr)


def _backward_to_input(g_NO, weight, a_rI, b_Or, h_Nr, scaling, wanted):
    """The gradients of x, where wanted, and of h over the scaling."""
    gh_Nr = g_NO @ b_Or
    if not wanted:
        return None, gh_Nr
    gx_NI = g_NO @ weight
    return gx_NI.addmm_(gh_Nr, a_rI, alpha=scaling), gh_Nr


def _backward_to_factors(g_NO, gh_Nr, x_NI, weight, a_rI, b_Or, h_Nr, scaling):
    """The gradients of A and B in the dtype of x; autograd casts them to the parameters'."""
    grad_a = torch.addmm(a_rI, gh_Nr.t(), x_NI, beta=0, alpha=scaling)
    grad_b = torch.addmm(b_Or, g_NO.t(), h_Nr, beta=0, alpha=scaling)
    return grad_a, grad_b

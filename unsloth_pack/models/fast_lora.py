"""A LoRA linear layer as one autograd node: three GEMMs forward, five backward, no copies between them.

    y = x Wᵀ + b + s · (x Aᵀ) Bᵀ           (Hu et al. 2021)

Shapes: N tokens, I inputs, O outputs, r rank; W `[O, I]`, A `[r, I]`, B `[O, r]`.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F


class FastLoraLinear(nn.Module):
    """Takes the place of a PEFT `lora.Linear`'s class; what it cannot fuse goes through PEFT's forward."""

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
        a_rI, b_Or = lora_a.to(x.dtype), lora_b.to(x.dtype)
        y_NO = F.linear(x_NI, weight, bias)
        h_Nr = x_NI @ a_rI.t()
        y_NO.addmm_(h_Nr, b_Or.t(), alpha=scaling)
        ctx.save_for_backward(x_NI, weight, a_rI, b_Or, h_Nr)
        ctx.scaling = scaling
        ctx.shape = x.shape
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x_NI, weight, a_rI, b_Or, h_Nr = ctx.saved_tensors
        g_NO = grad.reshape(-1, grad.shape[-1])
        gh_Nr = g_NO @ b_Or
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            gx_NI = g_NO @ weight
            gx_NI.addmm_(gh_Nr, a_rI, alpha=ctx.scaling)
            grad_x = gx_NI.view(ctx.shape)
        if ctx.needs_input_grad[2]:
            grad_bias = g_NO.sum(0)
        grad_a = torch.addmm(a_rI, gh_Nr.t(), x_NI, beta=0, alpha=ctx.scaling)
        grad_b = torch.addmm(b_Or, g_NO.t(), h_Nr, beta=0, alpha=ctx.scaling)
        return grad_x, None, grad_bias, grad_a, grad_b, None  # autograd casts to the parameters' dtype

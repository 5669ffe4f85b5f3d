"""A gated MLP whose own weights are trained, as one autograd node.

    y = down(act(gate(x)) * up(x))

The product of gate and up is computed again in the backward pass, where its gradient is. Gate and up are kept
or computed again, as in the node of LoRA layers. The gradients of x through gate and up are summed by the
GEMMs, and those of weights in float32 are not rounded to 16 bits.

Shapes: N tokens, I inputs, F features inside, O outputs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.kernels import gated, gated_lora_backward_
from unsloth_pack.kernels.backward import is_last_pass
from unsloth_pack.kernels.products import multiply
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.gated_mlp import Start, gate_and_up
from unsloth_pack.lora.layers import computes_in
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.sharding import is_gathered_by_module


def trains_fused(layers: Sequence[nn.Module]) -> bool:
    """Whether the layers of an MLP are linear ones of which a weight is trained, and nothing more."""
    if any(type(layer) is not nn.Linear or has_hooks(layer) for layer in layers):
        return False
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    is_trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return is_trained and not any(map(is_gathered_by_module, weights))


def trained_gated_mlp(
    x: Tensor, inner: Sequence[nn.Linear], down: nn.Linear, activation: str, keep: bool
) -> Tensor:
    """`[..., O]` from `[..., I]`, for layers for which `trains_fused`.

    Args:
        inner: the layers of gate and up, or one layer of both, gate first.
        activation: as `kernels.gated` names it.
        keep: whether gate and up are kept for the backward pass.
    """
    dtype = computes_in(x)
    x = x.to(dtype)
    plan = _Plan(activation, dtype, keep)
    if x.requires_grad and not keep:  # see `lora.gated_mlp`: a checkpoint stops where this saves
        x = Start.apply(x, (x,))
        plan.start = x.grad_fn
    tensors = [tensor for layer in (*inner, down) for tensor in (layer.weight, layer.bias)]
    return _TrainedGatedMLP.apply(x, plan, *tensors)


@dataclass
class _Plan:
    """What one call of the node needs beside tensors.

    Args:
        dtype: that is computed in.
        start: the autograd node of `Start`, where that saved x.
    """

    activation: str
    dtype: torch.dtype
    keep: bool
    start: Any = None


@dataclass
class _Held:
    """A weight, as the version check of `arithmetic.unchanged` wants it."""

    weight: Tensor


class _TrainedGatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *tensors: Tensor | None) -> Tensor:
        held = arithmetic.as_they_are(tensors)
        x_NI = x.reshape(-1, x.shape[-1])
        outputs = _inner(x_NI, held, plan.dtype)
        product_NF = gated(*gate_and_up(outputs), plan.activation)
        y_NO = _linear(product_NF, held[-2], held[-1], plan.dtype)
        if plan.start is None:
            ctx.save_for_backward(x, *(outputs if plan.keep else []))
        ctx.plan, ctx.held, ctx.shape = plan, held, x.shape
        ctx.versions = arithmetic.versions([_Held(weight) for weight in held[::2]], held[1::2])
        return arithmetic.shaped(y_NO, x.shape)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic.unchanged(ctx.versions)
        plan: _Plan = ctx.plan
        held, needed = ctx.held, ctx.needs_input_grad
        x, *kept = (ctx if plan.start is None else plan.start).saved_tensors
        x_NI, g_NO = x.reshape(-1, ctx.shape[-1]), grad.reshape(-1, grad.shape[-1])
        outputs = kept or _inner(x_NI, held, plan.dtype)
        # What may be read again stays; anything else makes room for its gradient
        grads = [torch.empty_like(y_NO) for y_NO in kept] if kept and not is_last_pass() else outputs
        product_NF = g_NO @ held[-2].to(plan.dtype)  # its gradient, until the kernel has run
        gate, up = gate_and_up(outputs)
        gated_lora_backward_(product_NF, None, gate, None, up, None, plan.activation, *gate_and_up(grads))
        of_down = _gradients(g_NO, product_NF, held[-2:], needed[-2:])
        del product_NF
        of_inner = [
            gradient
            for i, g in enumerate(grads)
            for gradient in _gradients(g, x_NI, held[2 * i : 2 * i + 2], needed[2 + 2 * i : 4 + 2 * i])
        ]
        grad_x = _through(grads, held[:-2:2], plan.dtype).view(ctx.shape) if needed[0] else None
        return grad_x, None, *of_inner, *of_down


def _linear(x_NI: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    with torch.autocast(x_NI.device.type, enabled=False):
        return F.linear(x_NI, weight.to(dtype), None if bias is None else bias.to(dtype))


def _inner(x_NI: Tensor, held: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """The outputs of the layers of gate and up."""
    return [_linear(x_NI, held[i], held[i + 1], dtype) for i in range(0, len(held) - 2, 2)]


def _gradients(
    g_NO: Tensor, x_NI: Tensor, held: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Of a layer's weight and bias, in their dtypes."""
    weight, bias = held
    g_weight = g_bias = None
    if needed[0]:
        g_weight = torch.empty_like(weight)
        multiply(g_NO.t(), x_NI, g_weight)
    if needed[1]:
        g_bias = g_NO.sum(0, dtype=torch.promote_types(g_NO.dtype, torch.float32)).to(bias.dtype)
    return g_weight, g_bias


def _through(grads: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Σ g W, the gradient of x."""
    gx_NI = grads[0] @ weights[0].to(dtype)
    for g_NO, weight in zip(grads[1:], weights[1:], strict=True):
        gx_NI.addmm_(g_NO, weight.to(dtype))
    return gx_NI

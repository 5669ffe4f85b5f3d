"""A gated MLP whose own weights are trained, not those of an adapter, as one autograd node.

    y = down(act(gate(x)) * up(x))

The backward pass computes the product of gate and up again, in the memory of its gradient. The GEMMs sum the
gradients of x through gate and up, and those of float32 weights are not rounded to 16 bits.

Shapes: N tokens, I inputs, F features inside, O outputs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.kernels import LoraOutput, gated, gated_lora_backward_
from unsloth_pack.kernels.launch import apply, is_last_pass, multiply
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.linear import get_compute_dtype
from unsloth_pack.lora.mlp import SaveInputs, gate_and_up
from unsloth_pack.modules import has_hooks, is_gathered_by_module


def trains_fused(layers: Sequence[nn.Module]) -> bool:
    """Return whether the layers of an MLP are plain linear ones of which a weight is trained."""
    if any(type(layer) is not nn.Linear or has_hooks(layer) for layer in layers):
        return False
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    is_trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return is_trained and not any(map(is_gathered_by_module, weights))


def trained_gated_mlp(
    x: Tensor, inner: Sequence[nn.Linear], down: nn.Linear, activation: str, keep: bool
) -> Tensor:
    """Compute `[..., O]` from `[..., I]`, for layers for which `trains_fused`.

    `inner` are the layers of gate and up, or one layer of both, gate first; `keep` keeps gate and up for the
    backward pass.
    """
    dtype = get_compute_dtype(x)
    x = x.to(dtype)
    plan = _Plan(activation, dtype, keep)
    if x.requires_grad and not keep:  # see `lora.gated_mlp`: a checkpoint stops where this saves
        x = apply(SaveInputs, x, (x,))
        plan.start = x.grad_fn
    tensors = [tensor for layer in (*inner, down) for tensor in (layer.weight, layer.bias)]
    return apply(_TrainedGatedMLP, x, plan, *tensors)


@dataclass
class _Plan:
    """The settings of one call. `start` is the autograd node of `SaveInputs`, if it saved x."""

    activation: str
    dtype: torch.dtype
    keep: bool
    start: Any = None


class _TrainedGatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *tensors: Tensor | None) -> Tensor:
        params = arithmetic.detach_all(tensors)
        x_NI = x.reshape(-1, x.shape[-1])
        outputs = _project_inner(x_NI, params, plan.dtype)
        product_NF = gated(*gate_and_up(outputs), plan.activation)
        y_NO = _project(product_NF, params[-2], params[-1], plan.dtype)
        if plan.start is None:
            ctx.save_for_backward(x, *(outputs if plan.keep else []))
        ctx.plan, ctx.params, ctx.shape = plan, params, x.shape
        ctx.versions = arithmetic.record_versions(params)
        return arithmetic.reshape_output(y_NO, x.shape)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic.check_unchanged(ctx.versions)
        plan: _Plan = ctx.plan
        params, needed = ctx.params, ctx.needs_input_grad
        x, *saved = (ctx if plan.start is None else plan.start).saved_tensors
        x_NI, g_NO = x.reshape(-1, ctx.shape[-1]), grad.reshape(-1, grad.shape[-1])
        outputs = saved or _project_inner(x_NI, params, plan.dtype)
        # Kept tensors may be read again; any other gives its memory to its gradient
        grads = [torch.empty_like(y_NO) for y_NO in saved] if saved and not is_last_pass() else outputs
        product_NF = g_NO @ params[-2].to(plan.dtype)  # holds its gradient until the kernel has run
        g_out, gate, up = map(LoraOutput, (product_NF, *gate_and_up(outputs)))
        gated_lora_backward_(g_out, gate, up, plan.activation, *gate_and_up(grads))
        down_gradients = _weight_gradients(g_NO, product_NF, params[-2:], needed[-2:])
        del product_NF
        inner_gradients = [
            gradient
            for i, g in enumerate(grads)
            for gradient in _weight_gradients(
                g, x_NI, params[2 * i : 2 * i + 2], needed[2 + 2 * i : 4 + 2 * i]
            )
        ]
        grad_x = None
        if needed[0]:  # Σ g W
            grad_x = grads[0] @ params[0].to(plan.dtype)
            for g_NO, weight in zip(grads[1:], params[2:-2:2], strict=True):
                grad_x.addmm_(g_NO, weight.to(plan.dtype))
            grad_x = grad_x.view(ctx.shape)
        return grad_x, None, *inner_gradients, *down_gradients


def _project(x_NI: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    with torch.autocast(x_NI.device.type, enabled=False):
        return F.linear(x_NI, weight.to(dtype), None if bias is None else bias.to(dtype))


def _project_inner(x_NI: Tensor, params: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Compute the outputs of the layers of gate and up."""
    return [_project(x_NI, params[i], params[i + 1], dtype) for i in range(0, len(params) - 2, 2)]


def _weight_gradients(
    g_NO: Tensor, x_NI: Tensor, params: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of a layer's weight and bias, in their dtypes."""
    weight, bias = params
    g_weight = g_bias = None
    if needed[0]:
        g_weight = torch.empty_like(weight)
        multiply(g_NO.t(), x_NI, g_weight)
    if needed[1]:
        g_bias = g_NO.sum(0, dtype=torch.promote_types(g_NO.dtype, torch.float32)).to(bias.dtype)
    return g_weight, g_bias

"""A gated MLP of LoRA layers as one autograd node, which goes through the tokens in tiles.

    y = down(act(gate(x)) * up(x))

The activations inside are a decoder layer's largest. Gate and up are kept for the backward pass or computed
again there, the product always is; neither it nor a gradient inside is ever whole.

Where the layer is checkpointed, it is computed again from its input up to `_Start` and no further: checkpoint
stops where it has all that was saved, and this node saves nothing there. So down is not computed twice.

Shapes: N tokens, t of a tile, I inputs, F features inside, as in `arithmetic`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unsloth_pack.kernels import gated, gated_backward_
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.layers import FastLoraLinear, prepared

_TILE = 2**26  # elements of gate in a tile: GEMMs of 4,096 tokens at 14,336 features are still at full speed


def gated_mlp(
    x: Tensor, inner: Sequence[FastLoraLinear], down: FastLoraLinear, activation: str, keep: bool
) -> Tensor:
    """`[..., O]` from `[..., I]`; all layers run fused over x.

    Args:
        inner: the layers of gate and up, or one layer of both, gate first.
        activation: as `kernels.gated` names it.
        keep: whether gate and up are kept for the backward pass.
    """
    x, recipe = prepared(x)
    layers = [*inner, down]
    plan = _Plan(activation, [layer.frozen() for layer in layers], recipe.compute, len(recipe.inputs), keep)
    if torch.is_grad_enabled() and x.requires_grad and not keep:
        x = _Start.apply(x, recipe.inputs)
        plan.start = x.grad_fn
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    return _GatedMLP.apply(x, plan, recipe.inputs, *tensors)


@dataclass
class _Plan:
    activation: str
    frozen: list[arithmetic.Frozen]
    compute: Callable[..., Tensor]  # x, from so many inputs
    n_inputs: int
    keep: bool
    start: Any = None  # the node of `_Start`

    def layers(
        self, dtype: torch.dtype, tensors: Sequence[Any]
    ) -> tuple[Tensor, list[arithmetic.Layer], Tensor, list[arithmetic.Layer]]:
        """The stacked A and the layers of gate and up, then those of down."""
        a_RI, inner = arithmetic.stack(dtype, self.frozen[:-1], tensors[:-3])
        a_rF, down = arithmetic.stack(dtype, self.frozen[-1:], tensors[-3:])
        return a_RI, arithmetic.opened(inner, dtype), a_rF, arithmetic.opened(down, dtype)


class _Start(torch.autograd.Function):
    """Nothing but a place that keeps what the backward pass of the MLP begins with."""

    @staticmethod
    def forward(ctx, x, inputs):
        ctx.save_for_backward(*inputs)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan, inputs, *tensors):
        a_RI, inner, a_rF, down = plan.layers(x.dtype, tensors)
        x_NI = x.reshape(-1, x.shape[-1])
        kept = arithmetic.forward(x_NI, a_RI, inner)[0] if plan.keep else []
        parts = []
        for tile in _tiles(len(x_NI), a_rF.shape[1]):
            outputs = [y[tile] for y in kept] or arithmetic.forward(x_NI[tile], a_RI, inner, tile.start)[0]
            product_tF = gated(*gate_and_up(outputs), plan.activation)
            parts += arithmetic.forward(product_tF, a_rF, down, tile.start)[0]
        if plan.start is None:
            ctx.save_for_backward(*inputs, *kept)
        ctx.plan, ctx.shape = plan, x.shape
        ctx.tensors, ctx.versions = tensors, arithmetic.versions(plan.frozen, tensors)
        return arithmetic.shaped(_joined(parts), x.shape)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx, grad):
        arithmetic.unchanged(ctx.versions)
        plan = ctx.plan
        saved = (ctx if plan.start is None else plan.start).saved_tensors
        x_NI = plan.compute(*saved[: plan.n_inputs]).reshape(-1, ctx.shape[-1])
        kept = saved[plan.n_inputs :]
        g_NO = grad.reshape(-1, grad.shape[-1])
        a_RI, inner, a_rF, down = plan.layers(x_NI.dtype, ctx.tensors)
        grad_xs: list[Tensor] = []
        sums: list[Tensor] = []
        for tile in _tiles(len(x_NI), a_rF.shape[1]):
            x_tI, g_tO, row = x_NI[tile], g_NO[tile], tile.start
            if plan.keep:
                outputs, h_tR = [y[tile] for y in kept], arithmetic.to_ranks(x_tI, a_RI, inner, row)
                grads = [torch.empty_like(y) for y in outputs]
            else:
                outputs, h_tR = arithmetic.forward(x_tI, a_RI, inner, row)
                grads = outputs
            gh_tr = arithmetic.backward_to_ranks([g_tO], a_rF, down)
            # Its gradient, until `gated_backward_` has made it the product
            product_tF = arithmetic.backward_to_input([g_tO], gh_tr, a_rF, down, row)
            gated_backward_(product_tF, *gate_and_up(outputs), plan.activation, *gate_and_up(grads))
            h_tr = arithmetic.to_ranks(product_tF, a_rF, down, row)
            of_down = arithmetic.backward_to_factors([g_tO], gh_tr, product_tF, h_tr, down, row)
            del product_tF
            gh_tR = arithmetic.backward_to_ranks(grads, a_RI, inner)
            of_inner = arithmetic.backward_to_factors(grads, gh_tR, x_tI, h_tR, inner, row)
            biases = [
                g.sum(0, dtype=_wide(g.dtype)) if trained else g.new_zeros(())
                for g, trained in zip([*grads, g_tO], ctx.needs_input_grad[3::3], strict=True)
            ]
            sums = _added(sums, [*of_inner, *of_down, *biases])
            if ctx.needs_input_grad[0]:
                grad_xs.append(arithmetic.backward_to_input(grads, gh_tR, a_RI, inner, row))
        grad_x = _joined(grad_xs).view(ctx.shape) if grad_xs else None
        return grad_x, None, None, *_by_layer(sums, ctx.needs_input_grad[3::3], inner, down)


def gate_and_up(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Gate and up, of the outputs of two layers or of the one that makes both, gate first."""
    return outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)


def _tiles(n_tokens: int, n_features: int) -> list[slice]:
    n_tiles = max(1, -(-n_tokens * n_features // _TILE))
    length = max(1, -(-n_tokens // n_tiles))
    if n_tiles > 1:
        length = -(-length // 128) * 128
    return [slice(start, start + length) for start in range(0, max(1, n_tokens), length)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _added(sums: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
    """Sums over tiles, of several in float32: their rounding does not add up."""
    if not sums:
        return parts
    return [total.to(_wide(total.dtype)).add_(part) for total, part in zip(sums, parts, strict=True)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _by_layer(
    sums: Sequence[Tensor], trains_bias: Sequence[bool], inner: Sequence[Any], down: Sequence[Any]
) -> list[Any]:
    """Gradients of bias, A and B of each layer in turn, from those of the factors and biases."""
    n = 1 + len(inner)
    biases = [bias if trained else None for bias, trained in zip(sums[n + 2 :], trains_bias, strict=True)]
    return [
        *arithmetic.by_layer(sums[:n], biases[: len(inner)], inner),
        *arithmetic.by_layer(sums[n : n + 2], biases[len(inner) :], down),
    ]

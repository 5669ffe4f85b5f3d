"""A gated MLP of LoRA layers as one autograd node, which goes through the tokens in tiles.

    y = down(act(gate(x)) * up(x))

The activations inside are a decoder layer's largest. Gate and up are kept for the backward pass or computed
again there; their product is always computed again. The product and the gradients inside exist for one tile
at a time, never for all tokens.

Where the layer is checkpointed, its recomputation ends at `Start`. A checkpoint stops as soon as it has
recomputed all that was saved; `Start` saves the MLP's inputs, and this node saves nothing through autograd,
only the factors and what down's A makes of the product, which are small. So down is not computed a second
time.

Shapes: N tokens, t of a tile, I inputs, F features inside, R and r ranks, as in `arithmetic`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsloth_pack.kernels import Fp8Columns, LowRank, gated_lora_, gated_lora_backward_
from unsloth_pack.kernels.gated_lora import should_store
from unsloth_pack.kernels.launch import is_last_pass, once_differentiable
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.linear import FastLoraLinear, prepared

# Elements of gate in a tile: GEMMs of 4,096 tokens at 14,336 features lack a percent of full speed. Twice as
# many where gate and up are kept: then only their product is made for a tile.
_TILE = 2**26


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
    frozen = [layer.frozen() for layer in layers]
    plan = _Plan(activation, frozen, recipe.compute, recipe.makes_anew, len(recipe.inputs), keep)
    if torch.is_grad_enabled() and x.requires_grad and not keep:
        x = Start.apply(x, recipe.inputs)
        plan.start = x.grad_fn
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    return _GatedMLP.apply(x, plan, recipe.inputs, *tensors)


class _Stack(NamedTuple):
    """Layers over one input: their A, stacked, and each of them."""

    a: Tensor
    layers: list[arithmetic.Layer]


@dataclass
class _Plan:
    """What one call of the node needs beside tensors.

    Args:
        compute: makes x of the first `n_inputs` saved tensors.
        makes_anew: whether that x may be overwritten.
        start: the autograd node of `Start`, where that saved them.
    """

    activation: str
    frozen: list[arithmetic.Frozen]
    compute: Callable[..., Tensor]
    makes_anew: bool
    n_inputs: int
    keep: bool
    start: Any = None

    def stacks(self, dtype: torch.dtype, tensors: Sequence[Any]) -> tuple[_Stack, _Stack]:
        """The layers of gate and up, and that of down."""
        inner = arithmetic.stack(dtype, self.frozen[:-1], tensors[:-3])
        down = arithmetic.stack(dtype, self.frozen[-1:], tensors[-3:])
        return _Stack(*inner), _Stack(*down)


def _dequantised(stacks: Sequence[_Stack], dtype: torch.dtype) -> list[_Stack]:
    return [_Stack(stack.a, arithmetic.dequantised(stack.layers, dtype)) for stack in stacks]


class Start(torch.autograd.Function):
    """Passes x through, and saves what the MLP's backward pass begins with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
        ctx.save_for_backward(*inputs)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: _Plan, inputs: tuple[Tensor, ...], *tensors: Tensor | None
    ) -> Tensor:
        held = arithmetic.as_they_are(tensors)
        ctx.stacks = plan.stacks(x.dtype, held)
        inner, down = _dequantised(ctx.stacks, x.dtype)
        ctx.h_of_down = []  # `[t, r]` of each tile
        ctx.stored = plan.keep and should_store(max(p.b_Or.shape[1] for p in inner.layers))
        x_NI = x.reshape(-1, x.shape[-1])
        kept = _Inside.of(x_NI, inner) if plan.keep else None
        y_NO = x_NI.new_empty(len(x_NI), down.layers[0].b_Or.shape[0])
        for tile in _tiles(len(x_NI), down.a.shape[1], plan.keep):
            inside = _Inside.of(x_NI[tile], inner, tile.start) if kept is None else kept.tile(tile)
            product_tF = gated_lora_(*inside.gate_and_up, plan.activation, ctx.stored)
            _, h_tr = arithmetic.forward(product_tF, *down, tile.start, into=[y_NO[tile]])
            ctx.h_of_down.append(h_tr)
            del inside, product_tF  # or they would stand beside those of the next tile
        if plan.start is None:
            ctx.save_for_backward(*inputs, *([] if kept is None else [kept.h, *kept.outputs]))
        ctx.plan, ctx.shape = plan, x.shape
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.versions = arithmetic.versions(plan.frozen, held)
        return arithmetic.shaped(y_NO, x.shape)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic.unchanged(ctx.versions)
        plan: _Plan = ctx.plan
        saved = (ctx if plan.start is None else plan.start).saved_tensors
        x_NI = plan.compute(*saved[: plan.n_inputs]).reshape(-1, ctx.shape[-1])
        rest = saved[plan.n_inputs :]
        g_NO = grad.reshape(-1, grad.shape[-1])
        inner, down = _dequantised(ctx.stacks, x_NI.dtype)
        kept = _Inside(rest[0], rest[1:], inner.layers, ctx.stored) if rest else None
        trains_bias = ctx.needs_input_grad[3::3]
        grad_x_NI = None
        if ctx.needs_input_grad[0]:  # a tile of x is not read any more once its gradient is made
            grad_x_NI = x_NI if plan.makes_anew else torch.empty_like(x_NI)
        inner_columns = None if grad_x_NI is None else arithmetic.fp8_columns(inner.layers)
        down_columns = arithmetic.fp8_columns(down.layers)
        # What may be read again stays; anything else makes room for its gradient
        stays = kept is not None and not is_last_pass()
        sums: list[Tensor] = []
        for tile, h_tr in zip(_tiles(len(x_NI), down.a.shape[1], plan.keep), ctx.h_of_down, strict=True):
            x_tI, g_tO, row = x_NI[tile], g_NO[tile], tile.start
            inside = _Inside.of(x_tI, inner, row) if kept is None else kept.tile(tile)
            grads = [torch.empty_like(y) for y in inside.outputs] if stays else inside.outputs
            of_down, of_inner_bs = _through_down(
                g_tO, h_tr, inside, grads, plan.activation, down, row, down_columns
            )
            gh_tR = arithmetic.backward_to_ranks(grads, *inner)
            of_inner_a = arithmetic.backward_to_a(gh_tR, x_tI, inner.layers, row)
            of_biases = _bias_grads([*grads, g_tO], trains_bias)
            sums = _added(sums, [of_inner_a, *of_inner_bs, *of_down, *of_biases])
            if grad_x_NI is not None:
                arithmetic.backward_to_input(grads, gh_tR, *inner, row, grad_x_NI[tile], inner_columns)
            del inside, grads  # as above
        grad_x = None if grad_x_NI is None else grad_x_NI.view(ctx.shape)
        factors = _by_layer(sums, trains_bias, inner.layers, down.layers)
        return grad_x, None, None, *arithmetic.cast_together(factors, ctx.dtypes)


def gate_and_up(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gate and up, of the outputs of two layers or of the one that makes both, gate first."""
    gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    return gate, up


class _Inside(NamedTuple):
    """What the layers of gate and up make of x.

    Args:
        h: `[t, R]`, from which the adapters' part is made.
        outputs: `[t, O]` of each layer, without the adapters' part, which the kernels of the activation add.
        stored: whether the kernel of the forward pass has stored the sums there.
    """

    h: Tensor
    outputs: Sequence[Tensor]
    layers: Sequence[arithmetic.Layer]
    stored: bool = False

    @classmethod
    def of(cls, x_tI: Tensor, inner: _Stack, first_row: int = 0) -> "_Inside":
        outputs, h_tR = arithmetic.forward_apart(x_tI, *inner, first_row)
        return cls(h_tR, outputs, inner.layers)

    def tile(self, rows: slice) -> "_Inside":
        return self._replace(h=self.h[rows], outputs=[y[rows] for y in self.outputs])

    @property
    def gate_and_up(self) -> tuple[Tensor, LowRank, Tensor, LowRank]:
        """Each followed by the adapter's part of it."""
        gate, up = gate_and_up(self.outputs)
        parts = [arithmetic.low_rank(self.h, p) for p in self.layers]
        if len(parts) == 1:
            ((h_tr, b_Or, scaling),) = parts
            parts = [LowRank(h_tr, b_Fr, scaling) for b_Fr in b_Or.chunk(2)]
        return gate, parts[0], up, parts[1]


def _through_down(
    g_tO: Tensor,
    h_tr: Tensor,
    inside: _Inside,
    grads: Sequence[Tensor],
    activation: str,
    down: _Stack,
    first_row: int,
    columns: Fp8Columns | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Write the gradients of gate and up into `grads`.

    Returns:
        The gradients of A and B of down, and those of every B inside.
    """
    gh_tr = arithmetic.backward_to_ranks([g_tO], *down)
    # The gradient of the product, until the kernel has turned it into the product
    product_tF, rest = arithmetic.backward_to_input_apart(g_tO, gh_tr, *down, first_row, columns)
    gate, of_gate, up, of_up = inside.gate_and_up
    added = (None, None) if inside.stored else (of_gate, of_up)
    of_a_Fr, *of_inner = gated_lora_backward_(
        product_tF, rest, gate, added[0], up, added[1], activation, *gate_and_up(grads)
    )
    if of_a_Fr is None:
        of_a_rF = arithmetic.backward_to_a(gh_tr, product_tF, down.layers, first_row)
    else:
        of_a_rF = of_a_Fr.t()
    of_down = [of_a_rF, *arithmetic.backward_to_bs([g_tO], h_tr, down.layers)]
    if inside.stored:
        return of_down, arithmetic.backward_to_bs(grads, inside.h, inside.layers)
    of_bs = [of_b_Or for of_b_Or in of_inner if of_b_Or is not None]
    of_bs = [torch.cat(of_bs)] if len(inside.layers) == 1 else of_bs
    return of_down, [of_b_Or * p.scaling for of_b_Or, p in zip(of_bs, inside.layers, strict=True)]


def _bias_grads(grads: Sequence[Tensor], trains_bias: Sequence[bool]) -> list[Tensor]:
    """Of every bias that is trained, from the gradient of its layer's output."""
    return [g.sum(0, dtype=_wide(g.dtype)) for g, trained in zip(grads, trains_bias, strict=True) if trained]


def _tiles(n_tokens: int, n_features: int, keep: bool) -> list[slice]:
    most = 2 * _TILE if keep else _TILE
    n_tiles = max(1, -(-n_tokens * n_features // most))
    length = max(1, -(-n_tokens // n_tiles))
    if n_tiles > 1:
        length = -(-length // 128) * 128
    return [slice(start, start + length) for start in range(0, max(1, n_tokens), length)]


def _added(sums: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
    """Sums over tiles. From the second tile on they are in float32, so that rounding does not add up."""
    if not sums:
        return parts
    wide = [_wide(part.dtype) for part in parts]
    totals = arithmetic.cast_together(sums, wide)
    torch._foreach_add_(totals, arithmetic.cast_together(parts, wide))
    return totals


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _by_layer(
    sums: Sequence[Tensor],
    trains_bias: Sequence[bool],
    inner: Sequence[arithmetic.Layer],
    down: Sequence[arithmetic.Layer],
) -> list[Tensor | None]:
    """Gradients of bias, A and B of each layer in turn, from those of the factors and biases."""
    n = 1 + len(inner)
    of_biases = iter(sums[n + 2 :])
    biases = [next(of_biases) if trained else None for trained in trains_bias]
    return [
        *arithmetic.by_layer(sums[:n], biases[: len(inner)], inner),
        *arithmetic.by_layer(sums[n : n + 2], biases[len(inner) :], down),
    ]

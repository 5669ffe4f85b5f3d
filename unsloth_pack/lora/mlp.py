"""A gated MLP of LoRA layers as one autograd node over tiles of tokens.

    y = down(act(gate(x)) * up(x))

The activations inside are a decoder layer's largest. The backward pass has gate and up saved or computes them
again; it always computes their product again. The product and the gradients inside exist for one tile at a
time.

In a checkpointed layer, recomputation ends at `SaveInputs`: a checkpoint stops once it has recomputed all
saved tensors, `SaveInputs` saves the MLP's inputs, and this node saves nothing through autograd, only the
factors and down's h, which are small. So down is not computed a second time.

Shapes: N tokens, t of a tile, I inputs, F features inside, R and r ranks, as in `arithmetic`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unsloth_pack.kernels import Fp8Columns, LoraOutput, LowRank, gated_lora_, gated_lora_backward_
from unsloth_pack.kernels.gated_lora import should_store
from unsloth_pack.kernels.launch import apply, is_last_pass, once_differentiable, wide_dtype
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.arithmetic import Stack
from unsloth_pack.lora.linear import FastLoraLinear, cast_input

# Elements of gate in a tile: GEMMs of 4,096 tokens at 14,336 features are within a percent of full speed.
# Twice as many if gate and up are saved: then a tile holds only their product.
_TILE = 2**26


def gated_mlp(
    x: Tensor, inner: Sequence[FastLoraLinear], down: FastLoraLinear, activation: str, keep: bool
) -> Tensor:
    """Map `[..., I]` to `[..., O]`; all layers must run fused over x. `inner` are those of `gate_and_up`.

    With `keep` the backward pass has gate and up saved; without, it computes them again.
    """
    x, recipe = cast_input(x)
    layers = [*inner, down]
    frozen = [layer.frozen() for layer in layers]
    plan = _Plan(activation, frozen, recipe.compute, recipe.is_fresh, len(recipe.inputs), keep)
    if torch.is_grad_enabled() and x.requires_grad and not keep:
        x = apply(SaveInputs, x, recipe.inputs)
        plan.start = x.grad_fn
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    return apply(_GatedMLP, x, plan, recipe.inputs, *tensors)


@dataclass
class _Plan:
    """Arguments of one call, besides tensors."""

    activation: str
    frozen: list[arithmetic.Layer]
    compute: Callable[..., Tensor]  # computes x from the first `n_inputs` saved tensors
    is_fresh: bool  # True if that x may be overwritten
    n_inputs: int
    keep: bool
    start: Any = None  # the autograd node of `SaveInputs`, if it saved them

    def stacks(self, dtype: torch.dtype, tensors: Sequence[Tensor | None]) -> tuple[Stack, Stack]:
        """Stack the layers of gate and up, and that of down."""
        inner = arithmetic.stack_layers(dtype, self.frozen[:-1], tensors[:-3])
        return inner, arithmetic.stack_layers(dtype, self.frozen[-1:], tensors[-3:])


class SaveInputs(torch.autograd.Function):
    """Pass x through and save the inputs of the MLP's backward pass."""

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
        detached = arithmetic.detach_all(tensors)
        ctx.stacks = plan.stacks(x.dtype, detached)
        inner, down = (Stack.dequantised(stack, x.dtype) for stack in ctx.stacks)
        ctx.h_down = []  # `[t, r]` of each tile
        ctx.stored = plan.keep and should_store(max(p.b_Or.shape[1] for p in inner.layers))
        x_NI = x.reshape(-1, x.shape[-1])
        cached = _Inside.compute(x_NI, inner) if plan.keep else None
        y_NO = x_NI.new_empty(len(x_NI), down.layers[0].b_Or.shape[0])
        for tile in _tiles(len(x_NI), down.a_RI.shape[1], plan.keep):
            inside = _Inside.compute(x_NI[tile], inner, tile.start) if cached is None else cached.tile(tile)
            product_tF = gated_lora_(*inside.gate_and_up, plan.activation, ctx.stored)
            _, h_tr = arithmetic.forward(product_tF, *down, tile.start, into=[y_NO[tile]])
            ctx.h_down.append(h_tr)
            del inside, product_tF  # before those of the next tile are allocated
        if plan.start is None:
            ctx.save_for_backward(*inputs, *([] if cached is None else [cached.h, *cached.outputs]))
        ctx.plan, ctx.shape = plan, x.shape
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.versions = arithmetic.record_versions([*(p.weight for p in plan.frozen), *detached])
        return arithmetic.reshape_output(y_NO, x.shape)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic.check_unchanged(ctx.versions)
        plan: _Plan = ctx.plan
        saved = (ctx if plan.start is None else plan.start).saved_tensors
        x_NI = plan.compute(*saved[: plan.n_inputs]).reshape(-1, ctx.shape[-1])
        rest = saved[plan.n_inputs :]
        g_NO = grad.reshape(-1, grad.shape[-1])
        inner, down = (Stack.dequantised(stack, x_NI.dtype) for stack in ctx.stacks)
        cached = _Inside(rest[0], rest[1:], inner.layers, ctx.stored) if rest else None
        trains_bias = ctx.needs_input_grad[3::3]
        grad_x_NI = None
        if ctx.needs_input_grad[0]:  # a tile of x is not read again after its gradient is computed
            grad_x_NI = x_NI if plan.is_fresh else torch.empty_like(x_NI)
        inner_columns = None if grad_x_NI is None else arithmetic.transpose_fp8(inner.layers)
        down_columns = arithmetic.transpose_fp8(down.layers)
        # Gradients overwrite gate and up unless those may be read again
        stays = cached is not None and not is_last_pass()
        sums: list[Tensor | None] = []  # bias, A and B of each layer in turn
        for tile, h_tr in zip(_tiles(len(x_NI), down.a_RI.shape[1], plan.keep), ctx.h_down, strict=True):
            x_tI, g_tO, row = x_NI[tile], g_NO[tile], tile.start
            inside = _Inside.compute(x_tI, inner, row) if cached is None else cached.tile(tile)
            grads = [torch.empty_like(y) for y in inside.outputs] if stays else inside.outputs
            down_grads, inner_b_grads = _backward_through_down(
                g_tO, h_tr, inside, grads, plan.activation, down, row, down_columns
            )
            gh_tR = arithmetic.backward_to_ranks(grads, *inner)
            inner_a_grad = arithmetic.backward_to_a(gh_tR, x_tI, inner.layers, row)
            biases = [
                g.sum(0, dtype=wide_dtype(g)) if trained else None
                for g, trained in zip([*grads, g_tO], trains_bias, strict=True)
            ]
            parts = arithmetic.order_by_layer([inner_a_grad, *inner_b_grads], biases[:-1], inner.layers)
            parts += arithmetic.order_by_layer(down_grads, biases[-1:], down.layers)
            sums = _add_tile(sums, parts)
            if grad_x_NI is not None:
                arithmetic.backward_to_input(grads, gh_tR, *inner, row, grad_x_NI[tile], inner_columns)
            del inside, grads  # as above
        grad_x = None if grad_x_NI is None else grad_x_NI.view(ctx.shape)
        return grad_x, None, None, *arithmetic.cast_in_one_launch(sums, ctx.dtypes)


def gate_and_up(outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return gate and up from the outputs of two layers, or of one layer of both, gate first."""
    gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    return gate, up


class _Inside(NamedTuple):
    """The outputs of the layers of gate and up."""

    h: Tensor  # `[t, R]` = x Aᵀ
    # `[t, O]` of each layer, without the low-rank parts, which the activation's kernels add
    outputs: Sequence[Tensor]
    layers: Sequence[arithmetic.Layer]
    stored: bool = False  # True if the forward kernel has stored the sums there

    @classmethod
    def compute(cls, x_tI: Tensor, inner: Stack, first_row: int = 0) -> "_Inside":
        outputs, h_tR = arithmetic.forward_base(x_tI, *inner, first_row)
        return cls(h_tR, outputs, inner.layers)

    def tile(self, rows: slice) -> "_Inside":
        return self._replace(h=self.h[rows], outputs=[y[rows] for y in self.outputs])

    @property
    def gate_and_up(self) -> tuple[LoraOutput, LoraOutput]:
        """Return gate and up with their low-rank parts."""
        gate, up = gate_and_up(self.outputs)
        parts = [LowRank(self.h[:, p.ranks], p.b_Or, p.scaling) for p in self.layers]
        if len(parts) == 1:
            ((h_tr, b_Or, scaling),) = parts
            parts = [LowRank(h_tr, b_Fr, scaling) for b_Fr in b_Or.chunk(2)]
        return LoraOutput(gate, parts[0]), LoraOutput(up, parts[1])


def _backward_through_down(
    g_tO: Tensor,
    h_tr: Tensor,
    inside: _Inside,
    grads: Sequence[Tensor],
    activation: str,
    down: Stack,
    first_row: int,
    columns: Fp8Columns | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Write the gradients of gate and up to `grads`; return those of down's A and B and every B inside."""
    gh_tr = arithmetic.backward_to_ranks([g_tO], *down)
    # The gradient of the product, until the kernel has overwritten it by the product
    product_tF, rest = arithmetic.backward_to_input_base(g_tO, gh_tr, *down, first_row, columns)
    gate, up = inside.gate_and_up
    if inside.stored:
        gate, up = LoraOutput(gate.base), LoraOutput(up.base)
    g_out = LoraOutput(product_tF, rest)
    grad_a_Fr, *inner_grads = gated_lora_backward_(g_out, gate, up, activation, *gate_and_up(grads))
    if grad_a_Fr is None:
        grad_a_rF = arithmetic.backward_to_a(gh_tr, product_tF, down.layers, first_row)
    else:
        grad_a_rF = grad_a_Fr.t()
    down_grads = [grad_a_rF, *arithmetic.backward_to_bs([g_tO], h_tr, down.layers)]
    if inside.stored:
        return down_grads, arithmetic.backward_to_bs(grads, inside.h, inside.layers)
    grad_bs = [grad_b for grad_b in inner_grads if grad_b is not None]
    grad_bs = [torch.cat(grad_bs)] if len(inside.layers) == 1 else grad_bs
    return down_grads, [grad_b * p.scaling for grad_b, p in zip(grad_bs, inside.layers, strict=True)]


def tile_length(n_tokens: int, n_features: int, keep: bool) -> int:
    """Return how many of the tokens a tile has, for so many features of gate."""
    most = 2 * _TILE if keep else _TILE
    n_tiles = max(1, -(-n_tokens * n_features // most))
    length = max(1, -(-n_tokens // n_tiles))
    return length if n_tiles == 1 else -(-length // 128) * 128


def _tiles(n_tokens: int, n_features: int, keep: bool) -> list[slice]:
    length = tile_length(n_tokens, n_features, keep)
    return [slice(start, start + length) for start in range(0, max(1, n_tokens), length)]


def _add_tile(sums: list[Tensor | None], parts: list[Tensor | None]) -> list[Tensor | None]:
    """Add a tile's gradients to the sums; in float32 from the second tile on, against rounding."""
    if not sums:
        return parts
    wide = [None if part is None else wide_dtype(part) for part in parts]
    totals, added = (arithmetic.cast_in_one_launch(tensors, wide) for tensors in (sums, parts))
    torch._foreach_add_([x for x in totals if x is not None], [x for x in added if x is not None])
    return totals

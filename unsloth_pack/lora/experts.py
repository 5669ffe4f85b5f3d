"""Routed experts with LoRA as one autograd node: grouped GEMMs over rows that are sorted by expert.

    y_n = Σ_k w_nk down_e(act(gate_e(x_n)) * up_e(x_n)),    e = experts[n, k]

Every stack of weights W `[E, ..]` is frozen, and has an adapter of its own for every expert:

    down_e(x) = x W_e + b_e + s (x A_eᵀ) B_eᵀ

The gradient of W is never computed. Of the adapters' path only rank-wide activations are saved. The backward
pass gathers the rows of x again, and has gate and up saved or computes them again. Shapes depend only on the
number of tokens and nothing waits for the device: a step can be captured. The sum over a token's experts has
one order: the same bits every time.

Shapes: N tokens of k experts each, S = N * k rows sorted by expert, E experts, C inputs and outputs of an
expert, F features inside, r the rank of an expert's adapter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.kernels import (
    Gate,
    InnerSum,
    Scaled,
    grouped_mm,
    grouped_outer,
    routed_gate_,
    routed_gate_backward_,
    sum_of_rows,
)
from unsloth_pack.kernels.launch import apply, is_last_pass
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.mlp import SaveInputs

_RANK_MULTIPLE = 8  # elements of 16 bits in the 16 bytes that grouped GEMMs read at a time


class Stack(NamedTuple):
    """The frozen weights of all experts for one projection."""

    weight: Any  # `[E, O, I]`, or `[E, I, O]` if `is_transposed`. A quantised one is dequantised at each use
    is_transposed: bool
    bias: Tensor | None  # `[E, O]`, or None
    scaling: float | None  # factor on the adapter's output; None without an adapter

    def dequantised(self, dtype: torch.dtype) -> "Stack":
        """Dequantise the weights if they are quantised."""
        is_dense = isinstance(self.weight, Tensor)
        return self if is_dense else self._replace(weight=self.weight.dequantized(dtype))

    def weight_EIO(self, dtype: torch.dtype) -> Tensor:
        """Return a view of the weights, dequantised if necessary."""
        weight: Tensor = self.dequantised(dtype).weight
        return weight if self.is_transposed else weight.transpose(1, 2)


class Routing(NamedTuple):
    """The rows of each expert, on the device."""

    expert_S: Tensor  # the expert of each row, ascending
    slot_S: Tensor  # the row's index among the N * k choices of an expert
    token_S: Tensor  # the token of each row
    place_Nk: Tensor  # the rows of each token
    ends_E: Tensor  # int32, the first row after those of each expert

    @classmethod
    def sort(cls, experts_Nk: Tensor, n_experts: int) -> "Routing":
        """Sort the rows by expert."""
        narrow = experts_Nk.reshape(-1).to(torch.int16)  # a quarter of the passes of a sort in 64 bits
        expert_S, slot_S = narrow.sort(stable=True)
        place_S = torch.empty_like(slot_S)
        place_S[slot_S] = torch.arange(len(slot_S), device=slot_S.device)
        own_E = torch.arange(n_experts, device=slot_S.device, dtype=torch.int16)
        ends_E = torch.searchsorted(expert_S, own_E, right=True, out_int32=True)
        token_S = slot_S // experts_Nk.shape[1]
        return cls(expert_S, slot_S, token_S, place_S.view(experts_Nk.shape), ends_E)

    def experts_Nk(self) -> Tensor:
        """Return the experts of each token, int64."""
        return self.expert_S[self.place_Nk].long()


def routed_experts(
    x_NC: Tensor,
    experts_Nk: Tensor,
    weights_Nk: Tensor,
    stacks: tuple[Stack, Stack],
    factors: Sequence[Tensor | None],
    gate: Gate,
    keep: bool,
) -> Tensor:
    """Compute the sum of each token's experts, `[N, C]`, weighted by the router.

    Args:
        stacks: of gate and up in one, and of down.
        factors: A `[E * r, I]`, expert by expert, and B `[O, r * E]`, rank by rank, of the two stacks, as in
            PEFT; None without an adapter.
        keep: True to save gate and up for the backward pass.
    """
    routing = Routing.sort(experts_Nk, stacks[0].weight.shape[0])
    call = _Call(stacks, gate, routing, keep)
    if torch.is_grad_enabled() and x_NC.requires_grad and not keep:
        x_NC = apply(SaveInputs, x_NC, (x_NC, weights_Nk.detach()))
        call.start = x_NC.grad_fn
    return apply(_RoutedExperts, x_NC, weights_Nk, call, *factors)


@dataclass
class _Call:
    """Arguments of a call without gradients. start: the node of `SaveInputs`, if it saved the inputs."""

    stacks: tuple[Stack, Stack]
    gate: Gate
    routing: Routing
    keep: bool
    start: Any = None


class _Adapter(NamedTuple):
    """An adapter for grouped GEMMs, in the compute dtype."""

    a_ErI: Tensor  # a_ErI, b_ErO: contiguous, r padded to a multiple of 8 with zeros
    b_ErO: Tensor
    rank: int  # without the padding
    scaling: float

    @classmethod
    def build(cls, stack: Stack, factors: Sequence[Tensor | None], dtype: torch.dtype) -> "_Adapter | None":
        lora_a, lora_b = factors
        if stack.scaling is None or lora_a is None or lora_b is None:
            return None
        n_experts, n_outputs = stack.weight.shape[0], len(lora_b)
        rank = len(lora_a) // n_experts
        a_ErI = _pad_ranks(lora_a.view(n_experts, rank, -1), dtype)
        b_ErO = _pad_ranks(lora_b.view(n_outputs, rank, n_experts).permute(2, 1, 0), dtype)
        return cls(a_ErI, b_ErO, rank, stack.scaling)

    def to_peft(
        self, grad_a_ErI: Tensor, grad_b_ErO: Tensor, dtypes: Sequence[torch.dtype | None]
    ) -> list[Tensor]:
        """Scale the gradients of the padded factors and return them in PEFT's layout and dtypes."""
        views = grad_a_ErI[:, : self.rank], grad_b_ErO[:, : self.rank].permute(2, 1, 0)
        grads = []
        for grad, dtype in zip(views, dtypes, strict=True):
            copied = torch.empty(grad.shape, dtype=dtype, device=grad.device)
            copied.copy_(grad)
            grads.append(copied if self.scaling == 1 else copied.mul_(self.scaling))
        return [grads[0].flatten(0, 1), grads[1].flatten(1)]


def _pad_ranks(factor_ErX: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a factor, contiguous, with the rank padded for grouped GEMMs."""
    n_experts, rank, width = factor_ErX.shape
    missing = -rank % _RANK_MULTIPLE
    padded = factor_ErX.new_empty((n_experts, rank + missing, width), dtype=dtype)
    padded[:, :rank] = factor_ErX
    if missing:
        padded[:, rank:] = 0
    return padded


class _Projection(NamedTuple):
    """One stack with its adapter, over rows sorted by expert."""

    stack: Stack
    adapter: _Adapter | None
    ends_E: Tensor

    def forward(self, x_SI: Tensor) -> tuple[Tensor, Scaled | None, Tensor | None]:
        """Compute x W, the low-rank part, and h = x Aᵀ."""
        y_SO = grouped_mm(x_SI, self.stack.weight_EIO(x_SI.dtype), self.ends_E)
        if self.adapter is None:
            return y_SO, None, None
        h_Sr = grouped_mm(x_SI, self.adapter.a_ErI.transpose(1, 2), self.ends_E)
        low_rank = Scaled(grouped_mm(h_Sr, self.adapter.b_ErO, self.ends_E), self.adapter.scaling)
        return y_SO, low_rank, h_Sr

    def backward(self, g_SO: Tensor) -> tuple[Tensor, Scaled | None, Tensor | None]:
        """Compute the gradient of x through W, that through the adapter, and that of h, unscaled."""
        gx_SI = grouped_mm(g_SO, self.stack.weight_EIO(g_SO.dtype).transpose(1, 2), self.ends_E)
        if self.adapter is None:
            return gx_SI, None, None
        gh_Sr = grouped_mm(g_SO, self.adapter.b_ErO.transpose(1, 2), self.ends_E)
        through_adapter = Scaled(grouped_mm(gh_Sr, self.adapter.a_ErI, self.ends_E), self.adapter.scaling)
        return gx_SI, through_adapter, gh_Sr

    def factor_gradients(
        self,
        g_SO: Tensor,
        gh_Sr: Tensor | None,
        x_SI: Tensor,
        h_Sr: Tensor | None,
        dtypes: Sequence[torch.dtype | None],
    ) -> list[Tensor | None]:
        """Compute the gradients of A and B."""
        if self.adapter is None or gh_Sr is None or h_Sr is None:
            return [None, None]
        grad_a_ErI = grouped_outer(gh_Sr, x_SI, self.ends_E)
        grad_b_ErO = grouped_outer(h_Sr, g_SO, self.ends_E)
        return [*self.adapter.to_peft(grad_a_ErI, grad_b_ErO, dtypes)]


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weights_Nk: Tensor, call: _Call, *factors: Tensor | None) -> Tensor:
        detached = arithmetic.detach_all(factors)
        routing = call.routing
        inner, down = _projections(call, detached, x_NC.dtype)
        weight_S = weights_Nk.reshape(-1)[routing.slot_S]
        base, low_rank, h_inner = inner.forward(x_NC.index_select(0, routing.token_S))
        total = _inner_sum(base, low_rank, call)
        product_SF = routed_gate_(total, weight_S, call.gate, call.keep)
        del base, low_rank
        y_SC, low_rank, ctx.h_down = down.forward(product_SF)
        y_NC = sum_of_rows(_parts(y_SC, low_rank), routing.place_Nk)
        if down.stack.bias is not None:
            chosen_NkE = F.one_hot(routing.experts_Nk(), len(down.stack.bias))
            y_NC += (chosen_NkE * weights_Nk[..., None]).sum(1).to(y_NC.dtype) @ down.stack.bias
        if call.start is None:
            ctx.save_for_backward(x_NC, weights_Nk, *([total.base, h_inner] if call.keep else []))
        ctx.call, ctx.factors = call, detached
        ctx.dtypes = [None if factor is None else factor.dtype for factor in factors]
        ctx.versions = arithmetic.record_versions([*(stack.weight for stack in call.stacks), *detached])
        return y_NC

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic.check_unchanged(ctx.versions)
        call: _Call = ctx.call
        routing = call.routing
        x_NC, weights_Nk, *saved = (ctx if call.start is None else call.start).saved_tensors
        inner, down = _projections(call, ctx.factors, x_NC.dtype)
        weight_S = weights_Nk.reshape(-1)[routing.slot_S]
        if saved:
            total, h_inner = InnerSum(saved[0]), saved[1]
            g_inner = saved[0] if is_last_pass() else torch.empty_like(saved[0])
        else:
            inner = inner._replace(stack=inner.stack.dequantised(x_NC.dtype))  # once for both passes
            base, low_rank, h_inner = inner.forward(x_NC.index_select(0, routing.token_S))
            total, g_inner = _inner_sum(base, low_rank, call), base
        g_SC = grad_NC.index_select(0, routing.token_S)
        # The product's gradient, until the kernel has overwritten it by the product
        product_SF, through_adapter, gh_down = down.backward(g_SC)
        g_weight_S = routed_gate_backward_(product_SF, through_adapter, total, weight_S, call.gate, g_inner)
        del total, through_adapter
        down_grads = down.factor_gradients(g_SC, gh_down, product_SF, ctx.h_down, ctx.dtypes[2:])
        del g_SC, product_SF
        g_weights_Nk = None
        if ctx.needs_input_grad[1]:
            g_weights_Nk = g_weight_S[routing.place_Nk]
            if down.stack.bias is not None:
                g_weights_Nk += (grad_NC @ down.stack.bias.t()).gather(1, routing.experts_Nk())
            g_weights_Nk = g_weights_Nk.to(weights_Nk.dtype)
        g_SC, through_adapter, gh_inner = inner.backward(g_inner)
        grad_x = sum_of_rows(_parts(g_SC, through_adapter), routing.place_Nk)
        del g_SC, through_adapter
        x_SC = x_NC.index_select(0, routing.token_S)
        inner_grads = inner.factor_gradients(g_inner, gh_inner, x_SC, h_inner, ctx.dtypes[:2])
        return grad_x, g_weights_Nk, None, *inner_grads, *down_grads


def _projections(
    call: _Call, factors: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[_Projection, _Projection]:
    """Build the projections of gate and up, and of down."""
    inner, down = (
        _Projection(stack, _Adapter.build(stack, factors[2 * i : 2 * i + 2], dtype), call.routing.ends_E)
        for i, stack in enumerate(call.stacks)
    )
    return inner, down


def _inner_sum(base_SF: Tensor, low_rank: Scaled | None, call: _Call) -> InnerSum:
    bias = call.stacks[0].bias
    return InnerSum(base_SF, low_rank, bias, None if bias is None else call.routing.expert_S)


def _parts(y_SC: Tensor, low_rank: Scaled | None) -> list[Scaled]:
    return [Scaled(y_SC, 1.0), *([] if low_rank is None else [low_rank])]

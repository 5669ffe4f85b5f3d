"""PEFT's LoRA linear layers, those over one input as one autograd node. The arithmetic is in `arithmetic`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.fp8 import Fp8Linear
from unsloth_pack.lora.nf4 import LoraLinear4bit, is_linear_4bit, nf4_weight, why_not_opened
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.sharding import GATHERED_BY_MODULE, is_gathered_as_group, is_gathered_by_module

LORA_TYPES = (LoraLinear, LoraLinear4bit)  # the second is None without bitsandbytes


class Recipe(NamedTuple):
    """How to compute an activation again in the backward pass, in place of keeping it.

    Args:
        compute: the function; gives the same bits every time.
        inputs: the tensors that it takes, kept for the backward pass anyway.
    """

    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


class FastLoraLinear(nn.Module):
    """Takes the place of the class of a PEFT layer in `LORA_TYPES`.

    What it cannot fuse goes through PEFT's forward.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[..., O]` from `[..., I]`."""
        if args or kwargs or not self.runs_fused(x):
            return super().forward(x, *args, **kwargs)
        return _apply_fused(x, [self])[0]

    def cast_when_used(self) -> list[Tensor]:
        """The parameters that every call casts to what it computes in: A and B, where it runs fused."""
        return list(self.tensors()[1:]) if self._is_plain else []

    def runs_fused(self, x: Tensor) -> bool:
        """Whether `forward` of this input is one autograd node."""
        base = self.base_layer
        dtype = base.compute_dtype if hasattr(base, "compute_dtype") else base.weight.dtype
        return self._is_plain and dtype == computes_in(x)

    @property
    def _is_plain(self) -> bool:
        return not self.disable_adapters and not self.merged and why_not_fused(self) is None

    def frozen(self) -> arithmetic.Frozen:
        """The weight, the scaling, and dropout with a seed of its own at every call."""
        base: Any = self.base_layer
        adapter = self.active_adapters[0]
        scaling: Any = self.scaling[adapter]
        weight: Any = base.weight
        if isinstance(base, Fp8Linear):
            weight = base.rows
        elif is_linear_4bit(base):
            weight = nf4_weight(base)
        dropout: Any = self.lora_dropout[adapter]
        if not (dropout.training and getattr(dropout, "p", 0)):
            return arithmetic.Frozen(weight, scaling)
        seed = torch.randint(2**62, (1,), device=base.weight.device)  # drawn there, and not waited for
        return arithmetic.Frozen(weight, scaling, dropout.p, seed)

    def tensors(self) -> tuple[Any, ...]:
        """What may be trained: the bias (the base's, the adapter's or their sum) or None, A and B."""
        adapter = self.active_adapters[0]
        lora_b, bias = self.lora_B[adapter], self.base_layer.bias
        if lora_b.bias is not None:
            own = self.scaling[adapter] * lora_b.bias
            bias = own if bias is None else bias + own
        return bias, self.lora_A[adapter].weight, lora_b.weight


def project(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Every layer applied to `x`: `[..., O]` each from `[..., I]`.

    LoRA layers that can all be fused run as one autograd node. Where x carries a `recipe`, it is computed
    again in the backward pass.
    """
    return _apply_fused(x, layers) if run_fused(x, layers) else [layer(x) for layer in layers]


def run_fused(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Whether all layers may take part in one autograd node over x."""
    return all(isinstance(p, FastLoraLinear) and not has_hooks(p) and p.runs_fused(x) for p in layers)


def why_not_fused(layer: Any) -> str | None:
    """Why a LoRA layer runs through PEFT's own forward, or None where it is fused."""
    base = layer.base_layer
    if type(base) not in (nn.Linear, Fp8Linear) and not is_linear_4bit(base):
        return f"on a {type(base).__name__}"
    if is_gathered_by_module(base.weight):
        return GATHERED_BY_MODULE
    if base.weight.requires_grad:
        return "the base weight is trained"
    if is_linear_4bit(base) and (why := why_not_opened(base)):
        return why
    if len(layer.active_adapters) != 1:
        return f"{len(layer.active_adapters)} active adapters"
    adapter = layer.active_adapters[0]
    if adapter not in layer.lora_A:
        return "no adapter here"
    if adapter in layer.lora_variant:
        return type(layer.lora_variant[adapter]).__name__.removesuffix("LinearVariant")
    lora_a, lora_b = layer.lora_A[adapter], layer.lora_B[adapter]
    dropout = layer.lora_dropout[adapter]
    if dropout.training and type(dropout) not in (nn.Identity, nn.Dropout):
        return f"LoRA dropout by a {type(dropout).__name__}"
    if is_gathered_as_group(lora_a) or is_gathered_as_group(lora_b):
        return "FSDP2 gathers its factors by themselves"
    if has_hooks(base, lora_a, lora_b, dropout):
        return "hooks inside"
    return None


def computes_in(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer over x computes in, autocast or not."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def prepared(x: Tensor) -> tuple[Tensor, Recipe]:
    """x in the dtype that is computed in, and how the backward pass gets it: as it is, or by its recipe."""
    cast = x.to(computes_in(x))
    recipe = getattr(cast, "recipe", None)
    if recipe is None or cast._version:  # a hook has changed it in place
        recipe = Recipe(_itself, (cast,))
    return cast, recipe


def _itself(x: Tensor) -> Tensor:
    return x


def _apply_fused(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    x, recipe = prepared(x)
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    return list(_LoraLinears.apply(x, recipe, [layer.frozen() for layer in layers], *tensors))


class _LoraLinears(torch.autograd.Function):
    """Launch-bound on small models, so what the forward has cast and stacked is kept."""

    @staticmethod
    def forward(ctx, x, recipe, frozen, *tensors):
        x_NI = x.reshape(-1, x.shape[-1])
        a_RI, layers = arithmetic.stack(x.dtype, frozen, tensors)
        outputs, h_NR = arithmetic.forward(x_NI, a_RI, layers)
        seeds = [p.frozen.seed for p in layers]
        ctx.save_for_backward(a_RI, h_NR, *(p.b_Or for p in layers), *seeds, *recipe.inputs)
        ctx.compute, ctx.shape = recipe.compute, x.shape
        ctx.versions = arithmetic.versions(frozen)
        ctx.layers = [replace(p, bias=None, b_Or=None) for p in layers]
        return tuple(arithmetic.shaped(y_NO, x.shape) for y_NO in outputs)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx, *grads):
        arithmetic.unchanged(ctx.versions)
        a_RI, h_NR, *saved = ctx.saved_tensors
        n = len(ctx.layers)
        b_Ors, seeds, inputs = saved[:n], saved[n : 2 * n], saved[2 * n :]
        layers = [
            replace(p, b_Or=b_Or, frozen=p.frozen._replace(seed=seed))
            for p, b_Or, seed in zip(ctx.layers, b_Ors, seeds, strict=True)
        ]
        x_NI = ctx.compute(*inputs).reshape(-1, ctx.shape[-1])
        g_NOs = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        gh_NR = arithmetic.backward_to_ranks(g_NOs, a_RI, layers)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = arithmetic.backward_to_input(g_NOs, gh_NR, a_RI, layers).view(ctx.shape)
        factors = arithmetic.backward_to_factors(g_NOs, gh_NR, x_NI, h_NR, layers)
        trains_bias = ctx.needs_input_grad[3::3]
        biases = [g.sum(0) if trained else None for g, trained in zip(g_NOs, trains_bias, strict=True)]
        return grad_x, None, None, *arithmetic.by_layer(factors, biases, layers)

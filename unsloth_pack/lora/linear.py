"""PEFT's LoRA linear layers, those over one input as one autograd node. The arithmetic is in `arithmetic`."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.fp8 import Fp8Linear
from unsloth_pack.lora.nf4 import LORA_4BIT_TYPES, is_linear_4bit, nf4_weight, why_not_dequantised
from unsloth_pack.modules.hooks import has_hooks, no_compile
from unsloth_pack.modules.sharding import GATHERED_BY_MODULE, is_gathered_as_group, is_gathered_by_module

# Seeds of LoRA dropout. A layer that is computed again has to draw the same ones again.

_here = threading.local()  # the backward pass computes layers again in a thread of autograd's


class SeedTape:
    """The seeds that were drawn while this was first played, in order. Every later time hands them out again.

    `torch.utils.checkpoint` puts the generator back instead, which a CUDA graph cannot do.
    """

    def __init__(self) -> None:
        self._seeds: list[Tensor] = []
        self._next = 0

    @contextmanager
    def played(self) -> Iterator[None]:
        """Seeds come from the beginning of this tape."""
        before, self._next = getattr(_here, "tape", None), 0
        _here.tape = self
        try:
            yield
        finally:
            _here.tape = before

    def next_seed(self, device: torch.device) -> Tensor:
        if self._next == len(self._seeds):
            self._seeds.append(_drawn(device))
        self._next += 1
        return self._seeds[self._next - 1]


def new_seed(device: torch.device) -> Tensor:
    """`[1]` int64, drawn on the device, so that nothing waits for it."""
    tape: SeedTape | None = getattr(_here, "tape", None)
    return _drawn(device) if tape is None else tape.next_seed(device)


def _drawn(device: torch.device) -> Tensor:
    return torch.randint(2**62, (1,), device=device)


_LORA_TYPES: tuple[type[nn.Module], ...] = (LoraLinear, *LORA_4BIT_TYPES)


class Recipe(NamedTuple):
    """How to compute an activation again in the backward pass, which then need not keep it.

    Args:
        compute: gives the same bits every time.
        inputs: what it takes: tensors that are kept for the backward pass anyway.
    """

    compute: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]

    @property
    def makes_anew(self) -> bool:
        """Whether the result may be overwritten: it is not what is kept."""
        return self.compute is not _itself


def with_recipe(result: Tensor, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    """`result` of `compute(*inputs)`, which on a GPU carries a recipe of it."""
    if result.is_cuda and result.requires_grad:
        vars(result)["recipe"] = Recipe(compute, inputs)
    return result


class PeftLinear(nn.Module):
    """LoRA on a linear layer, by PEFT: the types of its attributes, which PEFT leaves open."""

    base_layer: nn.Linear
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    lora_dropout: Mapping[str, nn.Module]
    lora_variant: Mapping[str, object]
    scaling: Mapping[str, float]
    active_adapters: list[str]
    disable_adapters: bool
    merged: bool


class FastLoraLinear(PeftLinear):
    """Takes the place of the class of a PEFT layer for which `is_lora_linear` is True.

    Calls that cannot be fused go through PEFT's own forward.
    """

    @no_compile
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`[..., O]` from `[..., I]`."""
        if args or kwargs or not self.runs_fused(x):
            return super().forward(x, *args, **kwargs)
        return _apply_fused(x, [self])[0]

    def cast_when_used(self) -> list[Tensor]:
        """The parameters that every call casts to the dtype it computes in: A and B, where it runs fused."""
        return list(self.tensors()[1:]) if self._can_be_fused else []

    def runs_fused(self, x: Tensor) -> bool:
        """Whether `forward` of this input is one autograd node."""
        dtype = getattr(self.base_layer, "compute_dtype", self.base_layer.weight.dtype)
        return self._can_be_fused and dtype == computes_in(x)

    @property
    def _can_be_fused(self) -> bool:
        return not self.disable_adapters and not self.merged and why_not_fused(self) is None

    def frozen(self) -> arithmetic.Frozen:
        """The weight, the scaling, and dropout with a new seed at every call."""
        base, adapter = self.base_layer, self.active_adapters[0]
        weight: arithmetic.Weight
        (weight,) = arithmetic.as_they_are([base.weight])
        if isinstance(base, Fp8Linear):
            weight = base.rows
        elif is_linear_4bit(base):
            weight = nf4_weight(base)
        dropout = self.lora_dropout[adapter]
        p: float = getattr(dropout, "p", 0.0)
        if not (dropout.training and p):
            return arithmetic.Frozen(weight, self.scaling[adapter])
        return arithmetic.Frozen(weight, self.scaling[adapter], p, new_seed(base.weight.device))

    def tensors(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """What may be trained: the bias (the base's, the adapter's or their sum) or None, A and B."""
        adapter = self.active_adapters[0]
        lora_b = self.lora_B[adapter]
        bias: Tensor | None = self.base_layer.bias
        if lora_b.bias is not None:
            own = self.scaling[adapter] * lora_b.bias
            bias = own if bias is None else bias + own
        return bias, self.lora_A[adapter].weight, lora_b.weight


def is_lora_linear(module: nn.Module) -> bool:
    """Whether a module is LoRA on a linear layer: PEFT puts it on the layer, or on its parameter `weight`."""
    if type(module) is ParamWrapper:
        return module.parameter_name == "weight" and isinstance(module.base_layer, nn.Linear)
    return type(module) in _LORA_TYPES


def project(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Every layer applied to `x`: `[..., O]` each from `[..., I]`.

    LoRA layers run as one autograd node if all of them can be fused. Where x carries a `recipe`, the backward
    pass computes it again.
    """
    return _apply_fused(x, layers) if run_fused(x, layers) else [layer(x) for layer in layers]


def run_fused(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """Whether all layers can be part of one autograd node over x."""
    return all(isinstance(p, FastLoraLinear) and not has_hooks(p) and p.runs_fused(x) for p in layers)


def why_not_fused(layer: PeftLinear) -> str | None:
    """Why a LoRA layer runs through PEFT's own forward; None where it is fused."""
    base = layer.base_layer
    if type(base) not in (nn.Linear, Fp8Linear) and not is_linear_4bit(base):
        return f"on a {type(base).__name__}"
    if is_gathered_by_module(base.weight):
        return GATHERED_BY_MODULE
    if base.weight.requires_grad:
        return "the base weight is trained"
    if is_linear_4bit(base) and (why := why_not_dequantised(base)):
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
    """The dtype that a linear layer over x computes in, with and without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def prepared(x: Tensor) -> tuple[Tensor, Recipe]:
    """x in the dtype that layers compute in, and how the backward pass gets it: kept, or by x's recipe."""
    cast = x.to(computes_in(x))
    recipe = getattr(cast, "recipe", None)
    if recipe is None or cast._version:  # the recipe is wrong after a hook has changed x in place
        recipe = Recipe(_itself, (cast,))
    return cast, recipe


def _itself(x: Tensor) -> Tensor:
    return x


def _apply_fused(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    x, recipe = prepared(x)
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    return list(_LoraLinears.apply(x, recipe, [layer.frozen() for layer in layers], *tensors))


class _LoraLinears(torch.autograd.Function):
    """Keeps the cast and stacked factors: on small models the launches of casting them again cost more."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        recipe: Recipe,
        frozen: Sequence[arithmetic.Frozen],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        x_NI = x.reshape(-1, x.shape[-1])
        a_RI, layers = arithmetic.stack(x.dtype, frozen, arithmetic.as_they_are(tensors))
        outputs, h_NR = arithmetic.forward(x_NI, a_RI, layers)
        seeds = [p.frozen.seed for p in layers]
        ctx.save_for_backward(a_RI, h_NR, *(p.b_Or for p in layers), *seeds, *recipe.inputs)
        ctx.compute, ctx.shape = recipe.compute, x.shape
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.versions = arithmetic.versions(frozen)
        ctx.layers = [replace(p, bias=None, b_Or=None) for p in layers]
        return tuple(arithmetic.shaped(y_NO, x.shape) for y_NO in outputs)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
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
        grad_bs = arithmetic.backward_to_bs(g_NOs, h_NR, layers)
        factors = [arithmetic.backward_to_a(gh_NR, x_NI, layers), *grad_bs]
        trains_bias = ctx.needs_input_grad[3::3]
        biases = [g.sum(0) if trained else None for g, trained in zip(g_NOs, trains_bias, strict=True)]
        of_tensors = arithmetic.by_layer(factors, biases, layers)
        return grad_x, None, None, *arithmetic.cast_together(of_tensors, ctx.dtypes)

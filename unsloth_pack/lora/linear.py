"""PEFT's LoRA linear layers; those over one input run as one autograd node, see `arithmetic`."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from unsloth_pack.kernels.launch import apply
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.expert_stacks import PeftLora
from unsloth_pack.lora.quantised import (
    LORA_4BIT_TYPES,
    Fp8Linear,
    Nf4Weight,
    is_linear_4bit,
    read_quant_state,
    why_not_dequantised,
)
from unsloth_pack.modules import (
    GATHERED_BY_MODULE,
    has_hooks,
    is_gathered_as_group,
    is_gathered_by_module,
    no_compile,
)

_local = threading.local()  # the backward pass recomputes layers in a thread of autograd's


class SeedTape:
    """Record seeds of LoRA dropout at the first play, and return the same ones at every later play.

    A recomputed layer needs the same masks. `torch.utils.checkpoint` restores the generator instead, which a
    CUDA graph cannot do.
    """

    def __init__(self) -> None:
        self._seeds: list[Tensor] = []
        self._next = 0

    @contextmanager
    def play(self) -> Iterator[None]:
        """Take seeds from the beginning of this tape meanwhile."""
        before, self._next = getattr(_local, "tape", None), 0
        _local.tape = self
        try:
            yield
        finally:
            _local.tape = before

    def next_seed(self, device: torch.device) -> Tensor:
        if self._next == len(self._seeds):
            self._seeds.append(torch.randint(2**62, (1,), device=device))
        self._next += 1
        return self._seeds[self._next - 1]


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed `[1]` int64 on the device, so that nothing waits for it."""
    tape: SeedTape | None = getattr(_local, "tape", None)
    return (SeedTape() if tape is None else tape).next_seed(device)


_LORA_TYPES: tuple[type[nn.Module], ...] = (LoraLinear, *LORA_4BIT_TYPES)


class Recipe(NamedTuple):
    """The recomputation of an activation in the backward pass, in place of saving it."""

    compute: Callable[..., Tensor]  # gives the same bits every time
    inputs: tuple[Tensor, ...]  # its arguments: tensors that are saved for the backward pass anyway

    @property
    def is_fresh(self) -> bool:
        """True if the result is no saved tensor and may be overwritten."""
        return self.compute is not _identity


def with_recipe(result: Tensor, compute: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    """Attach the recipe of `result = compute(*inputs)` to it, on a GPU."""
    if result.is_cuda and result.requires_grad:
        vars(result)["recipe"] = Recipe(compute, inputs)
    return result


class PeftLinear(PeftLora):
    """Likewise, of a linear layer."""

    base_layer: nn.Linear
    lora_dropout: Mapping[str, nn.Module]
    lora_variant: Mapping[str, object]


class FastLoraLinear(PeftLinear):
    """Replaces the class of a PEFT layer (`is_lora_linear`). PEFT's forward runs unfused calls."""

    @no_compile
    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        if args or kwargs or not self.runs_fused(x):
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        return _apply_fused(x, [self])[0]

    def cast_when_used(self) -> list[Tensor]:
        """List the parameters that every call casts to the compute dtype: A and B if it runs fused."""
        return list(self.tensors()[1:]) if self._can_be_fused else []

    def runs_fused(self, x: Tensor) -> bool:
        """True if `forward` of this input is one autograd node."""
        dtype = getattr(self.base_layer, "compute_dtype", self.base_layer.weight.dtype)
        return self._can_be_fused and dtype == get_compute_dtype(x)

    @property
    def _can_be_fused(self) -> bool:
        if self.disable_adapters and torch.is_grad_enabled():
            return False
        return not self.merged and why_not_fused(self) is None

    def frozen(self) -> arithmetic.Layer:
        """Return the layer without its tensors, with a new seed of dropout at every call."""
        adapter = self.active_adapters[0]
        weight, dropout = self._frozen_weight(), self.lora_dropout[adapter]
        p: float = getattr(dropout, "p", 0.0)
        if self.disable_adapters or not (dropout.training and p):
            return arithmetic.Layer(weight, self.scaling[adapter])
        return arithmetic.Layer(weight, self.scaling[adapter], p, draw_seed(self.base_layer.weight.device))

    def _frozen_weight(self) -> arithmetic.Weight:
        base = self.base_layer
        if isinstance(base, Fp8Linear):
            return base.rows
        if type(base) is not nn.Linear:
            return Nf4Weight(base.weight, read_quant_state(base))
        return base.weight.detach()

    def tensors(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return the bias (base, adapter or their sum) or None, A and B: of rank 0 if adapters are off."""
        adapter = self.active_adapters[0]
        lora_a, lora_b = self.lora_A[adapter], self.lora_B[adapter]
        bias: Tensor | None = self.base_layer.bias
        if self.disable_adapters:
            return bias, lora_a.weight[:0], lora_b.weight[:, :0]
        if lora_b.bias is not None:
            own_bias = self.scaling[adapter] * lora_b.bias
            bias = own_bias if bias is None else bias + own_bias
        return bias, lora_a.weight, lora_b.weight


def is_lora_linear(module: nn.Module) -> bool:
    """True for LoRA on a linear layer, or on its parameter `weight`."""
    if type(module) is ParamWrapper:
        return module.parameter_name == "weight" and isinstance(module.base_layer, nn.Linear)
    return type(module) in _LORA_TYPES


def project(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """Apply every layer to `x`: `[..., O]` each from `[..., I]`.

    LoRA layers run as one autograd node if all of them can be fused. The backward pass recomputes an x with a
    `recipe`.
    """
    return _apply_fused(x, layers) if can_run_fused(x, layers) else [layer(x) for layer in layers]


def can_run_fused(x: Tensor, layers: Sequence[nn.Module]) -> bool:
    """True if all layers can be one autograd node over x."""
    return all(isinstance(p, FastLoraLinear) and not has_hooks(p) and p.runs_fused(x) for p in layers)


def why_not_fused(layer: PeftLinear) -> str | None:
    """Explain why a LoRA layer runs through PEFT's forward; None if it is fused."""
    base = layer.base_layer
    if type(base) not in (nn.Linear, Fp8Linear):
        if not is_linear_4bit(base):
            return f"on a {type(base).__name__}"
        if why := why_not_dequantised(base):
            return why
    if is_gathered_by_module(base.weight):
        return GATHERED_BY_MODULE
    if base.weight.requires_grad:
        return "the base weight is trained"
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


def get_compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that a linear layer over x computes in, with and without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def cast_input(x: Tensor) -> tuple[Tensor, Recipe]:
    """Cast x to the compute dtype; return it and its recipe, which saves it if x has none."""
    cast = x.to(get_compute_dtype(x))
    recipe = getattr(cast, "recipe", None)
    if recipe is None or cast._version:  # the recipe is wrong after a hook has changed x in place
        recipe = Recipe(_identity, (cast,))
    return cast, recipe


def _identity(x: Tensor) -> Tensor:
    return x


def _apply_fused(x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
    x, recipe = cast_input(x)
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    return list(apply(_LoraLinears, x, recipe, [layer.frozen() for layer in layers], *tensors))


class _LoraLinears(torch.autograd.Function):
    """Saves the cast and stacked factors: on small models, launches to cast them again cost more."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, recipe: Recipe, frozen: Sequence[arithmetic.Layer], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        x_NI = x.reshape(-1, x.shape[-1])
        a_RI, layers = arithmetic.stack_layers(x.dtype, frozen, arithmetic.detach_all(tensors))
        outputs, h_NR = arithmetic.forward(x_NI, a_RI, layers)
        seeds = [p.seed for p in layers]
        ctx.save_for_backward(a_RI, h_NR, *(p.b_Or for p in layers), *seeds, *recipe.inputs)
        ctx.compute, ctx.shape = recipe.compute, x.shape
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.versions = arithmetic.record_versions(p.weight for p in frozen)
        ctx.layers = [p._replace(bias=None, b_Or=None, seed=None) for p in layers]
        return tuple(arithmetic.reshape_output(y_NO, x.shape) for y_NO in outputs)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic.check_unchanged(ctx.versions)
        a_RI, h_NR, *saved = ctx.saved_tensors
        n = len(ctx.layers)
        b_Ors, seeds, inputs = saved[:n], saved[n : 2 * n], saved[2 * n :]
        layers = [
            p._replace(b_Or=b_Or, seed=seed) for p, b_Or, seed in zip(ctx.layers, b_Ors, seeds, strict=True)
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
        tensor_grads = arithmetic.order_by_layer(factors, biases, layers)
        return grad_x, None, None, *arithmetic.cast_in_one_launch(tensor_grads, ctx.dtypes)

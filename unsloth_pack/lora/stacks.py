"""Stacked experts and PEFT's adapters on them, as modules.

transformers holds the weights of all experts of a layer in two stacked parameters, and says in attributes of
the module how they lie. PEFT puts an adapter on such a parameter by a `ParamWrapper` around the module, one
around the other where both have one.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from unsloth_pack.lora.quantised_stacks import STACKS, quantise_stacks, stored_stack
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.sharding import is_gathered_as_group

UNGATED_STACKS = ("up_proj", "down_proj")


class ExpertsModule(nn.Module):
    """A transformers module of stacked experts: the attributes that its decorator gives it.

    Args:
        gate_up_proj: `[E, 2F, C]`, or `[E, C, 2F]` where `is_transposed`.
        down_proj: `[E, C, F]`, or `[E, F, C]`.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    config: Any
    has_bias: bool
    has_gate: bool
    has_post_expert_norm: bool
    is_transposed: bool
    is_concatenated: bool


class PeftStack(nn.Module):
    """A `ParamWrapper`: the types of its attributes, which PEFT leaves open."""

    base_layer: nn.Module
    parameter_name: str
    num_experts: int
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    scaling: Mapping[str, float]
    active_adapters: list[str]
    disable_adapters: bool
    merged: bool
    get_base_layer: Callable[[], Any]
    merge: Callable[..., None]


class ExpertAdapter(NamedTuple):
    """One adapter on a stack, in PEFT's layout: A expert by expert, B rank by rank.

    Args:
        lora_a: `[E * r, I]`.
        lora_b: `[O, r * E]`.
        scaling: factor on its output.
    """

    lora_a: Tensor
    lora_b: Tensor
    scaling: float


def is_experts(module: Any) -> bool:
    """Whether a module holds stacked experts in the way of transformers, with a gate."""
    if not hasattr(module, "is_transposed"):
        return False
    held = [stored_stack(module, name) for name in STACKS]
    return all(stack is not None and len(stack.shape) == 3 for stack in held)


def is_ungated_experts(module: Any) -> bool:
    """Whether a module holds stacked experts in the way of transformers, without a gate: no kernel's."""
    stacks = [getattr(module, name, None) for name in UNGATED_STACKS]
    return getattr(module, "has_gate", True) is False and all(
        isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks
    )


def ungated_stacks(model: nn.Module) -> list[str]:
    """The paths of stacked parameters of experts without a gate."""
    found = [path for path, module in model.named_modules() if is_ungated_experts(module)]
    return [f"{path}.{stack}" for path in found for stack in UNGATED_STACKS]


def quantise_experts(model: Any, kind: str) -> int:
    """Quantise the experts of a model's decoder, one layer after another, and return in how many layers.

    Args:
        kind: "nf4" or "fp8".
    """
    found = [module for module in model.get_decoder().layers.modules() if is_experts(module)]
    return sum(quantise_stacks(module, kind) for module in found)


def is_expert_adapter(module: Any) -> bool:
    """Whether a module is PEFT's adapter on stacked experts."""
    return isinstance(module, ParamWrapper) and is_experts(module.get_base_layer())


def wrappers_of(wrapper: Any) -> Iterator[Any]:
    """The wrapper and those inside it, down to the experts."""
    while isinstance(wrapper, ParamWrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def in_use(wrapper: PeftStack) -> list[str]:
    """The adapters whose output a wrapper adds: none where they are off, or merged into the weights."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def adapter_of(wrapper: PeftStack) -> ExpertAdapter:
    """The adapter that a wrapper applies, where `why_adapter_not_fused` is None and one is in use."""
    (name,) = in_use(wrapper)
    return ExpertAdapter(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name])


def why_adapter_not_fused(wrapper: PeftStack) -> str | None:
    """Why an adapter on stacked experts runs through PEFT's own forward; None where it is fused."""
    if wrapper.disable_adapters and wrapper.merged:
        return "PEFT unmerges it first"
    if len(names := in_use(wrapper)) > 1:
        return f"{len(names)} active adapters"
    for name in names:
        lora_a, lora_b = wrapper.lora_A[name], wrapper.lora_B[name]
        if is_gathered_as_group(lora_a) or is_gathered_as_group(lora_b):
            return "FSDP2 gathers its factors by themselves"
        if has_hooks(lora_a, lora_b):
            return "hooks inside"
        if not _is_in_known_layout(wrapper, lora_a.weight, lora_b.weight):
            return "its factors lie otherwise than in PEFT 0.21"
    return None


def _is_in_known_layout(wrapper: PeftStack, lora_a: Tensor, lora_b: Tensor) -> bool:
    experts: Any = wrapper.get_base_layer()
    stack = stored_stack(experts, wrapper.parameter_name)
    if stack is None:
        return False
    sizes = stack.shape
    n_inputs, n_outputs = sizes[1:] if experts.is_transposed else (sizes[2], sizes[1])
    ranks = len(lora_a)
    shapes_fit = lora_a.shape == (ranks, n_inputs) and lora_b.shape == (n_outputs, ranks)
    # Where inputs and outputs are equally many, shapes do not tell them apart
    is_swapped = getattr(wrapper, "_did_swap_in_out_features", None)
    return shapes_fit and ranks % sizes[0] == 0 and is_swapped is (not experts.is_transposed)

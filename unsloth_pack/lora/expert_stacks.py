"""Stacked experts and PEFT's adapters on them, as modules.

transformers holds the weights of all experts of a layer in two stacked parameters, and says in attributes of
the module how they lie. PEFT puts an adapter on such a parameter by a `ParamWrapper` around the module, one
around the other where both have one.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization
from transformers.utils import is_bitsandbytes_available

from unsloth_pack.kernels import Fp8Rows, NestedScales, dequantize_4bit, quantize_rows
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.sharding import is_gathered_as_group

# Stacked experts in 4 bits or in fp8: frozen, and dequantised at each use.
#
# A quantised stack is a parametrization of torch on the parameter. So whoever reads the parameter, such as
# PEFT
# or transformers' own forward, gets the dequantised weights, and the fused forward reads what is stored.

if is_bitsandbytes_available():
    from bitsandbytes import functional

STACKS = ("gate_up_proj", "down_proj")  # the names of the stacked parameters
_BLOCK = 64  # elements that share a scale in NF4


class Nf4Stack(NamedTuple):
    """A stack in NF4 (Dettmers et al. 2023, "QLoRA").

    Args:
        packed: uint8, in the layout of bitsandbytes.
        code, scales: as of `dequantize_4bit`.
        shape, dtype: of what it stands for.
    """

    packed: Tensor
    code: Tensor
    scales: NestedScales
    shape: torch.Size
    dtype: torch.dtype

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The stack in `dtype`."""
        return dequantize_4bit(self.packed.view(-1), self.code, self.scales, _BLOCK, dtype).view(self.shape)


class Fp8Stack(NamedTuple):
    """A stack in e4m3 with a scale for every row.

    Args:
        values: float8_e4m3fn.
        scale: float32, 1 in its last dim.
        dtype: of what it stands for.
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The stack in `dtype`."""
        rows = Fp8Rows(self.values.flatten(0, 1), self.scale.view(-1, 1))
        return rows.dequantized(dtype).view(self.shape)


class _InNf4(nn.Module):
    """The parametrization that dequantises NF4."""

    code: Tensor
    values: Tensor
    scale_code: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, state: Any):
        super().__init__()
        self.shape, self.dtype, self.group = state.shape, state.dtype, state.state2.blocksize
        outer = state.state2
        held = dict(code=state.code, values=state.absmax, scale_code=outer.code, scale=outer.absmax)
        for name, tensor in {**held, "offset": state.offset}.items():
            self.register_buffer(name, tensor)

    def stored(self, packed: Tensor) -> Nf4Stack:
        scales = NestedScales(self.values, self.scale_code, self.scale, self.offset, self.group)
        return Nf4Stack(packed, self.code, scales, self.shape, self.dtype)

    def forward(self, packed: Tensor) -> Tensor:
        return self.stored(packed).dequantized(self.dtype)


class _InFp8(nn.Module):
    """The parametrization that dequantises e4m3."""

    scale: Tensor

    def __init__(self, scale: Tensor, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.register_buffer("scale", scale)

    def stored(self, values: Tensor) -> Fp8Stack:
        return Fp8Stack(values, self.scale, self.dtype)

    def forward(self, values: Tensor) -> Tensor:
        return self.stored(values).dequantized(self.dtype)


def stored_stack(experts: Any, name: str) -> Tensor | Nf4Stack | Fp8Stack | None:
    """What a module holds of a stack; None where it holds none, or something is added to it at each use."""
    if not is_parametrized(experts, name):
        weight = getattr(experts, name, None)
        return weight if isinstance(weight, nn.Parameter) else None
    added = experts.parametrizations[name]
    if len(added) > 1 or not isinstance(added[0], _InNf4 | _InFp8):
        return None
    return added[0].stored(added.original)


def is_quantised(experts: Any) -> bool:
    """Whether a module holds a stack in 4 bits or in fp8."""
    return any(isinstance(stored_stack(experts, name), Nf4Stack | Fp8Stack) for name in STACKS)


def quantise_stacks(experts: Any, kind: str) -> bool:
    """Quantise the stacks of a module; False where their sizes do not allow it.

    Args:
        kind: "nf4" or "fp8".
    """
    weights = [getattr(experts, name).detach() for name in STACKS]
    if any(weight.numel() % _BLOCK or weight.shape[-1] % 16 for weight in weights):
        return False
    for name, weight in zip(STACKS, weights, strict=True):
        in_few_bits = _in_nf4(weight) if kind == "nf4" else _in_fp8(weight)
        setattr(experts, name, nn.Parameter(in_few_bits[0], requires_grad=False))
        register_parametrization(experts, name, in_few_bits[1], unsafe=True)
    return True


def dequantised_copy(experts: Any, dtype: torch.dtype) -> Any:
    """A copy of a module of experts in `dtype`, whose stacks are parameters."""
    inside = {id(module) for module in experts.modules()}
    referred_to = [one for one in vars(experts).values() if isinstance(one, nn.Module)]
    copied = copy.deepcopy(experts, {id(one): one for one in referred_to if id(one) not in inside})
    if is_quantised(copied):
        _replace_by_parameters(copied, {name: getattr(copied, name).detach() for name in STACKS})
    return copied.to(dtype)


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Parameters of the same shape and dtype, but without memory, stand in for quantised stacks meanwhile.

    PEFT nests its adapters on parametrized parameters in another order, and its files would then hold the
    adapters of one stack under the name of the other.
    """
    with ExitStack() as all_of_them:
        for experts in [module for module in model.modules() if _is_quantised_module(module)]:
            device = next(experts.parameters()).device
            stacks: dict[str, Any] = {name: stored_stack(experts, name) for name in STACKS}
            empty = {
                name: torch.zeros(1, dtype=stack.dtype, device=device).expand(stack.shape)
                for name, stack in stacks.items()
            }
            all_of_them.enter_context(_as_parameters(experts, empty))
        yield


@contextmanager
def dequantised(experts: Any) -> Iterator[None]:
    """The stacks of a module are parameters meanwhile, and it is not patched.

    PEFT 0.21 does not take off again what it adds to parameters that are parametrized already.
    """
    if not _is_quantised_module(experts):
        yield
        return
    with _as_parameters(experts, {name: getattr(experts, name).detach() for name in STACKS}):
        yield


@contextmanager
def _as_parameters(experts: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    kind, parametrizations = type(experts), experts.parametrizations
    _replace_by_parameters(experts, weights)
    try:
        yield
    finally:
        for name in STACKS:
            delattr(experts, name)
        experts.__class__ = kind
        experts.parametrizations = parametrizations


def _is_quantised_module(module: nn.Module) -> bool:
    return is_parametrized(module) and is_quantised(module)


def _replace_by_parameters(experts: Any, weights: Mapping[str, Tensor]) -> None:
    """Put parameters into the place of quantised stacks.

    Not by torch's `remove_parametrizations`: it takes a patched class for the one that it has made.
    """
    kinds = type(experts).__mro__
    made_by_torch = max(i for i, kind in enumerate(kinds) if STACKS[0] in vars(kind))  # it has a property
    del experts.parametrizations
    experts.__class__ = kinds[made_by_torch + 1]
    for name, weight in weights.items():
        setattr(experts, name, nn.Parameter(weight, requires_grad=False))


def _in_nf4(weight: Tensor) -> tuple[Tensor, nn.Module]:
    packed, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=_BLOCK, quant_type="nf4", compress_statistics=True
    )
    return packed, _InNf4(state)


def _in_fp8(weight: Tensor) -> tuple[Tensor, nn.Module]:
    rows = quantize_rows(weight.flatten(0, 1))
    return rows.values.view(weight.shape), _InFp8(rows.scale.view(*weight.shape[:2], 1), weight.dtype)


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

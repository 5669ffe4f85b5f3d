"""Stacked experts, quantised stacks, and PEFT's adapters on them, as modules.

transformers stacks the weights of all experts of a layer in two parameters; attributes of the module describe
their layout. PEFT adapts such a parameter by a `ParamWrapper` around the module, nested if both are adapted.
A stack in 4 bits or in fp8 is frozen, and a torch parametrization of the parameter: PEFT and transformers'
forward read dequantised weights, the fused forward reads the quantised ones.
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
from unsloth_pack.modules import has_hooks, is_gathered_as_group

if is_bitsandbytes_available():
    from bitsandbytes import functional

STACKS = ("gate_up_proj", "down_proj")  # the names of the stacked parameters
_BLOCK = 64  # elements that share a scale in NF4
MXFP4_BLOCK = 32


class _Dequantizer(nn.Module):
    """Dequantise a stack of a shape to a dtype, as a parametrization."""

    form: str  # of the stored values
    shape: torch.Size
    dtype: torch.dtype

    def dequantize(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def forward(self, values: Tensor) -> Tensor:
        return self.dequantize(values, self.dtype)


class QuantisedStack(NamedTuple):
    """A stack in NF4 (Dettmers et al. 2023, "QLoRA"), in MXFP4, or in e4m3 with a scale for every row."""

    values: Tensor
    dequantizer: _Dequantizer

    @property
    def shape(self) -> torch.Size:
        return self.dequantizer.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.dequantizer.dtype

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the stack in `dtype`."""
        return self.dequantizer.dequantize(self.values, dtype)


class _FourBitDequantizer(_Dequantizer):
    form, lower_first = "NF4", False
    code: Tensor
    values: Tensor
    scale_code: Tensor
    scale: Tensor
    offset: Tensor

    def __init__(self, shape: torch.Size, dtype: torch.dtype, code: Tensor, scales: NestedScales, block: int):
        super().__init__()
        self.shape, self.dtype, self.block, self.group = shape, dtype, block, scales.group
        self.register_buffer("code", code)
        self.register_buffer("values", scales.values)
        self.register_buffer("scale_code", scales.code)
        self.register_buffer("scale", scales.scale)
        self.register_buffer("offset", scales.offset)

    def dequantize(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        scales = NestedScales(self.values, self.scale_code, self.scale, self.offset, self.group)
        arguments = values.view(-1), self.code, scales, self.block, dtype, self.lower_first
        return dequantize_4bit(*arguments).view(self.shape)


class _Mxfp4Dequantizer(_FourBitDequantizer):
    form, lower_first = "MXFP4", True

    def __init__(self, scales: Tensor, dtype: torch.dtype):
        device, (n_experts, n_outputs, n_blocks) = scales.device, scales.shape
        shape = torch.Size((n_experts, MXFP4_BLOCK * n_blocks, n_outputs))
        positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
        constants = torch.cat([positive, -positive]), powers, torch.ones(1), torch.zeros(())
        code, powers, one, zero = (constant.to(device) for constant in constants)
        nested = NestedScales(scales.view(-1), powers, one, zero, scales.numel())
        super().__init__(shape, dtype, code, nested, MXFP4_BLOCK)

    def dequantize(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        n_experts, n_inputs, n_outputs = self.shape
        return super().dequantize(values, dtype).view(n_experts, n_outputs, n_inputs).transpose(1, 2)


class _Fp8Dequantizer(_Dequantizer):
    form = "fp8"
    scale: Tensor

    def __init__(self, shape: torch.Size, scale: Tensor, dtype: torch.dtype):
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.register_buffer("scale", scale)

    def dequantize(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        rows = Fp8Rows(values.flatten(0, 1), self.scale.view(-1, 1))
        return rows.dequantized(dtype).view(self.shape)


def get_stored_stack(experts: Any, name: str) -> Tensor | QuantisedStack | None:
    """Return a module's stack as it is stored; None without one, or if a parametrization changes it."""
    if not is_parametrized(experts, name):
        weight = getattr(experts, name, None)
        return weight if isinstance(weight, nn.Parameter) else None
    chain = experts.parametrizations[name]
    if len(chain) > 1 or not isinstance(chain[0], _Dequantizer):
        return None
    return QuantisedStack(chain.original, chain[0])


def is_quantised(experts: nn.Module) -> bool:
    """True if a module has a stack in 4 bits or in fp8."""
    return any(isinstance(get_stored_stack(experts, name), QuantisedStack) for name in STACKS)


def quantise_stacks(experts: nn.Module, kind: str) -> bool:
    """Quantise the stacks of a module to "nf4" or "fp8"; False if their sizes do not allow it."""
    weights = [getattr(experts, name).detach() for name in STACKS]
    if any(weight.numel() % _BLOCK or weight.shape[-1] % 16 for weight in weights):
        return False
    for name, weight in zip(STACKS, weights, strict=True):
        dequantizer: _Dequantizer
        if kind == "nf4":
            options: dict[str, Any] = {"blocksize": _BLOCK, "quant_type": "nf4", "compress_statistics": True}
            values, state = functional.quantize_4bit(weight.contiguous(), **options)
            outer = state.state2
            scales = NestedScales(state.absmax, outer.code, outer.absmax, state.offset, outer.blocksize)
            dequantizer = _FourBitDequantizer(weight.shape, weight.dtype, state.code, scales, _BLOCK)
        else:
            rows = quantize_rows(weight.flatten(0, 1))
            values = rows.values.view(weight.shape)
            scale = rows.scale.view(*weight.shape[:2], 1)
            dequantizer = _Fp8Dequantizer(weight.shape, scale, weight.dtype)
        hold_stack(experts, name, QuantisedStack(values, dequantizer))
    return True


def mxfp4_stack(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> QuantisedStack:
    """Make a stack `[E, I, O]` of `dtype` from MXFP4: e2m1, and a power of two for 32 inputs.

    Source: OCP 2023, "Microscaling Formats (MX) Specification", section 5.

    Args:
        blocks: `[E, O, I / 32, 16]` uint8, two elements a byte with the first in the lower half.
        scales: `[E, O, I / 32]` uint8, exponents plus 127.
    """
    return QuantisedStack(blocks, _Mxfp4Dequantizer(scales, dtype))


def hold_stack(experts: nn.Module, name: str, stack: QuantisedStack) -> None:
    """Make a quantised stack the module's, frozen."""
    setattr(experts, name, nn.Parameter(stack.values, requires_grad=False))
    register_parametrization(experts, name, stack.dequantizer, unsafe=True)


def dequantised_copy(experts: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a module of experts in `dtype`, with parameters as stacks."""
    inside = {id(module) for module in experts.modules()}
    others = [
        value for value in vars(experts).values() if isinstance(value, nn.Module) and id(value) not in inside
    ]
    copied = copy.deepcopy(experts, {id(other): other for other in others})
    if is_quantised(copied):
        _replace_by_parameters(copied, {name: getattr(copied, name).detach() for name in STACKS})
    return copied.to(dtype)


@contextmanager
def placeholder_stacks(model: nn.Module) -> Iterator[None]:
    """Replace quantised stacks by parameters of the same shape and dtype, without memory, for a while.

    PEFT nests adapters on parametrized parameters in another order: its files would swap the adapters' names.
    """
    with ExitStack() as exits:
        for experts in [module for module in model.modules() if is_quantised(module)]:
            stacks: dict[str, Any] = {name: get_stored_stack(experts, name) for name in STACKS}
            device = next(experts.parameters()).device
            empty = {
                name: torch.zeros(1, dtype=stack.dtype, device=device).expand(stack.shape)
                for name, stack in stacks.items()
            }
            exits.enter_context(_as_parameters(experts, empty))
        yield


@contextmanager
def dequantised_stacks(experts: nn.Module) -> Iterator[None]:
    """Replace a module's quantised stacks by dequantised parameters, unpatched, for a while.

    PEFT 0.21 does not remove its own parametrization from a parameter that had another one before.
    """
    if not is_quantised(experts):
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


def _replace_by_parameters(experts: Any, weights: Mapping[str, Tensor]) -> None:
    """Replace quantised stacks by parameters.

    torch's `remove_parametrizations` would take a patched class for its own.
    """
    kinds = type(experts).__mro__
    parametrized = max(i for i, kind in enumerate(kinds) if STACKS[0] in vars(kind))  # has torch's property
    del experts.parametrizations
    experts.__class__ = kinds[parametrized + 1]
    for name, weight in weights.items():
        setattr(experts, name, nn.Parameter(weight, requires_grad=False))


class ExpertsModule(nn.Module):
    """Types of the attributes of a transformers module of stacked experts."""

    gate_up_proj: nn.Parameter  # `[E, 2F, C]`, or `[E, C, 2F]` if `is_transposed`
    down_proj: nn.Parameter  # `[E, C, F]`, or `[E, F, C]`
    config: Any
    has_bias: bool
    is_transposed: bool


class PeftLora(nn.Module):
    """Types of the attributes of PEFT's LoRA layers, which PEFT leaves open."""

    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    scaling: Mapping[str, float]
    active_adapters: list[str]
    disable_adapters: bool
    merged: bool


class PeftStack(PeftLora):
    """Likewise, of a `ParamWrapper`."""

    parameter_name: str
    get_base_layer: Callable[[], Any]
    merge: Callable[..., None]


def is_experts(module: nn.Module) -> bool:
    """True for a transformers module of stacked experts with a gate."""
    if not hasattr(module, "is_transposed"):
        return False
    stacks = [get_stored_stack(module, name) for name in STACKS]
    return all(stack is not None and len(stack.shape) == 3 for stack in stacks)


def list_ungated_stacks(model: nn.Module) -> list[str]:
    """List the paths of stacked parameters of experts without a gate, which no kernel supports."""
    ungated = [path for path, module in model.named_modules() if getattr(module, "has_gate", True) is False]
    stacks = {path for path, parameter in model.named_parameters() if parameter.dim() == 3}
    paths = [[f"{path}.{stack}" for stack in ("up_proj", "down_proj")] for path in ungated]
    return [path for both in paths if stacks.issuperset(both) for path in both]


def quantise_experts(layers: nn.Module, kind: str) -> int:
    """Quantise the experts of decoder layers to "nf4" or "fp8"; return the number of their modules.

    Experts in few bits stay as they are.
    """
    dense = (module for module in layers.modules() if is_experts(module) and not is_quantised(module))
    return sum(quantise_stacks(module, kind) for module in dense)


def is_expert_adapter(module: nn.Module) -> bool:
    """True for PEFT's adapter on stacked experts."""
    return isinstance(module, ParamWrapper) and is_experts(module.get_base_layer())


def iterate_wrappers(wrapper: nn.Module) -> Iterator[Any]:
    """Iterate over the wrapper and those inside it, down to the experts."""
    while isinstance(wrapper, ParamWrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def list_active_adapters(wrapper: PeftStack) -> list[str]:
    """List the adapters whose output a wrapper adds: none if they are off or merged."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def why_adapter_not_fused(wrapper: PeftStack) -> str | None:
    """Explain why an adapter on stacked experts runs through PEFT's forward; None if it is fused."""
    if wrapper.disable_adapters and wrapper.merged:
        return "PEFT unmerges it first"
    if len(names := list_active_adapters(wrapper)) > 1:
        return f"{len(names)} active adapters"
    for name in names:
        lora_a, lora_b = wrapper.lora_A[name], wrapper.lora_B[name]
        if is_gathered_as_group(lora_a) or is_gathered_as_group(lora_b):
            return "FSDP2 gathers its factors by themselves"
        if has_hooks(lora_a, lora_b):
            return "hooks inside"
        if not is_in_known_layout(wrapper, lora_a.weight, lora_b.weight):
            return "its factors have another layout than in PEFT 0.21"
    return None


def is_in_known_layout(wrapper: PeftStack, lora_a: Tensor, lora_b: Tensor) -> bool:
    """True if an adapter's factors are those of PEFT 0.21: A expert-major, B expert-minor."""
    experts: Any = wrapper.get_base_layer()
    stack = get_stored_stack(experts, wrapper.parameter_name)
    if stack is None:
        return False
    sizes = stack.shape
    n_inputs, n_outputs = sizes[1:] if experts.is_transposed else (sizes[2], sizes[1])
    ranks = len(lora_a)
    shapes_fit = lora_a.shape == (ranks, n_inputs) and lora_b.shape == (n_outputs, ranks)
    # Shapes cannot tell equally many inputs and outputs apart
    is_swapped = getattr(wrapper, "_did_swap_in_out_features", None)
    return shapes_fit and ranks % sizes[0] == 0 and is_swapped is (not experts.is_transposed)

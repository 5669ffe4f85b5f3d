"""Frozen weights in NF4 (Dettmers et al. 2023, "QLoRA"), in bitsandbytes' layout, and linear layers in fp8.

fp8 takes half the memory of bfloat16, and its GEMMs run at twice the speed.
"""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import is_bitsandbytes_available

from unsloth_pack.kernels import (
    Fp8Rows,
    NestedScales,
    dequantize_4bit,
    fp8_linear,
    fp8_linear_backward,
    fp8_transposed,
    launch,
    quantize_rows,
)
from unsloth_pack.kernels.launch import apply, once_differentiable
from unsloth_pack.lora.expert_stacks import STACKS, get_stored_stack, is_quantised, quantise_experts

if is_bitsandbytes_available():
    from bitsandbytes import functional
    from bitsandbytes.nn import Linear4bit
    from peft.tuners.lora.bnb import Linear4bit as LoraLinear4bit

    LINEAR_4BIT_TYPES: tuple[type[nn.Module], ...] = (Linear4bit,)
    LORA_4BIT_TYPES: tuple[type[nn.Module], ...] = (LoraLinear4bit,)
else:
    LINEAR_4BIT_TYPES = LORA_4BIT_TYPES = ()

_PACKED_OUTPUTS = 32  # rows that bitsandbytes packs together


class Nf4Weight(NamedTuple):
    """A weight `[O, I]` in four bits."""

    packed: Tensor  # bytes in the layout of bitsandbytes
    state: Any  # bitsandbytes' `QuantState`

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return `[O, I]` in `dtype`. Drop it after its use: the next one then takes the same memory."""
        state, packed = self.state, self.packed.view(torch.uint8).view(-1)
        n_elements = 2 * len(packed)
        has_whole_blocks = prod(state.shape) == n_elements and n_elements % state.blocksize == 0
        # On a CPU bitsandbytes misreads weights whose rows are no whole blocks, with plain PEFT too
        if not packed.is_cuda or launch.triton is None or state.quant_type != "nf4" or not has_whole_blocks:
            return functional.dequantize_4bit(self.packed, state).to(dtype)
        scales = state.absmax
        if state.nested:
            outer = state.state2
            scales = NestedScales(scales, outer.code, outer.absmax, state.offset, outer.blocksize)
        elements = dequantize_4bit(packed, state.code, scales, state.blocksize, state.dtype)
        return elements.view(state.shape).to(dtype)


def is_linear_4bit(layer: nn.Module) -> bool:
    """True for a linear layer of bitsandbytes in four bits."""
    return type(layer) in LINEAR_4BIT_TYPES


def read_quant_state(layer: Any) -> Any:
    """Return bitsandbytes' `QuantState` of a `Linear4bit`. Weights that FSDP2 gathers have no attributes."""
    return getattr(layer.weight, "quant_state", None) or layer.quant_state


def why_not_dequantised(layer: Any) -> str | None:
    """Explain why the weight of a `Linear4bit` cannot be dequantised here; None if it can."""
    state = read_quant_state(layer)
    if state is None:
        return "its weight is not quantised yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "its weight is packed for inference on a CPU"
    return None


def prevent_cpu_packing(model: nn.Module) -> None:
    """Stop bitsandbytes from packing weights of unsupported shapes for inference on a CPU with AVX512-BF16.

    Its forward in evaluation fails on them.
    """
    layers: list[Any] = [layer for layer in model.modules() if is_linear_4bit(layer)]
    for layer in layers:
        n_out, n_in = layer.out_features, layer.in_features
        if n_out % _PACKED_OUTPUTS or n_in % layer.weight.blocksize:
            layer.support_avx512bf16_for_cpu = False


def count_weights(model: nn.Module) -> tuple[int, int]:
    """Return how many weights train, and how many there are; weights that share a byte count one by one."""
    sizes = {p: int(getattr(p, "ds_numel", p.numel())) for p in model.parameters()}  # ZeRO-3 empties them
    modules: list[Any] = [*model.modules()]
    for module in modules:
        if is_linear_4bit(module):
            sizes[module.weight] = module.in_features * module.out_features
        for name in STACKS if is_quantised(module) else ():
            stack: Any = get_stored_stack(module, name)
            sizes[stack.values] = stack.shape.numel()
    return sum(n for p, n in sizes.items() if p.requires_grad), sum(sizes.values())


class Fp8Linear(nn.Linear):
    """A linear layer with a frozen weight in e4m3 and a scale for every output; sizes are multiples of 16.

    Quantises its input row by row, and in the backward pass the gradient of the output.
    """

    scale: Tensor

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = linear.weight.dtype  # PEFT creates adapters in it
        rows = quantize_rows(linear.weight.detach())
        self.weight = nn.Parameter(rows.values, requires_grad=False)
        self.register_buffer("scale", rows.scale)
        self.bias = linear.bias

    @property
    def rows(self) -> Fp8Rows:
        """Return the weight `[O, I]`."""
        return Fp8Rows(self.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        y = apply(_Fp8Linear, x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        ctx.weight = Fp8Rows(values, scale)
        y = x.new_empty((*x.shape[:-1], len(values)))
        fp8_linear(quantize_rows(x.reshape(-1, x.shape[-1])), ctx.weight, y.view(-1, len(values)))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        n_inputs = ctx.weight.values.shape[1]
        gx = grad.new_empty((*grad.shape[:-1], n_inputs))
        g_NO = grad.reshape(-1, grad.shape[-1])
        fp8_linear_backward([g_NO], fp8_transposed([ctx.weight]), gx.view(-1, n_inputs))
        return gx, None, None


def quantize_to_fp8(layers: nn.Module) -> int:
    """Quantise the linear layers and experts of decoder layers; return the number of linear layers.

    Linear layers whose sizes are not multiples of 16 stay as they are.
    """
    n_quantized = 0
    quantise_experts(layers, "fp8")
    for parent in list(layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.in_features % 16 == child.out_features % 16 == 0:
                setattr(parent, name, Fp8Linear(child))
                n_quantized += 1
    return n_quantized

"""Frozen weights in NF4 (Dettmers et al. 2023, "QLoRA"), in the layout of bitsandbytes."""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import is_bitsandbytes_available

from unsloth_pack.kernels import NestedScales, dequantize_4bit, launch

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
    """A weight `[O, I]` in four bits.

    Args:
        packed: bytes in the layout of bitsandbytes.
        state: bitsandbytes' `QuantState`.
    """

    packed: Tensor
    state: Any

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


def nf4_weight(layer: Any) -> Nf4Weight:
    """Return the weight of a `Linear4bit` for which `why_not_dequantised` is None."""
    return Nf4Weight(layer.weight, layer.weight.quant_state)


def why_not_dequantised(layer: Any) -> str | None:
    """Explain why the weight of a `Linear4bit` cannot be dequantised here; None if it can."""
    state = getattr(layer.weight, "quant_state", None)
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

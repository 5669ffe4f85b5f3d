"""Experts in MXFP4, as gpt-oss stores them, loaded without unpacking.

Files hold each stack as `_blocks` and `_scales`; see `mxfp4_stack`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from unsloth_pack.errors import InputError
from unsloth_pack.lora.expert_stacks import MXFP4_BLOCK, STACKS, hold_stack, is_experts, mxfp4_stack

_PARTS = ("blocks", "scales")
_LARGEST = 6.0  # of e2m1


def is_in_mxfp4(config: PretrainedConfig) -> bool:
    """True for the configuration of a model whose files hold experts in MXFP4."""
    stored: Any = getattr(config, "quantization_config", None) or {}
    return isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"


def make_packed_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a model class whose experts are parameters as the files hold them; see `hold_packed`."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        for experts in filter(is_experts, self.modules()):
            vars(experts)["_is_hf_initialized"] = True  # transformers would look for the dense stacks
            for name in STACKS:
                n_experts, n_inputs, n_outputs = getattr(experts, name).shape
                sizes = (n_experts, n_outputs, n_inputs // MXFP4_BLOCK)
                delattr(experts, name)
                for part, shape in zip(_PARTS, ((*sizes, MXFP4_BLOCK // 2), sizes), strict=True):
                    weight = nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
                    experts.register_parameter(f"{name}_{part}", weight)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def hold_packed(layers: nn.Module, dtype: torch.dtype, unpacks: bool) -> None:
    """Make blocks and scales of loaded experts their stacks, in `dtype` for those who read them.

    Args:
        unpacks: True for dense stacks that train.

    Raises:
        InputError: a weight may be too large for `dtype`.
    """
    for path, experts in layers.named_modules():
        for name in STACKS if hasattr(experts, f"{STACKS[0]}_blocks") else ():
            blocks, scales = (_take(experts, f"{name}_{part}") for part in _PARTS)
            largest = _LARGEST * 2.0 ** (int(scales.max()) - 127)
            if largest > torch.finfo(dtype).max:
                said = f"weight {path}.{name} is up to {largest:.0e}, too large for {dtype}"
                raise InputError(f"{said}; choose another dtype, or download the weights again")
            stack = mxfp4_stack(blocks, scales, dtype)
            if unpacks:
                setattr(experts, name, nn.Parameter(stack.dequantized(dtype).contiguous()))
            else:
                hold_stack(experts, name, stack)


def _take(experts: nn.Module, name: str) -> Tensor:
    weight: Tensor = getattr(experts, name).detach()
    delattr(experts, name)
    return weight

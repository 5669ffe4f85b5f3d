"""Save an adapter for vLLM and SGLang, which read LoRA on experts by the layers of the hub's checkpoint.

There every expert has linear layers of its own, such as `experts.7.gate_proj`. transformers stacks their
weights, and PEFT adapts a stack by factors that hold those of all experts.
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from unsloth_pack.checkpoints.merging import expected_weights, kind_of
from unsloth_pack.checkpoints.names import ADAPTER_WEIGHTS
from unsloth_pack.checkpoints.vllm_compat import not_served, why_not_served
from unsloth_pack.errors import InputError
from unsloth_pack.lora.expert_stacks import get_stored_stack, is_in_known_layout
from unsloth_pack.modules import base_of

# Architectures of which vLLM reads stacks as PEFT saves them, both of a layer: `is_3d_moe_weight` there
_READ_AS_STACKS = (
    *("GptOssForCausalLM", "Qwen3VLMoeForConditionalGeneration"),
    "Qwen3_5MoeForConditionalGeneration",
)
_STACKS = ("gate_up_proj", "up_proj", "down_proj")  # the first two: with a gate, and without
# A `[r, inputs]` and B `[outputs, r]` of a layer, or `[E, r, inputs]` and `[E, outputs, r]` of a stack
_Factors = tuple[Tensor, Tensor]
_Conversion = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@torch.no_grad()
def save_vllm_adapter(model: PeftModel, folder: Path) -> None:
    """Save the active adapter as vLLM 0.33 and SGLang 0.5.23 read it.

    PEFT loads it on a model whose experts have linear layers. All layers get the greatest rank, by zeros, and
    a scale of 1, multiplied into B: servers differ in what they read of patterns and rank-stabilised scales.

    Raises:
        InputError: several adapters are active, or vLLM cannot serve this one.
    """
    if len(active := model.active_adapters) != 1:
        raise InputError(f"adapters {', '.join(active)} are active; choose one with set_adapter")
    base: PreTrainedModel = base_of(model)
    factors = _read_factors(base, active[0])
    rank = max((a.shape[-2] for a, _ in factors.values()), default=1)
    factors = {name: _fill_up(pair, rank) for name, pair in factors.items()}
    stacks = {name: pair for name, pair in factors.items() if pair[0].dim() == 3}
    keeps_names = not stacks or type(base).__name__ in _READ_AS_STACKS
    convert: _Conversion = (
        (lambda weights: weights) if keeps_names else partial(revert_weight_conversion, base)
    )
    linear = {name: pair for name, pair in factors.items() if name not in stacks}
    layers = _convert_names(linear if keeps_names else factors, convert)
    for name, (a, b) in layers.items():
        if a.dim() != 2 or len(a) != rank or b.shape[-1] != rank:
            raise InputError(not_served(f"it takes none on {name}"))

    config: Any = copy.copy(model.peft_config[active[0]])
    config.base_model_name_or_path = config.base_model_name_or_path or base.name_or_path
    config.r, config.lora_alpha, config.use_rslora = rank, rank, False
    config.rank_pattern, config.alpha_pattern = {}, {}
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.target_modules, config.target_parameters = _choose_targets(base, layers, convert), None
    config.inference_mode = True
    if reason := why_not_served(config.to_dict()):
        raise InputError(reason)
    if stacks and keeps_names:
        config.target_parameters = sorted(stacks)
        layers |= {_path_in_peft(name): _flatten(pair) for name, pair in stacks.items()}
    weights = {
        f"base_model.model.{path}.lora_{side}.weight": factor.clone(
            memory_format=torch.contiguous_format
        ).cpu()
        for path, pair in layers.items()
        for side, factor in zip("AB", pair, strict=True)
    }
    save_file(weights, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    config.save_pretrained(str(folder))


def _read_factors(base: PreTrainedModel, adapter: str) -> dict[str, _Factors]:
    """Read the factors by the names of the weights that they change, B scaled.

    vLLM wants factors on all stacks of a module or on none, so that others get factors of rank 0.
    """
    factors: dict[str, _Factors] = {}
    tuners: list[Any] = [pair for pair in base.named_modules() if isinstance(pair[1], BaseTunerLayer)]
    for path, layer in tuners:
        path = re.sub(r"(\.base_layer)+$", "", path)
        name = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        is_plain = isinstance(layer, LoraLayer) and kind_of(layer) == "LORA"
        if not is_plain or adapter in layer.lora_embedding_A or name not in ("weight", *_STACKS):
            raise InputError(not_served(f"on {path} it is no plain LoRA of a linear layer"))
        if adapter not in layer.lora_A:
            continue
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight * layer.scaling[adapter]
        if name != "weight":
            if not is_in_known_layout(layer, a, b):
                raise InputError(not_served(f"PEFT holds that of {path} in an unknown layout"))
            experts = layer.get_base_layer()
            for stack in _STACKS:
                if (stored := get_stored_stack(experts, stack)) is not None:
                    n_experts, *sizes = stored.shape
                    n_inputs, n_outputs = sizes if experts.is_transposed else sizes[::-1]
                    none = a.new_zeros(n_experts, 0, n_inputs), b.new_zeros(n_experts, n_outputs, 0)
                    factors.setdefault(f"{path}.{stack}", none)
            a, b = a.unflatten(0, (n_experts, -1)), b.unflatten(1, (-1, n_experts)).permute(2, 0, 1)
        factors[f"{path}.{name}"] = a, b
    return factors


def _fill_up(factors: _Factors, rank: int) -> _Factors:
    """Raise the rank by zeros."""
    a, b = factors
    return F.pad(a, (0, 0, 0, rank - a.shape[-2])), F.pad(b, (0, rank - b.shape[-1]))


def _convert_names(factors: Mapping[str, _Factors], convert: _Conversion) -> dict[str, _Factors]:
    """Convert factors on weights of a model to factors on layers of the hub's checkpoint.

    transformers splits both as it splits the weights. Gate and up, which it splits by their outputs, share A.
    """
    of_a = {
        name: torch.cat([a, a], 1) if name.endswith(".gate_up_proj") else a
        for name, (a, _) in factors.items()
    }
    of_b = {name: b for name, (_, b) in factors.items()}
    of_a, of_b = convert(of_a), convert(of_b)
    return {name.removesuffix(".weight"): (a, of_b[name]) for name, a in of_a.items()}


def _choose_targets(base: PreTrainedModel, paths: Collection[str], convert: _Conversion) -> list[str]:
    """Choose `target_modules`: the names of layers, or their paths if others have the same name."""
    weights = convert(expected_weights(base, base.dtype))
    others = {name.removesuffix(".weight") for name in weights} - {*paths}
    leaves = {path.rpartition(".")[2] for path in others}
    return sorted({path if (leaf := path.rpartition(".")[2]) in leaves else leaf for path in paths})


def _path_in_peft(stack: str) -> str:
    """Return the path of PEFT's wrapper of a stack: that of the first lies inside the other's."""
    path, _, name = stack.rpartition(".")
    return f"{path}.base_layer" if name != "down_proj" else path


def _flatten(factors: _Factors) -> _Factors:
    """Return factors of a stack in PEFT's shapes: `[E * r, inputs]`, expert-major, and `[outputs, r * E]`."""
    a, b = factors
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)

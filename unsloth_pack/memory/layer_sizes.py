"""Measure what a decoder layer keeps for its backward pass, from the sizes of its modules.

For every token a layer of a patched model keeps

    the input of each norm, from which the backward pass computes the norm again
    q, k and v as they are attended with, and the result; before a norm of q and k, those too
    gate and up, of all chosen experts
    the ranks of an adapter; where a layer's own weights train, its input

and nothing else of its size. Of layers with a state the outputs of their projections count alone, though
some keep more.
"""

from collections.abc import Mapping
from typing import NamedTuple

from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedConfig

from unsloth_pack.lora.expert_stacks import STACKS, get_stored_stack, is_experts
from unsloth_pack.models import arch_spec_for

_GATED, _OUTPUTS = ("gate_proj", "up_proj", "gate_up_proj"), ("o_proj", "out_proj")


class LayerSizes(NamedTuple):
    """Sizes of a layer, in elements for each token where nothing else is said."""

    hidden: int
    kept: int  # for the backward pass, but for gate and up
    gate_and_up: int
    attention: int  # the result of the attention, or of what stands in its place
    expert_rows: int  # what experts compute backward, which is not cut into tiles
    dense: int  # weights that exist dequantised at one time, if they are quantised; not for each token
    adapter: int  # weights of adapters that a call casts and keeps; not for each token

    @classmethod
    def measure(cls, layer: nn.Module, config: PreTrainedConfig) -> "LayerSizes":
        """Measure a layer of a decoder with this configuration, with its adapter if it has one."""
        spec, hidden, chosen = arch_spec_for(config.model_type), config.hidden_size, count_chosen(config)
        outputs: dict[str, int] = {}
        shares: dict[str, float] = {}  # of experts that a token has, by the path of their adapter
        kept = gate_and_up = attention = expert_rows = dense = adapter = 0
        trains = False
        for path, module in layer.named_modules():
            name = path.replace(".base_layer", "").rpartition(".")[2]
            of_adapter = path.rpartition(".lora_")[0]
            if isinstance(module, ParamWrapper) and module.num_experts > 1:
                shares[path] = chosen / module.num_experts
            elif of_adapter and isinstance(module, nn.Linear):
                kept += int(module.out_features * shares.get(of_adapter, 1)) * (".lora_A." in path)
                adapter += module.weight.numel() * (of_adapter not in shares)
            elif isinstance(module, nn.Linear):
                usual = _usual_name(name, spec.names)
                outputs[usual], size = module.out_features, module.in_features * module.out_features
                trains |= module.weight.requires_grad
                if usual in _OUTPUTS:
                    attention += module.in_features
                elif usual in _GATED:
                    gate_and_up += module.out_features
                elif usual != "down_proj":
                    kept += module.out_features
                dense += size * (usual in _GATED or usual == "down_proj")
            elif is_experts(module):
                inner = get_stored_stack(module, STACKS[0])
                assert inner is not None
                features = inner.shape.numel() // inner.shape[0] // hidden
                gate_and_up += chosen * features
                expert_rows += chosen * (2 * features + 3 * hidden)
                kept += hidden
                dense += inner.shape.numel()
            elif (weight := getattr(module, "weight", None)) is not None and weight.dim() == 1:
                kept += outputs.get(_usual_name(name, spec.names).replace("norm", "proj"), hidden)
        if spec.fused_qkv:  # v is a part of it that keeps all of it, beside q and k as they were rotated
            kept += (outputs["qkv_proj"] + attention) // 2
        kept += attention + 2 * hidden * trains
        return cls(hidden, kept, gate_and_up, attention, expert_rows, dense, adapter)


def count_chosen(config: PreTrainedConfig) -> int:
    """Return how many experts compute for a token; 1 without experts."""
    return getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 1


def _usual_name(name: str, names: Mapping[str, str]) -> str:
    """Return what Llama calls a module that an architecture calls `name`."""
    return next((usual for usual, own in names.items() if own == name), name)

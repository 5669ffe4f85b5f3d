"""The modules of a decoder that a patch looks at."""

from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from unsloth_pack.forwards.mlp import activation_of
from unsloth_pack.lora.layers import LORA_TYPES


@dataclass(frozen=True)
class DecoderParts:
    """They are found before anything is swapped, and the report counts them.

    Args:
        mlps: each with the kernel's name of its activation, None where it cannot be fused.
        loras: LoRA layers on linear layers, of a type in `LORA_TYPES`.
        other_loras: those in 8 bits, or on parameters such as stacked experts.
    """

    attentions: list[Any]
    norms: list[nn.Module]
    mlps: list[tuple[nn.Module, str | None]]
    loras: list[LoraLayer]
    other_loras: list[LoraLayer]

    @classmethod
    def of(cls, decoder: Any) -> "DecoderParts":
        return cls(
            attentions=_alike(decoder, decoder.layers[0].self_attn),
            norms=_alike(decoder, decoder.norm),
            mlps=[(layer.mlp, activation_of(layer.mlp)) for layer in decoder.layers],
            loras=[module for module in decoder.modules() if type(module) in LORA_TYPES],
            other_loras=[
                module
                for module in decoder.modules()
                if isinstance(module, LoraLayer) and type(module) not in LORA_TYPES
            ],
        )


def _alike(decoder: nn.Module, one: nn.Module) -> list[Any]:
    """All modules of the kind of this one, which `modules_to_save` may wrap with a copy."""
    kind = type(getattr(one, "original_module", one))
    return [module for module in decoder.modules() if type(module) is kind]

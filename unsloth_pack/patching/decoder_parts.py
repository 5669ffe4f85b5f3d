"""The modules of a decoder that a patch looks at."""

from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from unsloth_pack.forwards.mixers import MIXERS, Mixer
from unsloth_pack.forwards.mlp import activation_of
from unsloth_pack.lora.layers import LORA_TYPES
from unsloth_pack.models.spec import ArchSpec


@dataclass(frozen=True)
class DecoderParts:
    """The modules, found before any class is swapped. The report counts them.

    Args:
        mixers: the module of every layer that works between tokens, with its kind; also the copies that
            `modules_to_save` made.
        norms: RMS norms with a weight.
        mlps: each with its activation's name in `kernels.gated`, None where it cannot be fused.
        experts: routed experts beside the MLP of a layer.
        loras: LoRA layers on linear layers, of a type in `LORA_TYPES`.
        other_loras: those in 8 bits, or on parameters such as stacked experts.
    """

    mixers: list[tuple[Mixer, Any]]
    norms: list[nn.Module]
    mlps: list[tuple[nn.Module, str | None]]
    experts: list[nn.Module]
    loras: list[LoraLayer]
    other_loras: list[LoraLayer]

    @classmethod
    def of(cls, decoder: Any, spec: ArchSpec) -> "DecoderParts":
        return cls(
            mixers=[
                (mixer, module)
                for mixer, one in mixers_by_layer(decoder, spec)
                for module in _itself_and_copies(one)
            ],
            norms=[norm for norm in _alike(decoder, decoder.norm) if hasattr(norm, "weight")],
            mlps=[(layer.mlp, activation_of(layer.mlp)) for layer in decoder.layers],
            experts=[layer.experts for layer in decoder.layers if hasattr(layer, "experts")],
            loras=[module for module in decoder.modules() if type(module) in LORA_TYPES],
            other_loras=[
                module
                for module in decoder.modules()
                if isinstance(module, LoraLayer) and type(module) not in LORA_TYPES
            ],
        )


def mixers_by_layer(decoder: Any, spec: ArchSpec) -> list[tuple[Mixer, Any]]:
    """What each layer does between tokens, and the module that does it."""
    mixers = [MIXERS[spec.mixer_of(decoder.config, number)] for number in range(len(decoder.layers))]
    return [
        (mixer, getattr(layer, mixer.attribute)) for mixer, layer in zip(mixers, decoder.layers, strict=True)
    ]


def _itself_and_copies(one: nn.Module) -> list[nn.Module]:
    """A module, or the original and the copies where `modules_to_save` wraps it."""
    kind = type(getattr(one, "original_module", one))
    return [module for module in one.modules() if type(module) is kind]


def _alike(decoder: nn.Module, one: nn.Module) -> list[Any]:
    """All modules of the kind of this one, which `modules_to_save` may wrap with a copy."""
    kind = type(getattr(one, "original_module", one))
    return [module for module in decoder.modules() if type(module) is kind]

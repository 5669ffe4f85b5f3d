"""The modules of a decoder that a patch looks at."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from unsloth_pack.forwards.mixers import MIXERS, Choice, Mixer
from unsloth_pack.forwards.mlp import GatedProjections, gated_projections
from unsloth_pack.lora.layers import LORA_TYPES
from unsloth_pack.models.spec import ArchSpec


@dataclass(frozen=True)
class DecoderParts:
    """The modules, found before any class is swapped. The report counts them.

    Args:
        mixers: the module of every layer that works between tokens, with its kind and how it computes; also
            the copies that `modules_to_save` made.
        norms: those with a weight.
        mlps: each with the number of its layer, and the names of its projections where it can be fused.
        experts: routed experts beside the MLP of a layer.
        loras: LoRA layers on linear layers, of a type in `LORA_TYPES`.
        other_loras: those in 8 bits, or on parameters such as stacked experts.
    """

    mixers: list[tuple[Mixer, Any, Choice]]
    norms: list[nn.Module]
    mlps: list[tuple[int, nn.Module, GatedProjections | None]]
    experts: list[nn.Module]
    loras: list[LoraLayer]
    other_loras: list[LoraLayer]

    @classmethod
    def of(cls, decoder: Any, spec: ArchSpec, choices: Sequence[Choice]) -> "DecoderParts":
        """Those of a decoder.

        Args:
            choices: how its mixers compute, in the order of `mixers_by_layer`.
        """
        by_layer = mixers_by_layer(decoder, spec)
        return cls(
            mixers=[
                (mixer, module, choice)
                for (mixer, one), choice in zip(by_layer, choices, strict=True)
                for module in itself_and_copies(one)
            ],
            norms=[
                norm
                for norm in _alike(decoder, getattr(decoder, spec.name("norm")))
                if hasattr(norm, "weight")
            ],
            mlps=[
                (number, mlp, gated_projections(mlp, spec))
                for number, mlp in _mlps_by_layer(decoder, spec, {id(one) for _, one in by_layer})
            ],
            experts=[layer.experts for layer in decoder.layers if hasattr(layer, "experts")],
            loras=[module for module in decoder.modules() if type(module) in LORA_TYPES],
            other_loras=[
                module
                for module in decoder.modules()
                if isinstance(module, LoraLayer) and type(module) not in LORA_TYPES
            ],
        )


def mixers_by_layer(decoder: Any, spec: ArchSpec) -> list[tuple[Mixer, Any]]:
    """What each layer does between tokens, and the module that does it. Some layers do nothing there."""
    names = [spec.mixer_of(decoder.config, number) for number in range(len(decoder.layers))]
    pairs = [(MIXERS[name], layer) for name, layer in zip(names, decoder.layers, strict=True) if name]
    return [(mixer, getattr(layer, spec.name(mixer.attribute))) for mixer, layer in pairs]


def _mlps_by_layer(decoder: Any, spec: ArchSpec, mixers: set[int]) -> list[tuple[int, nn.Module]]:
    """The MLPs, each with its layer's number; where a layer has either, a mixer may stand in its place."""
    found = [(number, getattr(layer, spec.name("mlp"))) for number, layer in enumerate(decoder.layers)]
    return [(number, mlp) for number, mlp in found if id(mlp) not in mixers]


def itself_and_copies(one: nn.Module) -> list[nn.Module]:
    """A module, or the original and the copies where `modules_to_save` wraps it."""
    kind = type(getattr(one, "original_module", one))
    return [module for module in one.modules() if type(module) is kind]


def _alike(decoder: nn.Module, one: nn.Module) -> list[Any]:
    """All modules of the kind of this one, which `modules_to_save` may wrap with a copy."""
    kind = type(getattr(one, "original_module", one))
    return [module for module in decoder.modules() if type(module) is kind]

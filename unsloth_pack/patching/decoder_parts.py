"""The modules of a decoder that a patch looks at."""

from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from unsloth_pack.forwards.experts import features_of, gate_of, why_experts_not_fused, why_reads_host
from unsloth_pack.forwards.mixers import MIXERS, Mixer
from unsloth_pack.forwards.mlp import activation_of
from unsloth_pack.kernels import Gate
from unsloth_pack.lora.layers import is_lora_linear
from unsloth_pack.lora.stacks import is_expert_adapter, is_experts
from unsloth_pack.models.spec import ArchSpec


@dataclass(frozen=True)
class DecoderParts:
    """The modules, found before any class is swapped. The report counts them.

    Args:
        mixers: the module of every layer that works between tokens, with its kind; also the copies that
            `modules_to_save` made.
        mlps: each with its layer's number and its activation's name in `kernels.gated`, None where it cannot
            be fused. Those of shared experts are among them.
        experts: stacked experts, each with its layer's number and its gate, None where it cannot be fused.
        loras: LoRA layers on linear layers.
        expert_loras: LoRA layers on stacked experts.
        other_loras: those in 8 bits, or on other parameters.
    """

    mixers: list[tuple[Mixer, Any]]
    norms: list[nn.Module]
    mlps: list[tuple[int, Any, str | None]]
    experts: list[tuple[int, Any, Gate | None]]
    loras: list[Any]
    expert_loras: list[Any]
    other_loras: list[Any]

    @classmethod
    def of(cls, decoder: Any, spec: ArchSpec) -> "DecoderParts":
        modules: list[Any] = list(decoder.modules())
        return cls(
            mixers=[
                (mixer, module)
                for mixer, one in mixers_by_layer(decoder, spec)
                for module in itself_and_copies(one)
            ],
            norms=_alike(decoder, decoder.norm),
            mlps=[one for number, layer in enumerate(decoder.layers) for one in _mlps(number, layer.mlp)],
            experts=[
                (number, module, gate_of(module))
                for number, layer in enumerate(decoder.layers)
                for module in layer.modules()
                if is_experts(module)
            ],
            loras=[module for module in modules if is_lora_linear(module)],
            expert_loras=[module for module in modules if is_expert_adapter(module)],
            other_loras=[
                module
                for module in modules
                if not (is_lora_linear(module) or is_expert_adapter(module)) and isinstance(module, LoraLayer)
            ],
        )

    def why_experts_not_captured(self) -> str | None:
        """Why no step can be captured, so far as routed experts decide it, or None."""
        unknown = [mlp for _, mlp, activation in self.mlps if activation is None and hasattr(mlp, "experts")]
        if unknown or any(gate is None or why_experts_not_fused(one) for _, one, gate in self.experts):
            return "routed experts that are not fused depend on the tokens"
        return next(filter(None, (why_reads_host(experts) for _, experts, _ in self.experts)), None)

    def gate_features(self, config: Any) -> list[int]:
        """Features of gate for a token, in every module that is fused."""
        of_mlps = [mlp.down_proj.in_features for _, mlp, activation in self.mlps if activation is not None]
        chosen: int = getattr(config, "num_experts_per_tok", 1) or 1
        return of_mlps + [
            chosen * features_of(experts) for _, experts, gate in self.experts if gate is not None
        ]


def _mlps(number: int, mlp: nn.Module) -> list[tuple[int, Any, str | None]]:
    """The gated MLP of a layer, or those that work beside its routed experts."""
    if (activation := activation_of(mlp)) is not None or not any(map(is_experts, mlp.modules())):
        return [(number, mlp, activation)]
    inside = [(number, module, activation_of(module)) for module in mlp.modules()]
    return [one for one in inside if one[2] is not None and not is_experts(one[1])]


def mixers_by_layer(decoder: Any, spec: ArchSpec) -> list[tuple[Mixer, Any]]:
    """What each layer does between tokens, and the module that does it."""
    mixers = [MIXERS[spec.mixer_of(decoder.config, number)] for number in range(len(decoder.layers))]
    return [
        (mixer, getattr(layer, mixer.attribute)) for mixer, layer in zip(mixers, decoder.layers, strict=True)
    ]


def itself_and_copies(one: nn.Module) -> list[nn.Module]:
    """A module, or the original and the copies where `modules_to_save` wraps it."""
    kind = type(getattr(one, "original_module", one))
    return [module for module in one.modules() if type(module) is kind]


def _alike(decoder: nn.Module, one: nn.Module) -> list[Any]:
    """All modules of the kind of this one, which `modules_to_save` may wrap with a copy."""
    kind = type(getattr(one, "original_module", one))
    return [module for module in decoder.modules() if type(module) is kind]

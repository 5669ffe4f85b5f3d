"""The modules of a decoder that a patch looks at."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from unsloth_pack.kernels import Gate
from unsloth_pack.layers.mixers import MIXERS, Choice, Mixer
from unsloth_pack.layers.mlp import FAST_ACTIVATIONS, GatedProjections, find_gated_projections
from unsloth_pack.layers.moe import count_gate_features, read_gate, why_experts_not_fused, why_reads_host
from unsloth_pack.lora.expert_stacks import is_expert_adapter, is_experts
from unsloth_pack.lora.linear import is_lora_linear
from unsloth_pack.models.spec import ArchSpec


@dataclass(frozen=True)
class DecoderParts:
    """The modules, found before any class is swapped. The report counts them.

    Args:
        mixers: the module of every layer that works between tokens, with its kind and how it computes; also
            the copies that `modules_to_save` made.
        norms: those with a weight.
        mlps: each with the number of its layer, and the names of its projections where it can be fused. Those
            of shared experts are among them.
        activations: those of MLPs without a gate that have a kernel.
        experts: stacked experts, each with its layer's number and its gate, None where it cannot be fused.
        loras: LoRA layers on linear layers.
        expert_loras: LoRA layers on stacked experts.
        other_loras: those in 8 bits, or on other parameters.
    """

    mixers: list[tuple[Mixer, Any, Choice]]
    norms: list[nn.Module]
    mlps: list[tuple[int, Any, GatedProjections | None]]
    activations: list[nn.Module]
    experts: list[tuple[int, Any, Gate | None]]
    loras: list[Any]
    expert_loras: list[Any]
    other_loras: list[Any]

    @classmethod
    def of(cls, decoder: Any, spec: ArchSpec, choices: Sequence[Choice]) -> "DecoderParts":
        """Those of a decoder.

        Args:
            choices: how its mixers compute, in the order of `mixers_by_layer`.
        """
        by_layer = mixers_by_layer(decoder, spec)
        modules: list[Any] = list(decoder.modules())
        mlps = _mlps_by_layer(decoder, spec, {id(one) for _, one in by_layer})
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
            mlps=mlps,
            activations=list(
                dict.fromkeys(  # layers may share one
                    module
                    for _, mlp, projections in mlps
                    if projections is None
                    for module in mlp.modules()
                    if type(module) in FAST_ACTIVATIONS
                )
            ),
            experts=[
                (number, module, read_gate(module))
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

    def replaced(self) -> list[Any]:
        """Those whose forward is replaced by one that computes the same, attention and adapters aside."""
        mlps = [mlp for _, mlp, projections in self.mlps if projections is not None]
        experts = [experts for _, experts, gate in self.experts if gate is not None]
        return [*self.norms, *mlps, *experts]

    def why_experts_not_captured(self) -> str | None:
        """Why no step can be captured, so far as routed experts decide it, or None."""
        unknown = [mlp for _, mlp, named in self.mlps if named is None and hasattr(mlp, "experts")]
        if unknown or any(gate is None or why_experts_not_fused(one) for _, one, gate in self.experts):
            return "routed experts that are not fused depend on the tokens"
        return next(filter(None, (why_reads_host(experts) for _, experts, _ in self.experts)), None)

    def gate_features(self, config: Any) -> list[int]:
        """Features of gate for a token, in every module that is fused."""
        of_mlps = [
            projections.count_features(mlp) for _, mlp, projections in self.mlps if projections is not None
        ]
        chosen: int = getattr(config, "num_experts_per_tok", 1) or 1
        return of_mlps + [
            chosen * count_gate_features(experts) for _, experts, gate in self.experts if gate is not None
        ]


def mixers_by_layer(decoder: Any, spec: ArchSpec) -> list[tuple[Mixer, Any]]:
    """What each layer does between tokens, and the module that does it. Some layers do nothing there."""
    pairs = [
        (MIXERS[name], layer)
        for number, layer in enumerate(decoder.layers)
        for name in spec.mixers_of(decoder.config, number)
    ]
    return [(mixer, getattr(layer, spec.name(mixer.attribute))) for mixer, layer in pairs]


def _mlps_by_layer(
    decoder: Any, spec: ArchSpec, mixers: set[int]
) -> list[tuple[int, Any, GatedProjections | None]]:
    """The MLPs, each with its layer's number; where a layer has either, a mixer may stand in its place."""
    found = [(number, getattr(layer, spec.name("mlp"))) for number, layer in enumerate(decoder.layers)]
    return [one for number, mlp in found if id(mlp) not in mixers for one in _mlps(number, mlp, spec)]


def _mlps(number: int, mlp: nn.Module, spec: ArchSpec) -> list[tuple[int, Any, GatedProjections | None]]:
    """The MLP of a layer, or those gated ones that work beside its routed experts."""
    projections = find_gated_projections(mlp, spec)
    if projections is not None or not any(map(is_experts, mlp.modules())):
        return [(number, mlp, projections)]
    inside = [(number, module, find_gated_projections(module, spec)) for module in mlp.modules()]
    return [one for one in inside if one[2] is not None and not is_experts(one[1])]


def itself_and_copies(one: nn.Module) -> list[nn.Module]:
    """A module, or the original and the copies where `modules_to_save` wraps it."""
    kind = _own_kind(one)
    return [module for module in one.modules() if type(module) is kind]


def _alike(decoder: nn.Module, one: nn.Module) -> list[Any]:
    """All modules of the kind of this one."""
    kind = _own_kind(one)
    return [module for module in decoder.modules() if type(module) is kind]


def _own_kind(one: nn.Module) -> type[nn.Module]:
    """The class of a module, or of what PEFT wraps: for `modules_to_save`, or in an adapter of norms."""
    own = getattr(one, "original_module", one)
    return type(own.get_base_layer() if isinstance(own, BaseTunerLayer) else own)

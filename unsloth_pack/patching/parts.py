"""List the modules of a decoder that a patch swaps, and refuse what would let documents see each other."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from unsloth_pack.errors import InputError
from unsloth_pack.kernels import Gate
from unsloth_pack.layers.decoder import has_fast_decoder
from unsloth_pack.layers.layer import FAST_ACTIVATIONS, GatedProjections, find_gated_projections
from unsloth_pack.layers.mixers import MIXERS, Choice, Mixer
from unsloth_pack.layers.moe import count_gate_features, read_gate, why_experts_not_fused, why_reads_host
from unsloth_pack.lora.expert_stacks import is_expert_adapter, is_experts
from unsloth_pack.lora.linear import is_lora_linear
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import own_names

_KNOWN_CODE = ("transformers.", "peft.", "torch.", "bitsandbytes.", "unsloth_pack.")
_LOOK_AT_ROWS = {  # PEFT's adapters that look at a whole row
    "LILY": "its router averages over the whole row",
    "SHADOW": "its shadow network does not see where documents end",
}
_MODEL_CODE = ("transformers.", "transformers_modules.")  # the latter comes with a model


@dataclass(frozen=True)
class DecoderParts:
    """The modules, before any class is swapped."""

    # each with its kind and how it computes, including copies for `modules_to_save`
    mixers: list[tuple[Mixer, nn.Module, Choice]]
    norms: list[nn.Module]  # those with a weight
    # each with its layer's number, and its projections if it can be fused; including shared experts
    mlps: list[tuple[int, nn.Module, GatedProjections | None]]
    activations: list[nn.Module]  # those of MLPs without a gate that have a kernel
    # stacked experts, each with its layer's number, and its gate if it can be fused
    experts: list[tuple[int, Any, Gate | None]]
    loras: list[Any]  # LoRA layers on linear layers
    expert_loras: list[nn.Module]  # LoRA layers on stacked experts
    other_loras: list[Any]  # those in 8 bits, or on other parameters

    @classmethod
    def from_decoder(cls, decoder: Any, spec: ArchSpec, choices: Sequence[Choice]) -> "DecoderParts":
        """List the parts of a decoder; `choices` are in the order of `mixers_by_layer`."""
        by_layer = mixers_by_layer(decoder, spec)
        modules: list[nn.Module] = list(decoder.modules())
        norm_kind = _own_kind(getattr(decoder, spec.name("norm")))
        mixers = {id(module) for _, module in by_layer}
        places = [(number, getattr(layer, spec.name("mlp"))) for number, layer in enumerate(decoder.layers)]
        mlps = [mlp for number, one in places if id(one) not in mixers for mlp in _mlps(number, one, spec)]
        plain = (module for _, mlp, projections in mlps if projections is None for module in mlp.modules())
        loras = [module for module in modules if isinstance(module, LoraLayer)]
        return cls(
            mixers=[
                (mixer, copy, choice)
                for (mixer, module), choice in zip(by_layer, choices, strict=True)
                for copy in list_copies(module)
            ],
            norms=[module for module in modules if type(module) is norm_kind and hasattr(module, "weight")],
            mlps=mlps,
            activations=[*dict.fromkeys(act for act in plain if type(act) in FAST_ACTIVATIONS)],
            experts=[
                (number, module, read_gate(module))
                for number, layer in enumerate(decoder.layers)
                for module in layer.modules()
                if is_experts(module)
            ],
            loras=[lora for lora in loras if is_lora_linear(lora)],
            expert_loras=[lora for lora in loras if is_expert_adapter(lora)],
            other_loras=[lora for lora in loras if not (is_lora_linear(lora) or is_expert_adapter(lora))],
        )

    def why_experts_not_captured(self) -> str | None:
        """Return why routed experts prevent the capture of steps, or None."""
        unknown = [mlp for _, mlp, named in self.mlps if named is None and hasattr(mlp, "experts")]
        if unknown or any(gate is None or why_experts_not_fused(one) for _, one, gate in self.experts):
            return "routed experts that are not fused depend on the tokens"
        return next(filter(None, (why_reads_host(experts) for _, experts, _ in self.experts)), None)

    def count_gate_features(self, config: PretrainedConfig) -> list[int]:
        """Return the features of gate for a token, in every fused module."""
        in_mlps = [named.count_features(mlp) for _, mlp, named in self.mlps if named is not None]
        chosen: int = getattr(config, "num_experts_per_tok", 1) or 1
        in_experts = [count_gate_features(experts) for _, experts, gate in self.experts if gate is not None]
        return in_mlps + [chosen * features for features in in_experts]


def mixers_by_layer(decoder: Any, spec: ArchSpec) -> list[tuple[Mixer, nn.Module]]:
    """Return the mixers of each layer with their modules; some layers have none."""
    pairs = [
        (MIXERS[name], layer)
        for number, layer in enumerate(decoder.layers)
        for name in spec.mixers_of(decoder.config, number)
    ]
    return [(mixer, getattr(layer, spec.name(mixer.attribute))) for mixer, layer in pairs]


def _mlps(
    number: int, mlp: nn.Module, spec: ArchSpec
) -> list[tuple[int, nn.Module, GatedProjections | None]]:
    """Return the MLP of a layer, or the gated ones beside its routed experts."""
    projections = find_gated_projections(mlp, spec)
    if projections is not None or not any(map(is_experts, mlp.modules())):
        return [(number, mlp, projections)]
    inside = [(number, module, find_gated_projections(module, spec)) for module in mlp.modules()]
    return [one for one in inside if one[2] is not None and not is_experts(one[1])]


def list_copies(one: nn.Module) -> list[nn.Module]:
    """Return a module, or the original and the copies if `modules_to_save` wraps it."""
    kind = _own_kind(one)
    return [module for module in one.modules() if type(module) is kind]


def _own_kind(one: nn.Module) -> type[nn.Module]:
    """Return the class of a module inside PEFT's wrappers for `modules_to_save` or adapters of norms."""
    own = getattr(one, "original_module", one)
    return type(own.get_base_layer() if isinstance(own, BaseTunerLayer) else own)


def refuse_adapters(configs: Mapping[str, PeftConfig]) -> None:
    """Refuse adapters that would mix documents, by their names and PEFT's settings."""
    for name, config in configs.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        why = _LOOK_AT_ROWS.get(kind)
        if getattr(config, "is_prompt_learning", False):
            why = "its virtual tokens shift the documents"
        if getattr(config, "is_adaption_prompt", False):
            why = "it wraps the attention"
        if getattr(config, "alora_invocation_tokens", None):
            why = "PEFT looks for alora_invocation_tokens once a row, not in each document"
        if why is not None:
            raise InputError(f"adapter {name!r} is {kind}: {why}; use LoRA")


def refuse_leaks(model: nn.Module, decoder: PreTrainedModel) -> None:
    """Refuse adapters and options that would mix documents."""
    refuse_adapters(getattr(model, "peft_config", {}))
    bidirectional = getattr(decoder.config, "use_bidirectional_attention", False)
    if bidirectional and bidirectional != "vision":  # of an image's tokens alone
        raise InputError(
            f"use_bidirectional_attention={bidirectional}: only causal attention is patched; set it to False"
        )
    if not getattr(decoder.config, "is_causal", True):
        raise InputError("is_causal=False: only causal attention is patched; set it to True")
    devices = {str(parameter.device) for parameter in decoder.parameters()}
    if len(devices) > 1:
        raise InputError(f"the model lies on {', '.join(sorted(devices))}; load it on one device")


def refuse_own_code(modules: Iterable[nn.Module]) -> None:
    """Refuse a module whose forward the patch would replace without knowing it."""
    for module in modules:
        where = type(module).forward.__module__ or ""
        kinds = [kind.__module__ for kind in type(module).__mro__]
        if not where.startswith(_KNOWN_CODE) and any(kind.startswith(_MODEL_CODE) for kind in kinds):
            raise InputError(
                f"{type(module).__name__} has a forward from {where or 'elsewhere'}, which the patch would "
                "replace; use transformers' own, without trust_remote_code or another library's patch"
            )


def refuse_unknown_parts(mixer: Mixer, mixer_module: nn.Module, spec: ArchSpec) -> None:
    """Refuse a module that may compute more than the shared forward."""
    ours = mixer.attributes(spec, "", Choice("", "", None))
    modules = list_copies(mixer_module)
    refuse_own_code(modules)
    for module in modules:
        if type(module).__module__.startswith("transformers_modules."):  # its helpers may differ too
            raise InputError(
                f"{type(module).__name__} is the model's own code; load it without trust_remote_code"
            )
        if unknown := own_names(module) - mixer.known(spec) - ours.keys():
            raise InputError(
                f"{type(module).__name__} has {', '.join(sorted(unknown))}, of which the ArchSpec of "
                f"{spec.model_type!r} says nothing; update unsloth_pack"
            )
        for name, value in spec.only.items():
            actual = getattr(module, name, getattr(module.config, name, value))
            if actual != value:
                raise InputError(f"{name} is {actual!r}: only {value!r} is computed; set it before you patch")


def refuse_new_adapter(
    original: Callable[..., None], peft_model: PeftModel, *args: object, **kwargs: object
) -> None:
    """Refuse adapters that PEFT puts on a patched model later, in place of two methods of `PeftModel`."""
    arguments = inspect.signature(original).bind(peft_model, *args, **kwargs).arguments
    if has_fast_decoder(arguments.get("model", peft_model)):
        refuse_adapters({arguments.get("adapter_name", "default"): arguments["peft_config"]})
    original(peft_model, *args, **kwargs)

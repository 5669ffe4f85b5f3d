"""Refuse models and adapters that would let documents see each other, before anything is patched."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from unsloth_pack.errors import InputError
from unsloth_pack.layers.decoder import has_fast_decoder
from unsloth_pack.layers.mixers import Choice, Mixer
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import own_names
from unsloth_pack.patching.parts import list_copies

_KNOWN_CODE = ("transformers.", "peft.", "torch.", "bitsandbytes.", "unsloth_pack.")
_LOOK_AT_ROWS = {  # PEFT's adapters that look at a whole row
    "LILY": "its router averages over the whole row",
    "SHADOW": "its shadow network does not see where documents end",
}
_MODEL_CODE = ("transformers.", "transformers_modules.")  # the latter comes with a model


def refuse_adapters(configs: Mapping[str, Any]) -> None:
    """Refuse adapters that would mix documents, by their names and PEFT's settings."""
    for name, config in configs.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        why = _LOOK_AT_ROWS.get(kind)
        if getattr(config, "is_prompt_learning", False):
            why = "its virtual tokens shift the documents"
        if getattr(config, "is_adaption_prompt", False):
            why = "it wraps the attention"
        if why is not None:
            raise InputError(f"adapter {name!r} is {kind}: {why}; use LoRA")
        if getattr(config, "alora_invocation_tokens", None):
            raise InputError(
                f"adapter {name!r} has alora_invocation_tokens: PEFT looks for them once a row, not in each "
                "document; leave them out"
            )


def refuse_leaks(model: Any, decoder: Any) -> None:
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
                f"{type(module).__name__} is code of the model's own, which the patch would replace; load "
                "the model without trust_remote_code"
            )
        if unknown := own_names(module) - mixer.known(spec) - ours.keys():
            raise InputError(
                f"{type(module).__name__} has {', '.join(sorted(unknown))}, of which the ArchSpec of "
                f"{spec.model_type!r} says nothing; update unsloth_pack, or declare it in its models/ folder"
            )
        for name, value in spec.only.items():
            actual = getattr(module, name, getattr(module.config, name, value))
            if actual != value:
                raise InputError(f"{name} is {actual!r}: only {value!r} is computed; set it before you patch")


# Adapters that PEFT puts on a patched model later. They act before a call enters it, and PEFT has no callback
# for them, so two methods of `PeftModel` are replaced: the original first, then its own arguments.


def init_peft_model(
    original: Callable[..., None],
    peft_model: Any,
    model: Any,
    peft_config: Any,
    adapter_name: str = "default",
    *args: Any,
    **kwargs: Any,
) -> None:
    _refuse_if_patched(model, adapter_name, peft_config)
    original(peft_model, model, peft_config, adapter_name, *args, **kwargs)


def add_adapter(
    original: Callable[..., Any],
    peft_model: Any,
    adapter_name: str,
    peft_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _refuse_if_patched(peft_model, adapter_name, peft_config)
    return original(peft_model, adapter_name, peft_config, *args, **kwargs)


def _refuse_if_patched(model: nn.Module, adapter_name: str, peft_config: Any) -> None:
    if has_fast_decoder(model):
        refuse_adapters({adapter_name: peft_config})

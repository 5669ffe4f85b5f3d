"""Accept or refuse the arguments of Unsloth's functions that are neither ours nor transformers' or PEFT's."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from unsloth_pack.errors import InputError
from unsloth_pack.lora.targets import list_default_names

_MEMORY = "get_peft_model takes use_gradient_checkpointing, 'auto' among its values"
_VLLM = "save the model with save_pretrained_merged and serve that with vLLM"
# Of from_pretrained: the values that change nothing, and the remedy for any other
_LOADING: dict[str, tuple[Collection[Any], str]] = {
    "fast_inference": ((False, None), f"this package has no vLLM inside; {_VLLM}"),
    "gpu_memory_utilization": ((), f"it is an option of vLLM; leave it out, or {_VLLM}"),
    "max_lora_rank": ((), "it is an option of vLLM; leave it out, and give r to get_peft_model"),
    "float8_kv_cache": ((False, None), f"it is an option of vLLM; {_VLLM}"),
    "disable_log_stats": ((True, False, None), ""),
    "unsloth_vllm_standby": ((False, None), f"it is an option of vLLM; {_VLLM}"),
    "load_in_16bit": ((True, False, None), ""),  # what comes without another load_in_*
    "fix_tokenizer": ((True, None), "no tokenizer is changed here; leave it out"),
    "use_exact_model_name": ((True, False, None), ""),  # no name is exchanged for another one
    "offload_embedding": ((False, None), f"embeddings stay with the model; {_MEMORY}"),
    "float32_mixed_precision": ((None, False), "give dtype='float32'"),
    "unsloth_tiled_mlp": ((False, None), f"an MLP is not cut into tiles; {_MEMORY}"),
    "unsloth_force_compile": ((False, None), "nothing is compiled; leave it out"),
    "fullgraph": ((True, False, None), ""),  # of a compiler that does not run here
    "auto_model": ((None,), "models of text are loaded; leave it out"),
    "auto_config": ((None,), "models of text are loaded; leave it out"),
    "text_only": ((True, False, None), ""),  # the text model is what trains
    "resize_model_vocab": ((None,), "call model.resize_token_embeddings(n) before get_peft_model"),
    "qat_scheme": ((None,), "training for quantisation is not here; leave it out"),
    "whisper_language": ((None,), "models of sound are not trained; leave it out"),
    "whisper_task": ((None,), "models of sound are not trained; leave it out"),
}
# Of save_pretrained_merged and push_to_hub_merged; None accepts any value
_SAVING: dict[str, tuple[Collection[Any] | None, str]] = {
    "push_to_hub": ((False, None), "call push_to_hub_merged"),
    "token": (None, ""),
    "maximum_memory_usage": (None, ""),  # weights are merged and written one after the other
    "temporary_location": (None, ""),
    "max_shard_size": (("5GB", None), "no file is larger than 5GB; leave it out"),
    "safe_serialization": ((True, None), "weights are saved as safetensors; leave it out"),
    "is_main_process": ((True, None), "call it in the main process alone"),
    "save_peft_format": ((True, None), "leave it out"),
    "variant": ((None,), "files have their usual names; leave it out"),
    "tags": ((None,), "write them into the README.md of the folder; leave it out"),
    "datasets": ((None,), "write them into the README.md of the folder; leave it out"),
    "create_pr": ((False, None), "give revision, or leave it out"),
    "use_temp_dir": (None, ""),
}
_PARTS = ("vision_layers", "language_layers", "attention_modules", "mlp_modules")
_MLP = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}

logger = logging.getLogger("unsloth_pack")


def take_loading_arguments(arguments: dict[str, Any]) -> None:
    """Take Unsloth's own arguments out of those of `from_pretrained`.

    Raises:
        InputError: one asks for something that is not supported; the line has the remedy.
    """
    _take(_LOADING, arguments, "from_pretrained")
    if "use_gradient_checkpointing" in arguments and arguments["use_gradient_checkpointing"] in (
        False,
        None,
        "none",
    ):
        del arguments["use_gradient_checkpointing"]


def take_saving_arguments(arguments: dict[str, Any], method: str) -> None:
    """Take Unsloth's own arguments out of those of a method that saves.

    Raises:
        InputError: one asks for something that is not supported, or is unknown.
    """
    _take(_SAVING, arguments, method)
    if arguments:
        raise InputError(f"{method} does not take {', '.join(sorted(arguments))}; leave it out")


def _take(
    known: Mapping[str, tuple[Collection[Any] | None, str]], arguments: dict[str, Any], taker: str
) -> None:
    for name in [name for name in known if name in arguments]:
        accepted, remedy = known[name]
        value = arguments.pop(name)
        if accepted is not None and (type(value), value) not in [(type(one), one) for one in accepted]:
            raise InputError(f"{name} is {value!r}, which {taker} does not take; {remedy}")


def take_adapter_arguments(model: Any, targets: Any, arguments: dict[str, Any]) -> Any:
    """Take Unsloth's own arguments out of those of `get_peft_model`; return what to adapt.

    `finetune_attention_modules` and `finetune_mlp_modules` choose among the default targets.

    Raises:
        InputError: one asks for something that is not supported.
    """
    if arguments.pop("qat_scheme", None) is not None:
        raise InputError("qat_scheme is given, but training for quantisation is not here; leave it out")
    arguments.pop("temporary_location", None)
    wishes = {part: arguments.pop(f"finetune_{part}", None) for part in _PARTS}
    for part, wish in wishes.items():
        if wish not in (None, True, False):
            raise InputError(f"finetune_{part} is {wish!r}; give True or False")
    if wishes["vision_layers"] and model.base_model is not model.get_decoder():
        raise InputError(
            "finetune_vision_layers=True, but rows of text never reach the vision layers; give False"
        )
    if wishes["language_layers"] is False:
        raise InputError("finetune_language_layers=False leaves nothing to train on text; leave it out")
    return _choose_targets(model, targets, wishes)


def take_trained_ends(model: Any, targets: Any, modules_to_save: Any) -> tuple[Any, Any]:
    """Move the head, and embeddings named beside it, from targets to `modules_to_save`.

    Unsloth means this by such targets, for continued pretraining, and TRL's trainers refuse an adapter on the
    head. Embeddings named without the head get an adapter.
    """
    if isinstance(targets, str) or not isinstance(targets, Collection):
        return targets, modules_to_save
    parts = {id(module): path.rpartition(".")[2] for path, module in model.named_modules()}
    head, embeddings = (
        parts.get(id(end)) for end in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    if head is None or head not in targets or not isinstance(modules_to_save, list | tuple | None):
        return targets, modules_to_save
    ends = [name for name in targets if name in (head, embeddings)]
    logger.warning("target_modules names %s: trained in full, as in modules_to_save", " and ".join(ends))
    saved = [*dict.fromkeys([*(modules_to_save or ()), *ends])]
    return [name for name in targets if name not in ends], saved


def _choose_targets(model: Any, targets: Any, wishes: Mapping[str, bool | None]) -> Any:
    attention, mlp = (wishes[part] is not False for part in ("attention_modules", "mlp_modules"))
    if attention and mlp:
        return targets
    if not attention and not mlp:
        raise InputError(
            "finetune_attention_modules and finetune_mlp_modules are both False; leave one of them out"
        )
    if targets is not None:
        part = "mlp" if attention else "attention"
        raise InputError(f"finetune_{part}_modules=False chooses among defaults; leave target_modules out")
    return [name for name in list_default_names(model) if (name in _MLP) is mlp]

"""Unsloth's further arguments, accepted or refused, and its methods that save a loaded model."""

import logging
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
from huggingface_hub.errors import HFValidationError, HTTPError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unsloth_pack.checkpoints import saving
from unsloth_pack.checkpoints.saving import SaveMethod, check_save_method
from unsloth_pack.errors import InputError, first_line
from unsloth_pack.lora.targets import list_default_names

# For each argument the values that change nothing (None: any), and the remedy for any other
Arguments = Mapping[str, tuple[Collection[object] | None, str]]

_MEMORY = "get_peft_model takes use_gradient_checkpointing, 'auto' among its values"
_VLLM = "save the model with save_pretrained_merged and serve that with vLLM"
_README = "write them into the README.md of the folder; leave it out"
_LOADING: Arguments = {
    "fast_inference": ((False, None), f"this package has no vLLM inside; {_VLLM}"),
    "gpu_memory_utilization": ((), f"it is an option of vLLM; leave it out, or {_VLLM}"),
    "max_lora_rank": ((), "it is an option of vLLM; leave it out, and give r to get_peft_model"),
    "float8_kv_cache": ((False, None), f"it is an option of vLLM; {_VLLM}"),
    "disable_log_stats": (None, ""),
    "unsloth_vllm_standby": ((False, None), f"it is an option of vLLM; {_VLLM}"),
    "load_in_16bit": (None, ""),  # what comes without another load_in_*
    "fix_tokenizer": ((True, None), "no tokenizer is changed here; leave it out"),
    "use_exact_model_name": (None, ""),  # no name is exchanged for another one
    "offload_embedding": ((False, None), f"embeddings stay with the model; {_MEMORY}"),
    "float32_mixed_precision": ((None, False), "give dtype='float32'"),
    "unsloth_tiled_mlp": ((False, None), f"an MLP is not cut into tiles; {_MEMORY}"),
    "unsloth_force_compile": ((False, None), "nothing is compiled; leave it out"),
    "fullgraph": (None, ""),  # of a compiler that does not run here
    "auto_model": ((None,), "models of text are loaded; leave it out"),
    "auto_config": ((None,), "models of text are loaded; leave it out"),
    "text_only": (None, ""),  # the text model is what trains
    "resize_model_vocab": ((None,), "call model.resize_token_embeddings(n) before get_peft_model"),
    "qat_scheme": ((None,), "training for quantisation is not here; leave it out"),
    "use_gradient_checkpointing": ((False, None, "none"), "give it to get_peft_model"),
    "whisper_language": ((None,), "models of sound are not trained; leave it out"),
    "whisper_task": ((None,), "models of sound are not trained; leave it out"),
}
_SAVING: Arguments = {
    "push_to_hub": ((False, None), "call push_to_hub_merged"),
    "token": (None, ""),
    "maximum_memory_usage": (None, ""),  # weights are merged and written one after the other
    "temporary_location": (None, ""),
    "max_shard_size": (("5GB", None), "no file is larger than 5GB; leave it out"),
    "safe_serialization": ((True, None), "weights are saved as safetensors; leave it out"),
    "is_main_process": ((True, None), "call it in the main process alone"),
    "save_peft_format": ((True, None), "leave it out"),
    "variant": ((None,), "files have their usual names; leave it out"),
    "tags": ((None,), _README),
    "datasets": ((None,), _README),
    "create_pr": ((False, None), "give revision, or leave it out"),
    "use_temp_dir": (None, ""),
}
_ADAPTING: Arguments = {
    "qat_scheme": ((None,), "training for quantisation is not here; leave it out"),
    "temporary_location": (None, ""),
}
_COLLATING: Arguments = {
    "resize": ((None,), "give max_pixels to FastVisionModel.from_pretrained; nothing else is resized"),
    "resize_dimension": ((None, 0), "give max_pixels to FastVisionModel.from_pretrained"),
    "snap_to_patch_size": ((None, False), "the processor chooses sizes that patches fill; leave it out"),
    "ignore_index": ((-100,), "labels that do not count are -100; leave it out"),
    "force_match": (None, ""),
    "num_proc": ((None,), "give dataloader_num_workers to the trainer"),
    "completion_only_loss": ((True, None), "write the rows as messages, in which all turns count"),
    "pad_to_multiple_of": ((None,), "a packed row has no padding; leave it out"),
    "last_response_only": ((False, None), "every answer counts; leave it out"),
}
_PARTS = ("vision_layers", "language_layers", "attention_modules", "mlp_modules")
_MLP = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}

logger = logging.getLogger("unsloth_pack")


def _take(known: Arguments, arguments: dict[str, object], taker: str) -> None:
    """Remove known arguments; InputError if one asks for something that is not supported."""
    for name in known.keys() & arguments.keys():
        accepted, remedy = known[name]
        value = arguments.pop(name)
        if accepted is not None and (type(value), value) not in [(type(one), one) for one in accepted]:
            raise InputError(f"{name} is {value!r}, which {taker} does not take; {remedy}")


def take_loading_arguments(arguments: dict[str, object]) -> None:
    """Take Unsloth's own arguments out of those of `from_pretrained`.

    Raises:
        InputError: one asks for something that is not supported; the line has the remedy.
    """
    _take(_LOADING, arguments, "from_pretrained")


def take_collator_arguments(arguments: dict[str, object]) -> None:
    """Accept Unsloth's own arguments of the vision collator.

    Raises:
        InputError: one asks for something that is not supported, or is unknown.
    """
    _take(_COLLATING, arguments, "VisionDataCollator")
    for name, value in arguments.items():
        raise InputError(f"VisionDataCollator does not know {name}={value!r}; correct the name")


def _take_saving_arguments(arguments: dict[str, object], method: str) -> None:
    _take(_SAVING, arguments, method)
    if arguments:
        raise InputError(f"{method} does not take {', '.join(sorted(arguments))}; leave it out")


def take_adapter_arguments(model: PreTrainedModel, targets: object, arguments: dict[str, object]) -> Any:
    """Take Unsloth's own arguments out of those of `get_peft_model`; return what to adapt.

    `finetune_attention_modules` and `finetune_mlp_modules` choose among the default targets.

    Raises:
        InputError: one asks for something that is not supported.
    """
    _take(_ADAPTING, arguments, "get_peft_model")
    wishes = {part: arguments.pop(f"finetune_{part}", None) for part in _PARTS}
    for part, wish in wishes.items():
        if wish not in (None, True, False):
            raise InputError(f"finetune_{part} is {wish!r}; give True or False")
    if wishes["vision_layers"] and model.base_model is not model.get_decoder():
        raise InputError("finetune_vision_layers=True, but text never reaches vision layers; give False")
    if wishes["language_layers"] is False:
        raise InputError("finetune_language_layers=False leaves nothing to train on text; leave it out")
    attention, mlp = (wishes[part] is not False for part in ("attention_modules", "mlp_modules"))
    if attention and mlp:
        return targets
    if not attention and not mlp:
        problem = "finetune_attention_modules and finetune_mlp_modules are both False"
        raise InputError(f"{problem}; leave one of them out")
    if targets is not None:
        part = "mlp" if attention else "attention"
        raise InputError(f"finetune_{part}_modules=False chooses among defaults; leave target_modules out")
    return [name for name in list_default_names(model) if (name in _MLP) is mlp]


def take_trained_ends(model: PreTrainedModel, targets: object, modules_to_save: object) -> tuple[Any, Any]:
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


def save_pretrained_merged(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    save_method: SaveMethod = "merged_16bit",
    state_dict: dict[str, Tensor] | None = None,
    **others: object,
) -> None:
    """Save a model for use without this package, or its adapter alone.

    Args:
        save_directory, tokenizer, save_method, state_dict: as in
            `unsloth_pack.checkpoints.saving.save_pretrained_merged`. `save_method` is "merged_16bit", or
            "lora" for the adapter alone.
        others: Unsloth's further arguments; those that would change the result are refused.

    Raises:
        InputError: as that function; a further argument asks for something that is not supported.
    """
    _take_saving_arguments(others, "save_pretrained_merged")
    saving.save_pretrained_merged(model, save_directory, tokenizer, save_method, state_dict)


def push_to_hub_merged(
    model: nn.Module,
    repo_id: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    save_method: SaveMethod = "merged_16bit",
    token: str | bool | None = None,
    private: bool | None = None,
    commit_message: str = "Upload a model",
    revision: str | None = None,
    **others: object,
) -> str:
    """Merge as `save_pretrained_merged` does, and upload the result to the Hugging Face hub.

    The repository is created first, so that a wrong name or token costs no time.

    Args:
        repo_id: "name/model" on the hub.
        tokenizer, save_method, others: as in `save_pretrained_merged`.
        token, private, commit_message, revision: as in huggingface_hub.

    Returns:
        The address of the repository.

    Raises:
        InputError: the hub cannot be reached or refuses; or as `save_pretrained_merged`.
    """
    _take_saving_arguments(others, "push_to_hub_merged")
    check_save_method(model, save_method)
    hub = huggingface_hub.HfApi(token=token)
    try:
        repository = hub.create_repo(repo_id, private=private, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            saving.save_pretrained_merged(model, Path(folder, "model"), tokenizer, save_method)
            hub.upload_folder(
                repo_id=repository.repo_id,
                folder_path=Path(folder, "model"),
                commit_message=commit_message,
                revision=revision,
            )
    except (HTTPError, HFValidationError, OSError) as error:
        raise InputError(
            f"cannot push to {repo_id!r}: {first_line(error) or type(error).__name__}; check the name, the "
            "token and the network, or save it with save_pretrained_merged and give the folder to `hf upload`"
        ) from error
    return str(repository)


def refuse_gguf(model: nn.Module, *args: object, **kwargs: object) -> NoReturn:
    """Refuse `save_pretrained_gguf` and `push_to_hub_gguf`, with the way to a GGUF file.

    Raises:
        InputError: always.
    """
    raise InputError(
        "no GGUF files are written here; call model.save_pretrained_merged('merged', tokenizer), then run "
        "llama.cpp's `python convert_hf_to_gguf.py merged`, and `llama-quantize` on its file"
    )

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

# For each argument the values that change nothing; None: any
Arguments = Mapping[str, tuple[object, ...] | None]

_OFF, _UNSET = (False, None), (None,)
_VLLM = "save the model with save_pretrained_merged and serve that with vLLM"
_SIZES = "give max_pixels to FastVisionModel.from_pretrained"
# In place of an argument; for others the remedy is to leave them out
_REMEDIES = {
    **dict.fromkeys(("fast_inference", "float8_kv_cache", "unsloth_vllm_standby"), _VLLM),
    **dict.fromkeys(("gpu_memory_utilization", "max_lora_rank"), f"leave it out: {_VLLM}"),
    "float32_mixed_precision": "give dtype='float32'",
    "resize_model_vocab": "call model.resize_token_embeddings(n) before get_peft_model",
    "use_gradient_checkpointing": "give it to get_peft_model",
    "push_to_hub": "call push_to_hub_merged",
    "is_main_process": "call it in the main process alone",
    "resize": _SIZES,
    "resize_dimension": _SIZES,
    "num_proc": "give dataloader_num_workers to the trainer",
    "completion_only_loss": "write the rows as messages, in which all turns count",
}
LOADING: Arguments = {
    **dict.fromkeys(("gpu_memory_utilization", "max_lora_rank"), ()),
    **dict.fromkeys(("fast_inference", "float8_kv_cache", "unsloth_vllm_standby"), _OFF),
    **dict.fromkeys(("offload_embedding", "float32_mixed_precision"), _OFF),
    **dict.fromkeys(("unsloth_tiled_mlp", "unsloth_force_compile"), _OFF),
    **dict.fromkeys(("auto_model", "auto_config", "resize_model_vocab", "qat_scheme"), _UNSET),
    **dict.fromkeys(("whisper_language", "whisper_task"), _UNSET),
    **dict.fromkeys(("disable_log_stats", "use_exact_model_name", "fullgraph", "text_only"), None),
    "load_in_16bit": None,  # as without another load_in_*
    "fix_tokenizer": (True, None),
    "use_gradient_checkpointing": (*_OFF, "none"),
}
_SAVING: Arguments = {
    **dict.fromkeys(("token", "maximum_memory_usage", "temporary_location", "use_temp_dir"), None),
    **dict.fromkeys(("push_to_hub", "create_pr"), _OFF),
    **dict.fromkeys(("variant", "tags", "datasets"), _UNSET),
    **dict.fromkeys(("safe_serialization", "is_main_process", "save_peft_format"), (True, None)),
    "max_shard_size": ("5GB", None),  # no file is larger
}
_ADAPTING: Arguments = {"qat_scheme": _UNSET, "temporary_location": None}
COLLATING: Arguments = {
    **dict.fromkeys(("resize", "num_proc", "pad_to_multiple_of"), _UNSET),
    **dict.fromkeys(("snap_to_patch_size", "last_response_only"), _OFF),
    "resize_dimension": (None, 0),
    "ignore_index": (-100,),
    "force_match": None,
    "completion_only_loss": (True, None),
}
_PARTS = ("vision_layers", "language_layers", "attention_modules", "mlp_modules")
_MLP = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}

logger = logging.getLogger("unsloth_pack")


def take(known: Arguments, arguments: dict[str, object], taker: str, is_all: bool = True) -> None:
    """Remove Unsloth's own arguments, and refuse others, unless they may be somebody else's.

    Raises:
        InputError: one asks for something that is not supported, or is unknown.
    """
    for name in known.keys() & arguments.keys():
        accepted, value = known[name], arguments.pop(name)
        if accepted is not None and (type(value), value) not in [(type(one), one) for one in accepted]:
            remedy = _REMEDIES.get(name, "leave it out")
            raise InputError(f"{name} is {value!r}, which {taker} does not take; {remedy}")
    if arguments and is_all:
        raise InputError(f"{taker} does not take {', '.join(sorted(arguments))}; leave it out")


def take_adapter_arguments(model: PreTrainedModel, targets: object, arguments: dict[str, object]) -> Any:
    """Take Unsloth's own arguments out of those of `get_peft_model`; return what to adapt.

    `finetune_attention_modules` and `finetune_mlp_modules` choose among the default targets.
    """
    take(_ADAPTING, arguments, "get_peft_model", is_all=False)
    wishes = {part: arguments.pop(f"finetune_{part}", None) for part in _PARTS}
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
            `unsloth_pack.checkpoints.saving.save_pretrained_merged`. `save_method` is "merged_16bit",
            "lora" for the adapter alone, or "lora_vllm" for the adapter as vLLM reads it.
        others: Unsloth's further arguments; those that would change the result are refused.

    Raises:
        InputError: as that function; a further argument asks for something that is not supported.
    """
    take(_SAVING, others, "save_pretrained_merged")
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
    take(_SAVING, others, "push_to_hub_merged")
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
    """Refuse `save_pretrained_gguf` and `push_to_hub_gguf`: raise InputError, with the way to a GGUF file."""
    raise InputError(
        "a GGUF file is made of a folder; save model and tokenizer with save_pretrained('adapter'), then run "
        "`unsloth-pack export adapter --to gguf --prompts FILE`"
    )

"""Saving a trained model, whole or not at all: the adapter alone, or merged into 16-bit weights."""

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from unsloth_pack.demo import MODEL_DIR
from unsloth_pack.errors import InputError
from unsloth_pack.files.merging import has_adapter, merged_state_dict
from unsloth_pack.files.whole_folders import write_whole

SaveMethod = Literal["merged_16bit", "lora"]


def save_pretrained_merged(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: Any = None,
    save_method: SaveMethod = "merged_16bit",
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Save a model for use without this package, or its adapter alone.

    Args:
        model: a model from `FastLanguageModel`, with or without an adapter.
        save_directory: a folder. Files are written beside it and moved in at the end, where they replace
            files of the same names.
        tokenizer: saved beside the model when given.
        save_method: "merged_16bit" merges the active adapters of any type into the (dequantised) base weights
            in float32 and saves them in the model's 16-bit type, bfloat16 if it has none. Adapters that
            PEFT's `merge_adapter` has merged are saved as they were merged. "lora" saves the adapter as PEFT
            does.
        state_dict: the weights for "lora" to save, where the model holds only shards of them.

    Raises:
        InputError: an unknown `save_method`; "lora" without an adapter; an adapter that is disabled, or that
            no weights of a model without adapters can equal; a merged weight that is not finite.
    """
    if save_method not in ("merged_16bit", "lora"):
        raise InputError(f"save_method is {save_method!r}; choose 'merged_16bit' or 'lora'")
    adapted = model if isinstance(model, PeftModel) and save_method == "lora" else None
    if save_method == "lora" and adapted is None and has_adapter(model):
        raise InputError(
            "save_method is 'lora', but FastLanguageModel did not put the adapter on; save it with PEFT's "
            "save_pretrained"
        )
    if save_method == "lora" and adapted is None:
        raise InputError("save_method is 'lora' but the model has no adapter; use 'merged_16bit'")

    if not str(save_directory).strip():
        raise InputError(f"save_directory is {save_directory!r}; give a folder")

    with write_whole(Path(save_directory)) as folder:
        if adapted is not None:
            adapted.save_pretrained(str(folder), state_dict=state_dict)
        else:
            _write_merged(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def save_demo_adapter(model: PeftModel, save_directory: str | Path, **options: Any) -> None:
    """PEFT's `save_pretrained`, kept from asking the hub for the vocabulary of a base model named "demo"."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if not any(isinstance(end, LoraLayer) for end in ends):
        has_grown = model.config.vocab_size != AutoConfig.from_pretrained(MODEL_DIR).vocab_size
        options.setdefault("save_embedding_layers", has_grown)
    PeftModel.save_pretrained(model, str(save_directory), **options)


def _write_merged(model: nn.Module, folder: Path) -> None:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    dtype = base.dtype if base.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    weights = merged_state_dict(model, dtype)
    config = copy.deepcopy(base.config)
    config.__dict__.pop("quantization_config", None)
    config._name_or_path, config.dtype, config.architectures = "", dtype, [type(base).__name__]
    if config.tie_word_embeddings:
        tied = base._tied_weights_keys or {}
        config.tie_word_embeddings = all(
            torch.equal(weights[one], weights[other]) for one, other in tied.items()
        )
        if config.tie_word_embeddings:
            weights = {name: weight for name, weight in weights.items() if name not in tied}
    as_on_the_hub = revert_weight_conversion(base, weights)  # takes stacked experts apart, as views
    save_torch_state_dict({name: weight.clone() for name, weight in as_on_the_hub.items()}, folder)
    config.save_pretrained(folder)
    if base.generation_config is not None:
        base.generation_config.save_pretrained(folder)

"""Saving a trained model, whole or not at all: the adapter alone, or merged into 16-bit weights."""

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub import ModelCard, split_torch_state_dict_into_shards
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import GENERATION_CONFIG_NAME

from unsloth_pack.checkpoints.atomic import atomic_dir
from unsloth_pack.checkpoints.loading import trained_tokens
from unsloth_pack.checkpoints.merging import (
    are_equal_merged,
    expected_weights,
    merged_weights,
)
from unsloth_pack.checkpoints.names import (
    ADAPTER_CONFIG,
    CARD,
    MODEL_CONFIG,
    SAVED_BY,
    layer_of,
    replaced_by_a_model,
    replaced_by_an_adapter,
)
from unsloth_pack.checkpoints.vllm_adapter import save_vllm_adapter
from unsloth_pack.errors import InputError
from unsloth_pack.modules import base_of

_INDEX = "model.safetensors.index.json"
SHARD = "2GB"  # the largest file


def write_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    expected: Mapping[str, Tensor],
    about: Mapping[str, str],
) -> None:
    """Write weights, which come in any order, into one safetensors file, or into several and an index.

    A file is written once all of its weights have come, so that few are held at a time. `expected` are meta
    tensors of the same names, shapes and types. `about` goes into the header of the one file, or the index.
    """
    from datasets.utils import tqdm

    plan = split_torch_state_dict_into_shards(
        dict(expected), filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD
    )
    header = {"format": "pt", **({} if plan.is_sharded else about)}
    waiting: dict[str, dict[str, Tensor]] = {file: {} for file in plan.filename_to_tensors}
    with tqdm(total=len(expected), desc="Saving", unit=" weights") as bar:
        for name, weight in weights:
            file = plan.tensor_to_filename[name]
            waiting[file][name] = weight.contiguous()
            del weight
            if len(waiting[file]) == len(plan.filename_to_tensors[file]):
                save_file(waiting.pop(file), folder / file, header)
            bar.update()
    if plan.is_sharded:
        index = {"metadata": {**plan.metadata, **about}, "weight_map": plan.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


SaveMethod = Literal["merged_16bit", "lora", "lora_vllm"]
_USE_CACHE = "use_cache_as_loaded"  # attributes of the base model
_VOCABULARY = "vocabulary_as_loaded"


def save_pretrained_merged(
    model: nn.Module,
    save_directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    save_method: SaveMethod = "merged_16bit",
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Save a model for use without this package, or its adapter alone.

    Args:
        model: a model from `FastLanguageModel`, with or without an adapter.
        save_directory: a folder. Files are written aside and moved in at the end, as `atomic_dir` says.
            Files of an earlier save that would change what is loaded are removed: weights, an adapter, and,
            if a tokenizer is given, an earlier tokenizer. All other files stay, a README.md too.
        tokenizer: saved beside the model when given.
        save_method: "merged_16bit" merges the active adapters of any type into the (dequantised) base weights
            in float32 and saves them in the model's 16-bit type, bfloat16 if it has none. Adapters that
            PEFT's `merge_adapter` has merged are saved as they were merged. "lora" saves the adapter as PEFT
            does, "lora_vllm" as vLLM and SGLang serve it: an adapter on experts by the layers of each expert.
        state_dict: the weights for "lora" to save, where the model holds only shards of them.

    Raises:
        InputError: an unknown `save_method`; no adapter to save; an adapter that is disabled or cannot be
            merged, or that vLLM cannot serve; a merged weight that is not finite; a folder that cannot be
            written to, or that holds the base model of the adapter, a model that this function has not
            saved, or the adapter of a run.
    """
    check_save_method(model, save_method)
    if not str(save_directory).strip():
        raise InputError(f"save_directory is {save_directory!r}; give a folder")
    target, with_tokenizer = Path(save_directory), tokenizer is not None
    base = str(base_of(model).name_or_path)
    if isinstance(model, PeftModel) and target.is_dir() and os.path.isdir(base) and target.samefile(base):
        raise InputError(f"{str(target)!r} holds the base model of the adapter; give another folder")
    if save_method != "merged_16bit":
        last, replaces = ADAPTER_CONFIG, replaced_by_an_adapter(target, with_tokenizer)
    else:
        last, replaces = MODEL_CONFIG, replaced_by_a_model(target, with_tokenizer)
    with atomic_dir(target, last=[last], replaces=replaces) as folder:
        if save_method == "lora":
            assert isinstance(model, PeftModel)
            model.save_pretrained(str(folder), state_dict=state_dict)
            if os.path.lexists(target / CARD):
                (folder / CARD).unlink(missing_ok=True)
        elif save_method == "lora_vllm":
            assert isinstance(model, PeftModel)
            save_vllm_adapter(model, folder)
        else:
            dtype = base_of(model).dtype
            is_of_16_bits = dtype in (torch.bfloat16, torch.float16)
            _write_merged(model, folder, dtype if is_of_16_bits else torch.bfloat16)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def check_save_method(model: nn.Module, save_method: str) -> None:
    """Refuse a `save_method` that does not exist, or that a model has no adapter for."""
    if save_method not in get_args(SaveMethod):
        raise InputError(f"save_method is {save_method!r}; choose one of {', '.join(get_args(SaveMethod))}")
    if save_method != "merged_16bit" and not isinstance(model, PeftModel):
        raise InputError(f"save_method is {save_method!r} but the model has no adapter; use 'merged_16bit'")


def save_in_own_dtype(
    model: nn.Module,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    dtype: torch.dtype | None = None,
) -> None:
    """Save a whole model, adapters merged, in `dtype` or the type that its weights have, and its tokenizer.

    A run saves so what it trained in full, and what it merges before it begins.
    """
    with atomic_dir(folder, last=[MODEL_CONFIG], replaces=replaced_by_a_model(folder, True)) as aside:
        _write_merged(model, aside, dtype or base_of(model).dtype)
        tokenizer.save_pretrained(aside)


def save_adapter(model: PeftModel, save_directory: str | Path, **options: Any) -> None:
    """PEFT's `save_pretrained`, which saves whole embeddings only if they have grown by rows of no adapter.

    The configuration of a classifier is saved too: the names of its classes are there.

    PEFT would ask the hub how large the vocabulary of the base model is.
    """
    base: PreTrainedModel = base_of(model)
    before, now = base.__dict__.get(_VOCABULARY), base.config.get_text_config().vocab_size
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if before is not None and not any(isinstance(end, LoraLayer) for end in ends):
        is_in_adapter = {*range(before, now)} <= {*trained_tokens(model.active_peft_config)}
        options.setdefault("save_embedding_layers", not is_in_adapter)
    PeftModel.save_pretrained(model, str(save_directory), **options)
    if options.get("is_main_process", True):
        if isinstance(base, GenericForSequenceClassification):  # PEFT saves no names of classes
            config = copy.deepcopy(base.config)
            config.architectures = [type(base).__name__]
            config.save_pretrained(save_directory)
        _correct_card(Path(save_directory, CARD), hasattr(base.config, "vision_config"))


def _correct_card(path: Path, takes_images: bool) -> None:
    """Correct the task of a model that takes images, and leave out a base in a folder: the hub refuses it."""
    card = ModelCard.load(path)
    if takes_images and card.data.pipeline_tag == "text-generation":
        card.data.pipeline_tag = "image-text-to-text"
    if os.path.isabs(str(card.data.base_model)):
        card.data.base_model = None
        card.data.tags = [tag for tag in card.data.tags or () if not tag.startswith("base_model:")]
    card.save(path)


def remember_vocabulary(base: PreTrainedModel) -> None:
    """Note how many tokens a model has as it is loaded, before some are added."""
    base.__dict__[_VOCABULARY] = base.config.get_text_config().vocab_size


def _write_merged(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    base = base_of(model)
    config = copy.deepcopy(base.config)
    config.__dict__.pop("quantization_config", None)
    if _USE_CACHE in base.__dict__:
        config.__dict__.pop("use_cache", None)
        if (was := base.__dict__[_USE_CACHE]) is not None:
            config.use_cache = was
    config._name_or_path, config.dtype, config.architectures = "", dtype, [type(base).__name__]
    tied = (base._tied_weights_keys or {}) if config.tie_word_embeddings else {}
    if tied:
        config.tie_word_embeddings = all(
            are_equal_merged(model, one, other, dtype) for one, other in tied.items()
        )
    left_out = tied.keys() if config.tie_word_embeddings else set()
    expected = {name: w for name, w in expected_weights(base, dtype).items() if name not in left_out}
    merged = (pair for pair in merged_weights(model, dtype) if pair[0] in expected)
    convert = partial(revert_weight_conversion, base)  # to the names that the hub's files have
    converted = convert(expected)
    by_layer = _convert_by(layer_of, expected.items(), convert)
    group_of = layer_of if _shapes(by_layer) == _shapes(converted.items()) else lambda name: ""
    write_weights(folder, _convert_by(group_of, merged, convert), converted, SAVED_BY)
    config.save_pretrained(folder)
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


def _convert_by(
    group_of: Callable[[str], str],
    weights: Iterable[tuple[str, Tensor]],
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Convert neighbours of one group together: what is taken apart or joined lies in one layer."""
    for _, group in groupby(weights, key=lambda pair: group_of(pair[0])):
        yield from convert(dict(group)).items()


def _shapes(weights: Iterable[tuple[str, Tensor]]) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights}


def remember_use_cache(base: nn.Module) -> None:
    """Note what the configuration of a loaded model says of its cache: a trainer turns it off for good."""
    config: Any = base.config
    base.__dict__.setdefault(_USE_CACHE, config.__dict__.get("use_cache"))

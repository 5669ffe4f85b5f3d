"""The model of a run: loaded, with new tokens, with an adapter or without, and with the parts that train."""

from typing import Any

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.checkpoints.new_tokens import add_to_model, rows_to_train
from unsloth_pack.config import TrainOptions, flat
from unsloth_pack.errors import InputError, about
from unsloth_pack.memory.checkpointing import enable_checkpointing
from unsloth_pack.modules.walk import train_only
from unsloth_pack.recipe.image_parts import freeze_parts, with_parts
from unsloth_pack.recipe.merged_base import load_merged_base
from unsloth_pack.recipe.what_trains import adapter_arguments


def load_run_model(options: TrainOptions, new_tokens: dict[int, list[int]], has_images: bool = False) -> Any:
    """The model, ready to train.

    Args:
        new_tokens: by the id of each, the ids of its description, see `add_to_tokenizer`.
        has_images: whether rows have images, so that the tower and the aligner may train.

    Raises:
        InputError: the model cannot be loaded, or not train as the options say.
    """
    adapter, checkpointing = options.adapter, options.training.use_gradient_checkpointing
    is_full, goes_on = adapter.tuning == "full", adapter.init_adapter and not adapter.merge_init_adapter
    loading = {**flat(options.model), "full_finetuning": is_full, "random_state": adapter.random_state}
    if goes_on:
        loading["model_name"] = adapter.init_adapter
    with about("model_name", "init_adapter"):
        if adapter.merge_init_adapter:
            del loading["model_name"]
            model = load_merged_base(options, **loading)
        else:
            model, _ = FastLanguageModel.from_pretrained(**loading)
    if new_tokens:
        add_to_model(model, new_tokens)
    if is_full:
        train_only(model, adapter.train_modules, adapter.freeze_modules)
    if has_images and (is_full or goes_on):
        freeze_parts(model, options.images, adapter.init_adapter if goes_on else None)
    if is_full or goes_on:
        enable_checkpointing(model, checkpointing)
        return model.train()
    arguments = adapter_arguments(model, adapter)
    if has_images:
        arguments = with_parts(model, arguments, options.images)
    if new_tokens:
        arguments["trainable_token_indices"] = _with_new_tokens(model, arguments, [*new_tokens])
    arguments["adapter_on_head"] = True
    return FastLanguageModel.get_peft_model(model, **arguments, use_gradient_checkpointing=checkpointing)


def _with_new_tokens(model: Any, arguments: dict[str, Any], ids: list[int]) -> Any:
    """The rows that train, those of new tokens and those that were asked for."""
    rows = rows_to_train(model, ids)
    asked = arguments.get("trainable_token_indices") or []
    if isinstance(rows, list):
        return [*asked, *rows]
    embedding = next(iter(rows))
    for name in arguments["modules_to_save"] or ():
        if name.rpartition(".")[2] in rows:
            raise InputError(
                f"add_tokens trains rows of {name}, which modules_to_save or train_modules trains as a "
                "whole; leave one of them out",
                about=("add_tokens", "modules_to_save", "train_modules"),
            )
    return {name: [*(asked if name == embedding else []), *of_name] for name, of_name in rows.items()}

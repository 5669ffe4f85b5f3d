"""The model of a run: loaded, with new tokens, with an adapter or without, and with the parts that train."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.checkpoints.atomic import put_in_place, remove_folder
from unsloth_pack.checkpoints.loading import weight_dtype
from unsloth_pack.checkpoints.names import MERGED_BASE, MODEL_CONFIG
from unsloth_pack.checkpoints.new_tokens import add_to_model, rows_to_train
from unsloth_pack.checkpoints.saving import save_in_own_dtype
from unsloth_pack.config import TrainOptions, flat
from unsloth_pack.errors import InputError, about
from unsloth_pack.images.processor import pick_processor
from unsloth_pack.memory.checkpointing import enable_checkpointing
from unsloth_pack.modules import train_only
from unsloth_pack.run.from_adapter import held_by_run
from unsloth_pack.run.machine import is_main_process, wait_for_all
from unsloth_pack.run.parameters import freeze_parts, with_parts
from unsloth_pack.run.trained import adapter_arguments
from unsloth_pack.training.checkpoints import last_checkpoint

# The base model of a run that trains on top of another's adapter: its base with that adapter merged.
#
# output_dir/
#   .base/   while the run may still be refused
#   base/    from then on

_ASIDE = f".{MERGED_BASE}"


def load_merged_base(options: TrainOptions, **loading: Any) -> Any:
    """The base model with `init_adapter` merged into it, which the main process makes.

    The adapter makes up for what its base lost in 4 bits, 8 bits or fp8. So it is merged into the weights
    that it was trained on, which are saved in the type of this run and then loaded as this run asks.

    Args:
        loading: options of `FastLanguageModel.from_pretrained`, but for the name.

    Raises:
        InputError: the adapter cannot be loaded or merged.
        RunStopped: another process has ended.
    """
    folder = options.folder / MERGED_BASE
    aside = folder if _is_resumed(options) else options.folder / _ASIDE
    if is_main_process() and not (aside / MODEL_CONFIG).is_file():
        _merge(options, aside)
    wait_for_all()
    model, _ = FastLanguageModel.from_pretrained(str(aside), **loading)
    wait_for_all()  # a process that refuses the run next removes what the others would still read
    model.name_or_path = model.config._name_or_path = str(
        folder.absolute()
    )  # the base that the adapter names
    return model


def _merge(options: TrainOptions, aside: Path) -> None:
    first = str(options.adapter.init_adapter)
    held = {**flat(options.model), **held_by_run(Path(first))}
    model, tokenizer = FastLanguageModel.from_pretrained(**held | {"model_name": first, "max_seq_length": 1})
    dtype = weight_dtype(options.model.dtype, options.adapter.tuning == "full")
    save_in_own_dtype(model, aside, pick_processor(model, first, tokenizer), dtype)
    del model
    gc.collect()  # a model refers to itself; the next one is to have its memory
    torch.cuda.empty_cache()


@contextmanager
def removed_if_refused(options: TrainOptions) -> Iterator[None]:
    """An error inside this context, in any process, removes the base model that was merged for the run.

    Raises:
        RunStopped: another process has ended.
    """
    aside = options.folder / _ASIDE
    if is_main_process():
        remove_folder(aside)  # left by a process that was killed
    try:
        yield
        wait_for_all()
    except BaseException:
        if is_main_process():
            remove_folder(aside)
        raise


def keep_merged_base(options: TrainOptions) -> None:
    """Put the base model that was merged for the run, if one was, in its place."""
    aside = options.folder / _ASIDE
    if is_main_process() and aside.is_dir():
        remove_folder(options.folder / MERGED_BASE)
        put_in_place(aside, options.folder / MERGED_BASE)


def _is_resumed(options: TrainOptions) -> bool:
    """Whether the run goes on after updates that were made on the base model that is there."""
    return options.output.resume and last_checkpoint(options.folder) is not None


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

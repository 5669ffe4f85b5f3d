"""The base model of a run that trains on top of another's adapter: its base with that adapter merged.

output_dir/
  .base/   while the run may still be refused
  base/    from then on
"""

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
from unsloth_pack.checkpoints.saving import save_in_own_dtype
from unsloth_pack.config import TrainOptions, flat
from unsloth_pack.images.processor import pick_processor
from unsloth_pack.recipe.machine import is_main_process, wait_for_all
from unsloth_pack.recipe.second_stage import held_by_run
from unsloth_pack.training.checkpoints import last_checkpoint

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

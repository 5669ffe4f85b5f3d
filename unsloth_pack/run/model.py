"""The model of a run: loaded, with new tokens, with an adapter or without, and with the parts that train."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import SFTConfig

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.checkpoints.atomic import put_in_place, remove_folder
from unsloth_pack.checkpoints.loading import weight_dtype
from unsloth_pack.checkpoints.names import MERGED_BASE, MODEL_CONFIG
from unsloth_pack.checkpoints.new_tokens import add_to_model, rows_to_train
from unsloth_pack.checkpoints.saving import save_in_own_dtype
from unsloth_pack.checkpoints.sharded import free_gathered
from unsloth_pack.config import flat
from unsloth_pack.config.options import AdapterOptions, ImageOptions, ModelOptions, TrainingOptions
from unsloth_pack.config.values import Recompute
from unsloth_pack.data.labels import Labels
from unsloth_pack.errors import InputError
from unsloth_pack.images.processor import pick_processor
from unsloth_pack.memory.checkpointing import enable_checkpointing
from unsloth_pack.modules import is_gathered_as_group, train_only
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.run.from_adapter import held_by_run
from unsloth_pack.run.machine import is_main_process, wait_for_all
from unsloth_pack.run.optimizer import rates_of
from unsloth_pack.run.ranks import refused_together
from unsloth_pack.run.sharding import refuse_images, reshards_after_forward
from unsloth_pack.run.trained import adapter_arguments, freeze_parts, with_parts
from unsloth_pack.training.checkpoints import last_checkpoint
from unsloth_pack.training.distributed import loaded_whole
from unsloth_pack.training.optimizers import check_host_memory, check_rates
from unsloth_pack.verification import probe

# The base model of a run that trains on top of another's adapter: its base with that adapter merged.
#
# output_dir/
#   .base/   while the run may still be refused
#   base/    from then on

_ASIDE = f".{MERGED_BASE}"


def _load_merged_base(
    model: ModelOptions, adapter: AdapterOptions, folder: Path, is_resumed: bool, **loading: Any
) -> PreTrainedModel:
    """Load the base model with `init_adapter` merged into it by the main process.

    The adapter makes up for what its base lost in 4 bits, 8 bits or fp8. So it is merged into the weights
    that it was trained on, which are saved in the type of this run and then loaded with its options.
    """
    goes_on = is_resumed and last_checkpoint(folder) is not None  # its updates were made on the base there
    base = folder / MERGED_BASE
    aside = base if goes_on else folder / _ASIDE
    with refused_together():
        if is_main_process() and not (aside / MODEL_CONFIG).is_file():
            first = str(adapter.init_adapter)
            arguments = {**flat(model), **held_by_run(Path(first)), "model_name": first, "max_seq_length": 1}
            merged, tokenizer = FastLanguageModel.from_pretrained(**arguments)
            dtype = weight_dtype(model.dtype, adapter.tuning == "full")
            save_in_own_dtype(merged, aside, pick_processor(merged, first, tokenizer), dtype)
            del merged
            gc.collect()  # a model refers to itself; the next one is to have its memory
            torch.cuda.empty_cache()
    loaded: PreTrainedModel
    with refused_together():  # a process that refuses the run next removes what the others would still read
        loaded, _ = FastLanguageModel.from_pretrained(**loading | {"model_name": str(aside)})
    loaded.name_or_path = loaded.config._name_or_path = str(base.absolute())  # that the adapter names
    return loaded


@contextmanager
def _removed_if_refused(folder: Path) -> Iterator[None]:
    """An error inside this context, in any process, removes the base model that was merged for the run."""
    aside = folder / _ASIDE
    if is_main_process():
        remove_folder(aside)  # left by a process that was killed
    try:
        yield
        wait_for_all()
    except BaseException:
        if is_main_process():
            remove_folder(aside)
        raise


def keep_merged_base(folder: Path) -> None:
    """Put the base model that was merged for the run, if one was, in its place."""
    aside = folder / _ASIDE
    if is_main_process() and aside.is_dir():
        remove_folder(folder / MERGED_BASE)
        put_in_place(aside, folder / MERGED_BASE)


def build_model(
    model: ModelOptions,
    adapter: AdapterOptions,
    images: ImageOptions,
    training: TrainingOptions,
    config: SFTConfig,
    new_tokens: Mapping[int, list[int]],
    *,
    has_images: bool,
    labels: Labels | None,
    folder: Path,
    is_resumed: bool,
) -> Any:
    """Load the patched model with its adapter, and probe it for leaks before anything is written.

    Raises:
        InputError: it cannot be loaded, or not train as the options say.
        LeakFound: documents of a packed row reach each other.
    """
    if has_images:
        refuse_images(training)
    with _removed_if_refused(folder), loaded_whole(config):
        sharded, checkpointing = training.fsdp is not None, training.use_gradient_checkpointing
        loaded = _load_base(model, adapter, labels, folder, is_resumed, sharded)
        loaded = adapt(loaded, adapter, images if has_images else None, new_tokens, checkpointing)
        if training.fsdp is not None and not reshards_after_forward(training.fsdp):
            for layer in filter(is_gathered_as_group, loaded.modules()):
                layer.set_reshard_after_forward(False, recurse=False)
        check_rates(loaded, rates_of(training, images))
        if training.masters_on_host:
            check_host_memory(loaded)
        patch = patch_of(loaded)
        assert patch is not None
        if training.no_probe:
            patch.skip_probe()
        elif config.padding_free and labels is None:  # without a language model's head it probes itself
            probe(loaded, describe="trl")
            free_gathered(loaded)
    return loaded


def _load_base(
    model: ModelOptions,
    adapter: AdapterOptions,
    labels: Labels | None,
    folder: Path,
    is_resumed: bool,
    sharded: bool,
) -> Any:
    """Load the patched model, with the adapter that trains if there is one already."""
    loading = {**flat(model), "full_finetuning": adapter.tuning == "full"}
    loading |= {"random_state": adapter.random_state, "sharded": sharded}
    if labels is not None:
        loading |= {"num_labels": len(labels.names), "id2label": dict(enumerate(labels.names))}
        loading["label2id"] = {name: number for number, name in enumerate(labels.names)}
    if adapter.merge_init_adapter:
        return _load_merged_base(model, adapter, folder, is_resumed, **loading)
    loading["model_name"] = adapter.init_adapter or model.model_name
    with refused_together():
        return FastLanguageModel.from_pretrained(**loading)[0]


def adapt(
    model: Any,
    adapter: AdapterOptions,
    images: ImageOptions | None,
    new_tokens: Mapping[int, list[int]],
    checkpointing: Recompute,
) -> Any:
    """Add new tokens, put an adapter on the model where it needs one, and freeze what does not train."""
    begun_with = None if adapter.merge_init_adapter else adapter.init_adapter
    if new_tokens:
        add_to_model(model, new_tokens)
    if adapter.tuning == "full":
        train_only(model, adapter.train_modules, adapter.freeze_modules)
    if adapter.tuning == "full" or begun_with is not None:
        if images is not None:
            freeze_parts(model, images, begun_with)
        enable_checkpointing(model, checkpointing)
        return model.train()
    arguments = adapter_arguments(model, adapter)
    if images is not None:
        arguments = with_parts(model, arguments, images)
    if new_tokens:
        arguments["trainable_token_indices"] = _with_new_tokens(model, arguments, [*new_tokens])
    arguments["adapter_on_head"] = True
    return FastLanguageModel.get_peft_model(model, **arguments, use_gradient_checkpointing=checkpointing)


def _with_new_tokens(
    model: PreTrainedModel, arguments: Mapping[str, Any], ids: list[int]
) -> list[int] | dict[str, list[int]]:
    """The rows that train: those of new tokens and those of the options."""
    rows = rows_to_train(model, ids)
    own = arguments.get("trainable_token_indices") or []
    if isinstance(rows, list):
        return [*own, *rows]
    embedding = next(iter(rows))
    for name in arguments["modules_to_save"] or ():
        if name.rpartition(".")[2] in rows:
            raise InputError(
                f"add_tokens trains rows of {name}, which modules_to_save or train_modules trains as a "
                "whole; leave one of them out"
            )
    return {name: [*(own if name == embedding else []), *of_name] for name, of_name in rows.items()}

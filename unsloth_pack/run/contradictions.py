"""Options that contradict each other. Reads no file, and imports no torch."""

import os
from collections.abc import Iterator, Mapping
from itertools import combinations
from types import SimpleNamespace
from typing import Any

from unsloth_pack.config import OPTIONS, TrainOptions, flat
from unsloth_pack.errors import InputError, written
from unsloth_pack.run.from_adapter import LOADED_IN
from unsloth_pack.run.machine import count_processes
from unsloth_pack.run.optimizer import BY_WEIGHT, ON_HOST
from unsloth_pack.run.resolve import packs_in, paths_of

# Options that mean nothing in full tuning
OF_AN_ADAPTER = (
    *("r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora", "loftq_config"),
    *("target_modules", "layers_to_transform", "modules_to_save", "trainable_token_indices"),
)
SCHEDULES_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
_SCHEDULES_BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")
_OF_THE_TEXT = ("target_modules", "layers_to_transform", "trainable_token_indices", "add_tokens")
_EVALUATE = "give --eval_dataset or --eval_fraction"


def contradictions(options: TrainOptions) -> Iterator[InputError]:
    """Yield an error for each contradiction between options.

    Its text names the options: `config.load` finds their lines in a config file by their names.
    """
    values, given = SimpleNamespace(**flat(options)), options.given
    for section in (_of_weights, _of_data, _of_training, _of_backward, _of_evaluation, _of_images):
        yield from map(InputError, section(values, given))


def _is_given(name: str, given: Mapping[str, object]) -> bool:
    return given.get(name, OPTIONS[name].default) != OPTIONS[name].default


def _of_weights(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    in_bits = [name for name in LOADED_IN if getattr(v, name)]
    shards = [name for name in ("fsdp", "deepspeed") if getattr(v, name) is not None]
    for one, other in combinations(in_bits, 2):
        yield f"{one} and {other} are set together; choose one"
    if v.loftq_config is not None and in_bits:
        yield f"loftq_config starts from 16-bit weights; drop {in_bits[0]}"
    if v.use_dora and v.load_in_fp8:
        yield "use_dora needs the exact base weights; drop load_in_fp8"
    if len(shards) > 1:
        yield f"fsdp is {v.fsdp!r} and deepspeed is {v.deepspeed!r}; give one of them"
    for shard in shards:
        for name in in_bits:
            yield (
                f"{shard} shards 16-bit weights and {name} is set; drop one of them (without --{shard}, "
                "several GPUs train quantised weights)"
            )
    if v.merge_init_adapter and v.init_adapter is None:
        yield "merge_init_adapter is set without an adapter; give --init_adapter"
    if v.init_adapter is not None and v.loftq_config is not None and not v.merge_init_adapter:
        yield f"loftq_config is set and init_adapter {v.init_adapter!r} has weights; leave out one"
    if v.tuning != "full":
        return
    if v.init_adapter is not None and not v.merge_init_adapter:
        yield (
            f"tuning is 'full' and init_adapter is {v.init_adapter!r}, which is no whole model; give "
            "--merge_init_adapter, or --tuning lora"
        )
    for name in OF_AN_ADAPTER:
        if _is_given(name, given):
            yield (
                f"{name} is {written(given[name])} and tuning is 'full', which makes no adapter; leave out "
                f"--{name}, or give --tuning lora"
            )
    for name in in_bits:
        yield (
            f"tuning is 'full' and {name} is set, but quantised weights have no gradient; drop {name}, or "
            "give --tuning lora"
        )
    if v.dtype == "float16":
        yield (
            "tuning is 'full' and dtype is 'float16', in which small updates are lost and gradients cannot "
            "be scaled; give bfloat16 or float32"
        )
    for shard in shards:
        yield f"tuning is 'full' and {shard} is set, but only adapters train on sharded weights; drop one"
    if v.lora_plus_ratio is not None:
        yield f"tuning is 'full' and lora_plus_ratio is {v.lora_plus_ratio:g}, but there is no LoRA; drop one"
    if v.save_method == "lora":
        yield "tuning is 'full' and save_method is 'lora', but there is no adapter; drop one"


def _of_data(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    sets = [v.dataset, *([v.eval_dataset] if v.eval_dataset else [])]
    if _is_given("mixture", vars(v)) and len(paths_of(v.dataset)) == 1:
        yield (
            f"mixture is {v.mixture!r}, and there is one data set, {paths_of(v.dataset)[0]}; leave out "
            "--mixture, or name several in dataset"
        )
    if v.columns and all("columns" in each for named in sets for each in _items(named)):
        yield "columns is set, and every item of dataset has columns of its own; leave out --columns"
    if v.eval_fraction is not None and v.eval_dataset is not None:
        named = ", ".join(paths_of(v.eval_dataset))
        yield f"eval_fraction is {v.eval_fraction:g} and eval_dataset is {named}; give one of them"
    if v.eval_packing and not v.sample_packing:
        yield "eval_packing is set without sample_packing; give --sample_packing too"
    if v.keep_examples_per_update and not v.sample_packing:
        yield "keep_examples_per_update is set without sample_packing; give --sample_packing too"
    if not v.streaming:
        return
    if v.max_steps is None:
        yield "streaming is set and max_steps is not, but a stream has no length; give --max_steps"
    if given.get("sample_packing") is False:
        yield (
            "sample_packing is false, but the documents of a stream are packed as they come; leave out "
            "--sample_packing, or --streaming"
        )
    if v.keep_examples_per_update:
        yield (
            "keep_examples_per_update is set, but nobody knows the lengths of the documents with streaming; "
            "give --gradient_accumulation_steps"
        )
    if v.eval_fraction is not None:
        yield (
            f"eval_fraction is {v.eval_fraction:g} and streaming is set, but nobody knows which documents of "
            "a stream are equal; give --eval_dataset"
        )
    if folder := packs_in(v.dataset):
        yield (
            f"streaming is set and {folder} holds packed rows, which stay on the disk anyway; leave out "
            "--streaming"
        )


def _items(named: Any) -> list[Mapping[str, Any]]:
    return [{}] if isinstance(named, str) else named


def _of_training(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    schedule, processes = v.lr_scheduler_type, count_processes()
    if v.warmup_ratio is not None and "warmup_steps" in given:
        yield f"warmup_ratio is {v.warmup_ratio:g} and warmup_steps is {v.warmup_steps}; give one of them"
    for name in ("warmup_ratio", "warmup_steps"):
        if given.get(name) and schedule in SCHEDULES_WITHOUT_WARMUP:
            instead = "constant_with_warmup" if schedule == "constant" else "another lr_scheduler_type"
            yield (
                f"{name} is {given[name]:g} and lr_scheduler_type is {schedule!r}, which has no warmup; give "
                f"{instead}, or leave out --{name}"
            )
    if v.effective_batch_size is not None:
        for name in ("gradient_accumulation_steps", "keep_examples_per_update"):
            if given.get(name):
                yield (
                    f"effective_batch_size is {v.effective_batch_size} and {name} is {written(given[name])}, "
                    f"but either decides the steps of an update; leave out --{name}"
                )
        rows = (v.per_device_train_batch_size or 1) * processes
        if v.effective_batch_size % rows:
            yield (
                f"effective_batch_size is {v.effective_batch_size} and a step has {rows} rows "
                f"(per_device_train_batch_size times {processes} processes); give a multiple of {rows}"
            )
    if v.save_path is not None and not v.save_model:
        yield f"save_path is {v.save_path!r} but nothing is saved there; give --save_model too"
    for name in ("output_dir", "save_path"):
        folder = getattr(v, name)
        if folder is not None and not folder.strip():
            yield f"{name} is {folder!r}; give a folder"
        elif folder is not None and "${" in folder:
            yield f"{name} is {folder!r}, where nothing fills in a variable; write the folder out"
    for name in ("optimizer_in_backward", "masters_on_host"):
        if getattr(v, name) and v.tuning != "full":
            yield (
                f"{name} is set and tuning is 'lora', but gradients and moments of an adapter take little "
                "memory; leave it out, or give --tuning full"
            )
    if v.masters_on_host and v.optim not in (None, *ON_HOST):
        yield (
            f"masters_on_host is set and optim is {v.optim!r}, which does not update on the host; give one "
            f"of {', '.join(ON_HOST)}"
        )


def _of_backward(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    if not v.optimizer_in_backward or v.tuning != "full":
        return
    begins, processes = "optimizer_in_backward applies each gradient as it comes, and", count_processes()
    if v.keep_examples_per_update:
        yield f"{begins} keep_examples_per_update may add up those of several steps; leave out one of them"
    if v.gradient_accumulation_steps != 1:
        yield (
            f"{begins} gradient_accumulation_steps is {v.gradient_accumulation_steps}, which adds up those "
            "of several steps; give --gradient_accumulation_steps 1, with longer rows or more of them"
        )
    if v.max_grad_norm:
        yield (
            f"{begins} max_grad_norm is {v.max_grad_norm:g}, but the norm of all is known only when all are "
            "there; give --max_grad_norm 0, which clips nothing"
        )
    if processes > 1:
        yield f"{begins} {processes} processes first sum theirs; train in one process, or leave it out"
    if v.optim not in (None, *BY_WEIGHT):
        yield (
            f"{begins} optim {v.optim!r} keeps counts of whole updates; give adamw_torch, or another that "
            "updates each weight by itself"
        )


def _of_evaluation(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    evaluates = v.eval_dataset is not None or v.eval_fraction is not None
    if v.eval_packing is not None and not evaluates:
        yield f"eval_packing is {written(v.eval_packing)} without data to evaluate; {_EVALUATE}"
    for name in ("eval_steps", "early_stopping_patience", "load_best_model_at_end"):
        if (value := getattr(v, name)) and not evaluates:
            yield f"{name} is {written(value)} without data to evaluate on; {_EVALUATE}"
    if v.lr_scheduler_type in _SCHEDULES_BY_EVALUATION and not evaluates:
        yield (
            f"lr_scheduler_type is {v.lr_scheduler_type!r}, which follows the evaluation loss; {_EVALUATE}, "
            "or use linear"
        )
    if v.load_best_model_at_end and v.save_steps and evaluates and v.save_steps % (v.eval_steps or 2**31):
        yield (
            "load_best_model_at_end takes the best of the checkpoints, but save_steps "
            f"{v.save_steps} is no multiple of eval_steps {written(v.eval_steps)}; make it one"
        )
    if v.save_delay_steps and not (v.save_steps or v.load_best_model_at_end):
        yield f"save_delay_steps is {v.save_delay_steps} and no checkpoints are made; give --save_steps"


def _of_images(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    for rate, frozen in (("vit_lr", "freeze_vit"), ("aligner_lr", "freeze_aligner")):
        if (value := getattr(v, rate)) is not None and getattr(v, frozen):
            yield (
                f"{rate} is {value:g} and {frozen} is true, so that nothing learns at this rate; leave out "
                f"--{rate}, or give --{frozen} false"
            )
    if v.freeze_vit and v.freeze_aligner and v.freeze_llm:
        yield (
            "freeze_vit, freeze_aligner and freeze_llm are true, which leaves nothing to train; set one of "
            "them to false"
        )
    for name in _OF_THE_TEXT:
        if v.freeze_llm and (value := getattr(v, name)) is not None:
            yield (
                f"freeze_llm is true and {name} is {written(value)}, which is of the language model; leave "
                "out one of them"
            )
    if v.min_pixels is not None and v.min_pixels > (v.max_pixels or v.min_pixels):
        yield f"min_pixels is {v.min_pixels} and max_pixels is {v.max_pixels}; give a range"
    if v.image_folder is not None and not os.path.isdir(v.image_folder):
        yield f"image_folder is {v.image_folder!r}, which is no folder; correct it"

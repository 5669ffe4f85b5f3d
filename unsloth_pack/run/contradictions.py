"""Options that contradict each other. Reads no file, and imports no torch."""

import os
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

from unsloth_pack.config import OPTIONS, TrainOptions, flat
from unsloth_pack.config.options import DistillOptions, RolloutOptions
from unsloth_pack.data.rows import PREFERENCES
from unsloth_pack.errors import InputError, written
from unsloth_pack.run.from_adapter import LOADED_IN
from unsloth_pack.run.machine import count_processes
from unsloth_pack.run.optimizer import BY_WEIGHT, ON_HOST
from unsloth_pack.run.resolve import packs_in

# Options that mean nothing in full tuning
OF_AN_ADAPTER = (
    *("r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora", "loftq_config"),
    *("target_modules", "layers_to_transform", "modules_to_save", "trainable_token_indices"),
)
SCHEDULES_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
_OF_THE_TEXT = ("target_modules", "layers_to_transform", "trainable_token_indices", "add_tokens")
_EVALUATION = ("eval_dataset", "eval_fraction")
# Options that `--task classify` does not take
_NOT_OF_CLASSES = ("streaming", "train_on_responses_only", "init_adapter", "add_tokens", "deepspeed")
# Options of which one at most may be given
_ONE_OF = (
    *combinations(LOADED_IN, 2),
    *product(("loftq_config", "deepspeed"), LOADED_IN),  # they take 16-bit weights
    *product(("use_dora",), ("load_in_fp8", "fsdp")),  # it takes the exact base weights, whole
    *product(("fsdp",), ("load_in_8bit", "loftq_config")),
    ("fsdp", "deepspeed"),
    _EVALUATION,
    *product(("streaming",), ("eval_fraction", "keep_examples_per_update")),  # they need the whole data
    ("warmup_ratio", "warmup_steps"),
    *product(("effective_batch_size",), ("gradient_accumulation_steps", "keep_examples_per_update")),
    ("optimizer_in_backward", "keep_examples_per_update"),  # which may add up gradients of several steps
    *product(("freeze_llm",), _OF_THE_TEXT),
    *product(("task",), _NOT_OF_CLASSES),
)
# An option, and those of which it needs one
_NEEDS = {
    "merge_init_adapter": ("init_adapter",),
    "eval_packing": ("sample_packing",),
    "keep_examples_per_update": ("sample_packing",),
    "streaming": ("max_steps",),  # a stream has no length
    "save_path": ("save_model",),
    "label_column": ("task",),
    "eval_steps": _EVALUATION,
    "early_stopping_patience": _EVALUATION,
    "load_best_model_at_end": _EVALUATION,
    "save_delay_steps": ("save_steps", "load_best_model_at_end"),
}
# Options of some objectives alone
_OF_OBJECTIVES = {
    **dict.fromkeys(DistillOptions.model_fields, ("distill",)),
    **dict.fromkeys(RolloutOptions.model_fields, ("rollouts",)),
    "beta": PREFERENCES,
    **dict.fromkeys(("loss_type", "label_smoothing"), ("dpo",)),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), ("kto",)),
}


def contradictions(options: TrainOptions) -> Iterator[InputError]:
    """Yield an error for each contradiction between options.

    Its text names the options: `telling_places` finds their lines in a config file by their names.
    """
    values, given = SimpleNamespace(**flat(options)), options.given
    for one, other in _ONE_OF:
        if all(_is_set(name, values, given) for name in (one, other)):
            yield InputError(f"{_said(values, one, other)}; give one of them")
    for name, needs in _NEEDS.items():
        if getattr(values, name) and not any(getattr(values, each) for each in needs):
            flags = " or ".join(f"--{each}" for each in needs)
            yield InputError(f"{_said(values, name)}, which needs another option; give {flags} too")
    checks = (_of_tuning, _of_training, _of_objective, _of_distillation, _of_rollouts, _of_backward, _of_data)
    for section in checks:
        yield from map(InputError, section(values, given))


def _is_set(name: str, values: SimpleNamespace, given: Mapping[str, object]) -> bool:
    value = given.get(name) if OPTIONS[name].default else getattr(values, name)
    return value not in (None, False)


def _said(values: SimpleNamespace, *names: str) -> str:
    return " and ".join(f"{name} is {written(getattr(values, name))}" for name in names)


def _of_tuning(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    goes_on = v.init_adapter is not None and not v.merge_init_adapter
    if goes_on and v.loftq_config is not None:
        yield f"{_said(v, 'loftq_config', 'init_adapter')}, which has weights; leave out one"
    if v.tuning != "full":
        for name in ("optimizer_in_backward", "masters_on_host"):
            if getattr(v, name):
                yield f"{_said(v, name, 'tuning')}, which needs little memory; give --tuning full"
        return
    if goes_on:
        yield f"{_said(v, 'tuning', 'init_adapter')}; give --merge_init_adapter, or --tuning lora"
    for name in (*OF_AN_ADAPTER, *LOADED_IN, "fsdp", "deepspeed", "lora_plus_ratio", "save_method"):
        if given.get(name, OPTIONS[name].default) != OPTIONS[name].default:
            yield f"{_said(v, 'tuning', name)}, which only an adapter takes; leave out one of them"
    if v.dtype == "float16":
        yield f"{_said(v, 'tuning', 'dtype')}, in which small updates are lost; give bfloat16 or float32"
    if v.masters_on_host and v.optim not in (None, *ON_HOST):
        yield f"{_said(v, 'masters_on_host', 'optim')}; give one of {', '.join(ON_HOST)}"


def _of_training(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    schedule, step = v.lr_scheduler_type, v.per_device_train_batch_size
    rows = (step if isinstance(step, int) else 1) * count_processes()
    for name in ("warmup_ratio", "warmup_steps"):
        if given.get(name) and schedule in SCHEDULES_WITHOUT_WARMUP:
            yield f"{_said(v, name, 'lr_scheduler_type')}, which has no warmup; leave out one of them"
    if schedule in ("reduce_lr_on_plateau", "greedy") and not (v.eval_dataset or v.eval_fraction):
        yield f"{_said(v, 'lr_scheduler_type')}, which follows evaluations; give --eval_dataset"
    if v.effective_batch_size is not None and v.effective_batch_size % rows:
        yield f"{_said(v, 'effective_batch_size')}, and a step has {rows} rows; give a multiple of {rows}"


def _of_objective(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    for name, objectives in _OF_OBJECTIVES.items():
        if v.objective not in objectives and getattr(v, name) != OPTIONS[name].default:
            yield f"{_said(v, name, 'objective')}; give --objective {objectives[0]}, or leave it out"
    for name in ("deepspeed", "task") if v.objective != "sft" else ():
        if getattr(v, name) is not None:
            yield f"{_said(v, name, 'objective')}, which needs the whole LM head; leave out one of them"
    if v.fsdp is not None and v.objective in ("kto", "rollouts"):
        yield f"{_said(v, 'fsdp', 'objective')}, of which ranks make unequal passes; leave out one of them"
    if v.objective not in PREFERENCES:
        return
    for name in ("streaming", "train_on_responses_only"):
        if getattr(v, name):
            yield f"{_said(v, name, 'objective')}; leave out one of them"
    if v.label_smoothing and v.loss_type != "robust":
        yield f"{_said(v, 'label_smoothing', 'loss_type')}; give --loss_type robust, or leave it out"


def _of_distillation(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    if v.objective != "distill":
        return
    if not v.kl_weight + v.ce_weight:
        yield f"{_said(v, 'kl_weight', 'ce_weight')}; give a positive one"
    if v.teacher == "init_adapter" and (v.init_adapter is None or v.merge_init_adapter):
        yield f"{_said(v, 'teacher')}, and the run begins with no adapter; give --init_adapter, or base"
    changes_base = [n for n, value in (("bias", "none"), ("loftq_config", None)) if getattr(v, n) != value]
    if v.teacher == "base" and v.tuning == "full":
        yield f"{_said(v, 'teacher', 'tuning')}, which leaves no base; give a model, or --tuning lora"
    elif v.teacher == "base" and changes_base:
        yield f"{_said(v, 'teacher', changes_base[0])}, which changes the base; give a model, or leave it out"


def _of_rollouts(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    if v.objective != "rollouts":
        return
    if v.rollout_function is None:
        yield "objective is 'rollouts', which needs another option; give --rollout_function FILE.py:NAME"
    if v.train_on_responses_only:
        only = _said(v, "train_on_responses_only", "objective")
        yield f"{only}, which takes none; leave out one of them"
    if v.max_new_tokens >= v.max_seq_length:
        yield f"{_said(v, 'max_new_tokens', 'max_seq_length')}, which leaves no room for a prompt; lower one"
    if v.num_generations > 1 and not v.rollout_temperature:
        yield f"{_said(v, 'num_generations', 'rollout_temperature')}, and so all equal; raise it"


def _of_backward(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    if not v.optimizer_in_backward or v.tuning != "full":
        return
    begins, processes = "optimizer_in_backward applies each gradient as it comes, and", count_processes()
    if v.gradient_accumulation_steps != 1:
        yield f"{begins} {_said(v, 'gradient_accumulation_steps')}; give --gradient_accumulation_steps 1"
    if v.max_grad_norm:
        yield f"{begins} {_said(v, 'max_grad_norm')}, a norm of all; give --max_grad_norm 0"
    if processes > 1:
        yield f"{begins} {processes} processes first sum theirs; train in one process, or leave it out"
    if v.optim not in (None, *BY_WEIGHT):
        yield f"{begins} {_said(v, 'optim')}, which counts whole updates; give adamw_torch"


def _of_data(v: Any, given: Mapping[str, Any]) -> Iterator[str]:
    if v.streaming and given.get("sample_packing") is False:
        yield "sample_packing is false and streaming is true, which packs; leave out one of them"
    if v.streaming and (folder := packs_in(v.dataset)):
        yield f"streaming is true and {folder} holds packed rows, which stay on the disk; leave it out"
    if v.freeze_vit and v.freeze_aligner and v.freeze_llm:
        yield "freeze_vit, freeze_aligner and freeze_llm are true, which leaves nothing to train; change one"
    if v.min_pixels is not None and v.min_pixels > (v.max_pixels or v.min_pixels):
        yield f"{_said(v, 'min_pixels', 'max_pixels')}; give a range"
    if v.image_folder is not None and not os.path.isdir(v.image_folder):
        yield f"{_said(v, 'image_folder')}, which is no folder; correct it"

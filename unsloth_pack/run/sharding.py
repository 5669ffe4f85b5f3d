"""`--fsdp` and `--deepspeed`: presets, files of settings, and the options that they contradict."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unsloth_pack.config import TrainOptions
from unsloth_pack.errors import Check, InputError, about, at_once
from unsloth_pack.run.machine import count_processes

# transformers' `fsdp_config`; `_fsdp_config` adds the version and the wrapping
FSDP_PRESETS: dict[str, dict[str, Any]] = {
    "full": {},  # a layer's weights are gathered for its forward pass, and again for its backward pass
    "keep": {"reshard_after_forward": False},  # gathered once, and held between the two
}
# The settings that a file may have, with their values; None stands for any value. Activation checkpointing is
# not among them: it has an option of its own.
_FSDP_SETTINGS: dict[str, tuple[Any, ...] | None] = {
    "version": (2,),
    "auto_wrap_policy": None,
    "transformer_layer_cls_to_wrap": None,
    "min_num_params": None,
    "reshard_after_forward": (True, False),
    "state_dict_type": ("FULL_STATE_DICT",),
    "cpu_ram_efficient_loading": (False,),
}
_ZERO2: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "communication_data_type": "fp32",  # gradients are summed as DDP sums them
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
DEEPSPEED_PRESETS: dict[str, dict[str, Any]] = {
    "zero2": _ZERO2,
    "zero3": _ZERO2 | {"zero_optimization": _ZERO2["zero_optimization"] | {"stage": 3}},
}


def check_sharding(options: TrainOptions) -> None:
    """Refuse options that contradict sharding, and settings that cannot be read, all at once.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    given = _given(options)
    checks: list[Check] = [partial(_check_one_of_both, given)]
    for name, value in given.items():
        checks += [
            partial(_check_settings, options, name),
            partial(_check_bits, options, name),
            partial(_check_recomputing, options, name, value),
        ]
    at_once(checks)


def check_sharding_here(options: TrainOptions) -> Iterator[InputError]:
    """Refuse to shard without the library, and in one process."""
    given = _given(options)
    if len(given) != 1:  # which `check_sharding` refuses, or nothing shards
        return
    ((name, value),) = given.items()
    if name == "deepspeed" and find_spec("deepspeed") is None:
        yield InputError(
            f"deepspeed is {value!r} but is not installed; pip install 'unsloth-pack[deepspeed]'", about=name
        )
    if count_processes() < 2:
        yield InputError(
            f"{name} shards over several processes and this is one; start them with "
            f"`torchrun --nproc_per_node N cli.py --{name} {value} ...`, or leave out --{name}",
            about=name,
        )


def _given(options: TrainOptions) -> dict[str, str]:
    found = {"fsdp": options.training.fsdp, "deepspeed": options.training.deepspeed}
    return {name: value for name, value in found.items() if value is not None}


def _check_one_of_both(given: Mapping[str, str]) -> Iterator[InputError]:
    if len(given) > 1:
        both = " and ".join(f"{name} is {value!r}" for name, value in given.items())
        yield InputError(f"{both}; give one of them", about=given)


def _check_settings(options: TrainOptions, name: str) -> None:
    if name == "deepspeed":
        zero_stage(options)
    else:
        _fsdp_config(str(options.training.fsdp))


def _check_bits(options: TrainOptions, name: str) -> Iterator[InputError]:
    for loaded_in in ("load_in_4bit", "load_in_8bit", "load_in_fp8"):
        if getattr(options.model, loaded_in):
            yield InputError(
                f"{name} shards 16-bit weights and {loaded_in} is set; drop one of them (without --{name}, "
                "several GPUs train quantised weights)",
                about=(name, loaded_in),
            )


def _check_recomputing(options: TrainOptions, name: str, given: str) -> Iterator[InputError]:
    if options.training.use_gradient_checkpointing != "auto":
        return
    holds_all_weights = name == "deepspeed" and zero_stage(options) in (1, 2)
    if not holds_all_weights:
        yield InputError(
            f"use_gradient_checkpointing is 'auto', which every process decides for itself, but under {name} "
            f"{given!r} all must recompute the same layers; give true or offload",
            about=("use_gradient_checkpointing", name),
        )


def zero_stage(options: TrainOptions) -> int | None:
    """The stage of ZeRO that `--deepspeed` sets; None without it.

    Raises:
        InputError: the settings cannot be read, or set no stage that shards.
    """
    given = options.training.deepspeed
    if given is None:
        return None
    zero = _settings("deepspeed", given, DEEPSPEED_PRESETS).get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3):
        raise InputError(
            f"deepspeed is {given!r}, which sets zero_optimization.stage to {stage!r}; give 1, 2 or 3",
            about="deepspeed",
        )
    return stage


def sharding_arguments(options: TrainOptions) -> dict[str, Any]:
    """The arguments of transformers' `TrainingArguments` for `--fsdp` or `--deepspeed`; none without them."""
    training = options.training
    if training.fsdp is not None:
        return {"fsdp": True, "fsdp_config": _fsdp_config(training.fsdp)}
    if training.deepspeed is not None:
        return {"deepspeed": _settings("deepspeed", training.deepspeed, DEEPSPEED_PRESETS)}
    return {}


def _fsdp_config(given: str) -> dict[str, Any]:
    settings = _settings("fsdp", given, FSDP_PRESETS)
    config = {str(name).removeprefix("fsdp_"): value for name, value in settings.items()}
    at_once([partial(_wrong_settings, given, config)])
    required = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "FULL_STATE_DICT",
    }
    return required | config


def _wrong_settings(given: str, config: Mapping[str, Any]) -> Iterator[InputError]:
    for name, value in config.items():
        allowed = _FSDP_SETTINGS.get(name)
        if name not in _FSDP_SETTINGS:
            known = ", ".join(_FSDP_SETTINGS)
            yield InputError(
                f"fsdp is {given!r}, which sets {name}; leave it out, or set one of {known}", about="fsdp"
            )
        elif allowed is not None and value not in allowed:
            yield InputError(
                f"fsdp is {given!r}, which sets {name} to {value!r}; give {' or '.join(map(str, allowed))}",
                about="fsdp",
            )


def _settings(name: str, given: str, presets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of a preset, or of a JSON or YAML file, where accelerate puts them under `fsdp_config`.

    Raises:
        InputError: no such preset or file, or one that holds no settings.
    """
    if given in presets:
        return copy.deepcopy(presets[given])
    with about(name):
        return _settings_in(name, given, presets)


def _settings_in(name: str, given: str, presets: Iterable[str]) -> dict[str, Any]:
    import yaml

    path, begins = Path(given), f"{name} is {given!r}"
    if not path.suffix:
        raise InputError(f"{begins}; choose one of {', '.join(presets)}, or give a .json or .yaml file")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"{begins}: {error.strerror}; check the path") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = path.suffix.removeprefix(".")
        raise InputError(f"{begins}: not {kind} ({' '.join(str(error).split())}); correct it") from None
    if isinstance(values, dict):
        values = values.get(f"{name}_config", values)
    if not isinstance(values, dict) or not values:
        raise InputError(f"{begins}: it holds no settings by name; write some")
    return values

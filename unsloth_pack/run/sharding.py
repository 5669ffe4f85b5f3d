"""`--fsdp` and `--deepspeed`: presets and files of settings."""

import copy
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import yaml

from unsloth_pack.config.options import Section, TrainingOptions
from unsloth_pack.config.values import read_as
from unsloth_pack.errors import InputError, errors_of
from unsloth_pack.run.machine import count_processes

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
_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp": {  # transformers' `fsdp_config`
        "full": {"reshard_after_forward": True},  # gathered for the forward pass, again for the backward pass
        "keep": {"reshard_after_forward": False},  # gathered once, and held between the two
    },
    "deepspeed": {
        "zero2": _ZERO2,
        "zero3": _ZERO2 | {"zero_optimization": _ZERO2["zero_optimization"] | {"stage": 3}},
    },
}


class _FsdpSettings(Section):
    """Settings that a file may have. Activation checkpointing has an option of its own.

    The last four are accelerate's, and change nothing here.
    """

    version: Literal[2] = 2
    reshard_after_forward: bool = True
    auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP"] = "TRANSFORMER_BASED_WRAP"
    transformer_layer_cls_to_wrap: str | list[str] | None = None
    state_dict_type: str | None = None
    cpu_ram_efficient_loading: bool | None = None


def check_sharding(training: TrainingOptions) -> Iterator[InputError]:
    """Refuse settings that cannot be read or followed."""
    if training.fsdp is not None:
        yield from errors_of(_fsdp_settings, training.fsdp)
    holds_all_weights = zero_stage(training) in (1, 2)
    name, value = ("fsdp", training.fsdp) if training.fsdp else ("deepspeed", training.deepspeed)
    if value is not None and training.use_gradient_checkpointing == "auto" and not holds_all_weights:
        yield InputError(
            f"use_gradient_checkpointing is 'auto', which every process decides for itself, but under {name} "
            f"{value!r} all must recompute the same layers; give true or offload"
        )


def check_sharding_here(training: TrainingOptions) -> Iterator[InputError]:
    """Refuse to shard without the library, and in one process."""
    name, value = ("fsdp", training.fsdp) if training.fsdp else ("deepspeed", training.deepspeed)
    if name == "deepspeed" and value and find_spec("deepspeed") is None:
        yield InputError(
            f"deepspeed is {value!r} but is not installed; pip install 'unsloth-pack[deepspeed]'"
        )
    if value and count_processes() < 2:
        yield InputError(
            f"{name} shards over several processes and this is one; start them with "
            f"`torchrun --nproc_per_node N cli.py --{name} {value} ...`, or leave out --{name}"
        )


def refuse_images(training: TrainingOptions) -> None:
    """Refuse to shard a model that trains on images."""
    for name, value in (("fsdp", training.fsdp), ("deepspeed", training.deepspeed)):
        if value:
            raise InputError(
                f"{name} is set and the rows have images, but a process whose row has none would keep the "
                f"others waiting; leave out --{name}"
            )


def zero_stage(training: TrainingOptions) -> int | None:
    """The stage of ZeRO that `--deepspeed` sets; None without it."""
    if training.deepspeed is None:
        return None
    zero = _settings("deepspeed", training.deepspeed).get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3):
        raise InputError(
            f"deepspeed is {training.deepspeed!r}, which sets zero_optimization.stage to {stage!r}; give "
            "1, 2 or 3"
        )
    return stage


def sharding_arguments(training: TrainingOptions) -> dict[str, Any]:
    """The arguments of transformers' `TrainingArguments` for `--deepspeed`; none without it."""
    if training.deepspeed is not None:
        return {"deepspeed": _settings("deepspeed", training.deepspeed)}
    return {}


def reshards_after_forward(fsdp: str) -> bool:
    """Whether a layer's weights are freed between its forward and its backward pass."""
    return _fsdp_settings(fsdp).reshard_after_forward


def _fsdp_settings(value: str) -> _FsdpSettings:
    named = {str(name).removeprefix("fsdp_"): each for name, each in _settings("fsdp", value).items()}
    settings: _FsdpSettings = read_as(_FsdpSettings, named, f"fsdp is {value!r}")
    return settings


def _settings(name: str, value: str) -> dict[str, Any]:
    """The settings of a preset, or of a JSON or YAML file, where accelerate puts them under `fsdp_config`."""
    presets = _PRESETS[name]
    if value in presets:
        return copy.deepcopy(presets[value])
    path, begins = Path(value), f"{name} is {value!r}"
    if not path.suffix:
        raise InputError(f"{begins}; choose one of {', '.join(presets)}, or give a .json or .yaml file")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"{begins}: {error.strerror}; check the path") from None
    except (yaml.YAMLError, ValueError) as error:
        kind = path.suffix.removeprefix(".")
        raise InputError(f"{begins}: not {kind} ({' '.join(str(error).split())}); correct it") from None
    if isinstance(values, dict):
        values = values.get(f"{name}_config", values)
    if not isinstance(values, dict) or not values:
        raise InputError(f"{begins}: it holds no settings by name; write some")
    return values

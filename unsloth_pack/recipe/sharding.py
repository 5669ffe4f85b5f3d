"""`--fsdp` and `--deepspeed`: presets, files of settings, and what they do not go with."""

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from unsloth_pack.errors import InputError
from unsloth_pack.recipe.machine import count_processes
from unsloth_pack.recipe.options import TrainOptions

# transformers' `fsdp_config`, without version and wrapping, which `_fsdp_config` adds to all
FSDP_PRESETS: dict[str, dict[str, Any]] = {
    "full": {},  # a layer's weights are gathered for its forward pass, and again for its backward pass
    "keep": {"reshard_after_forward": False},  # gathered once, and held between the two
}
# What a file may set there, and to what; None for anything. Layers are checkpointed by another flag.
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
    """Refuse flags that contradict sharding, settings that cannot be read, and a process on its own.

    Raises:
        InputError: names the option, its value and the remedy.
    """
    if options.fsdp is None and options.deepspeed is None:
        return
    if options.fsdp is not None and options.deepspeed is not None:
        raise InputError(f"fsdp is {options.fsdp!r} and deepspeed is {options.deepspeed!r}; give one of them")
    name = "fsdp" if options.fsdp is not None else "deepspeed"
    given = getattr(options, name)
    sharding_arguments(options)  # reads them
    stage = zero_stage(options)
    for loaded_in in ("load_in_4bit", "load_in_8bit", "load_in_fp8"):
        if getattr(options, loaded_in):
            raise InputError(
                f"{name} shards 16-bit weights and {loaded_in} is set; drop one of them (several GPUs train "
                f"quantised weights without --{name})"
            )
    if options.use_gradient_checkpointing == "auto" and stage not in (1, 2):  # those leave the weights whole
        raise InputError(
            f"use_gradient_checkpointing is 'auto', which every process decides for itself, and {name} "
            f"{given!r} needs them in step; give true or offload"
        )
    if name == "deepspeed" and find_spec("deepspeed") is None:
        raise InputError(
            f"deepspeed is {given!r} but is not installed; pip install 'unsloth-pack[deepspeed]'"
        )
    if count_processes() < 2:
        raise InputError(
            f"{name} shards over several processes and this is one; start them with "
            f"`torchrun --nproc_per_node N cli.py --{name} {given} ...`, or leave out --{name}"
        )


def zero_stage(options: TrainOptions) -> int | None:
    """The stage of ZeRO that `--deepspeed` sets; None without it.

    Raises:
        InputError: the settings cannot be read, or set no stage that shards.
    """
    if options.deepspeed is None:
        return None
    zero = _settings("deepspeed", options.deepspeed, DEEPSPEED_PRESETS).get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage not in (1, 2, 3):
        raise InputError(
            f"deepspeed is {options.deepspeed!r}, which sets zero_optimization.stage to {stage!r}; "
            "give 1, 2 or 3"
        )
    return stage


def sharding_arguments(options: TrainOptions) -> dict[str, Any]:
    """What transformers' `TrainingArguments` get for `--fsdp` or `--deepspeed`."""
    if options.fsdp is not None:
        return {"fsdp": True, "fsdp_config": _fsdp_config(options.fsdp)}
    if options.deepspeed is not None:
        return {"deepspeed": _settings("deepspeed", options.deepspeed, DEEPSPEED_PRESETS)}
    return {}


def _fsdp_config(given: str) -> dict[str, Any]:
    settings = _settings("fsdp", given, FSDP_PRESETS)
    config = {str(name).removeprefix("fsdp_"): value for name, value in settings.items()}
    for name, value in config.items():
        if name not in _FSDP_SETTINGS:
            raise InputError(
                f"fsdp is {given!r}, which sets {name}; leave it out, known are {', '.join(_FSDP_SETTINGS)}"
            )
        allowed = _FSDP_SETTINGS[name]
        if allowed is not None and value not in allowed:
            raise InputError(
                f"fsdp is {given!r}, which sets {name} to {value!r}; give {' or '.join(map(str, allowed))}"
            )
    required = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "FULL_STATE_DICT",
    }
    return required | config


def _settings(name: str, given: str, presets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings of a preset, or in a JSON or YAML file; under `fsdp_config` in accelerate's own files.

    Raises:
        InputError: no such preset or file, or one that holds no settings.
    """
    import yaml

    if given in presets:
        return copy.deepcopy(presets[given])
    path = Path(given)
    if not path.suffix:
        raise InputError(
            f"{name} is {given!r}; choose one of {', '.join(presets)}, or give a .json or .yaml file"
        )
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"{name} is {given!r}: {error.strerror}; check the path") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = path.suffix.removeprefix(".")
        raise InputError(
            f"{name} is {given!r}: not {kind} ({' '.join(str(error).split())}); correct it"
        ) from None
    if isinstance(values, dict):
        values = values.get(f"{name}_config", values)
    if not isinstance(values, dict) or not values:
        raise InputError(f"{name} is {given!r}: it holds no settings by name; write some")
    return values

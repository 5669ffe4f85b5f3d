"""A run that begins with the adapter of another: the options of the adapter, and what may not differ."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, MODEL_CONFIG
from unsloth_pack.config.options import AdapterOptions
from unsloth_pack.errors import InputError, written
from unsloth_pack.report.metrics import read_config

# Options of an adapter that its configuration has under the same names
_OF_ITS_OWN = ("r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora")
LOADED_IN = ("load_in_4bit", "load_in_8bit", "load_in_fp8")
# Options that name its parts; it has them in the order of a set, or as patterns have chosen them
_ITS_PARTS = (
    *("target_modules", "modules_to_save", "layers_to_transform", "trainable_token_indices"),
    *("train_modules", "freeze_modules"),
)


def values_of_adapter(adapter: AdapterOptions, given: Mapping[str, object]) -> dict[str, Any]:
    """The options, by name, that a run takes from the adapter that it begins with, if that is there."""
    folder, merges = adapter.init_adapter, adapter.merge_init_adapter
    if folder is None or not os.path.exists(folder):
        return {}
    saved = saved_config(folder)
    values: dict[str, Any] = {"model_name": saved["base_model_name_or_path"]}
    if not merges:
        values |= {name: saved[name] for name in _OF_ITS_OWN if name in saved}
    if not (merges or given.get("resume") or given.keys() & {*LOADED_IN}):
        # The adapter makes up for what its base lost in few bits
        values |= {name: value for name, value in held_by_run(Path(folder)).items() if name in LOADED_IN}
    return values


def init_adapter_mistakes(
    adapter: AdapterOptions, model_name: str, given: Mapping[str, Any]
) -> Iterator[InputError]:
    """Refuse given options that differ from the adapter that the run begins with."""
    folder, merges = adapter.init_adapter, adapter.merge_init_adapter
    if folder is None or not (Path(folder) / ADAPTER_CONFIG).is_file():
        return
    name, saved = given.get("model_name"), saved_config(folder)
    if name is not None and not _is_same_model(name, folder):
        yield InputError(
            f"init_adapter {folder!r} was trained on {model_name!r}, and model_name is {name!r}; leave out "
            "--model_name, or give an adapter of that model"
        )
    for name in () if merges else (*_OF_ITS_OWN, *_ITS_PARTS):
        if name in given and _in_order(given[name]) != _in_order(saved.get(name)):
            yield InputError(
                f"init_adapter {folder!r} has {name} {written(saved.get(name))}, not {written(given[name])}; "
                f"leave out --{name}, or give --merge_init_adapter to train a new adapter on top of it"
            )


def _in_order(value: object) -> object:
    return sorted(value) if isinstance(value, list) else value


def held_by_run(folder: Path) -> dict[str, Any]:
    """The type and bits of the weights of the run in `folder`; empty where no run is."""
    options = options_of_run(folder)
    return {name: options[name] for name in ("dtype", *LOADED_IN) if name in options}


def options_of_run(folder: Path) -> dict[str, Any]:
    """The options of the run in `folder`, by name; empty where no run is."""
    try:
        return read_config(folder)
    except InputError:
        return {}


def saved_config(folder: str) -> dict[str, Any]:
    """The configuration of an adapter."""
    from unsloth_pack.checkpoints.loading import find_model

    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        remedy = "name a folder that train made"
        if path.with_name(MODEL_CONFIG).is_file():
            remedy = f"it holds a whole model, so give --model_name {folder!r} in place of it"
        raise InputError(f"init_adapter {folder!r} holds no {ADAPTER_CONFIG}; {remedy}")
    find_model(folder)  # refuses what cannot be read, and other tuners than LoRA
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _is_same_model(name: str, adapter: str) -> bool:
    from unsloth_pack.checkpoints.loading import find_model

    one, other = find_model(name)[0], find_model(adapter)[0]
    return one == other or (os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other))

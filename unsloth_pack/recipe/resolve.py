"""From the options that were given to those of a run, which may be resumed, the demo, or on packed rows."""

import os
import re
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from unsloth_pack.demo import DEMO_DEFAULTS
from unsloth_pack.errors import InputError
from unsloth_pack.packing import find_packs, read_manifest
from unsloth_pack.recipe.flags import build, changed, flat, read_values
from unsloth_pack.recipe.machine import count_processes
from unsloth_pack.recipe.options import TrainOptions

# What a resumed run may change: nothing that alters the order of the data, the steps or the weights.
FREE_ON_RESUME = {"config", "resume", "output_dir", "logging_steps", "report_to"}
FREE_ON_RESUME |= {"save_model", "save_method", "save_path", "save_steps", "attn_backend", "no_probe"}
FREE_ON_RESUME |= {"use_gradient_checkpointing", "on_nonfinite", "num_proc"}
_SOURCES = ("model_name", "dataset", "eval_dataset")  # what a run reads
# The demo's defaults are for packed rows; a batch of single documents holds about as many of them.
_DEMO_UNPACKED = {"per_device_train_batch_size": 16}


def resolve(given: Mapping[str, Any]) -> TrainOptions:
    """The options of a run; what depends on the device is left to `with_optimizer`.

    Args:
        given: the values that somebody asked for, by name.

    Raises:
        InputError: the resumed run is missing or was started otherwise, or an option contradicts packed rows.
    """
    resumed = _resumed_run(given) if given.get("resume") else {}
    options = build(TrainOptions, resumed or _demo_values(given), given)
    asked = {**resumed, **given}
    if options.data.streaming:
        options = _with_stream(options, asked)
    options = _with_packs(options, asked)
    return _with_dependent_defaults(options)


def with_optimizer(options: TrainOptions, device_type: str) -> TrainOptions:
    """The options with the default optimizer of a device, "cuda" or "cpu", unless they name one."""
    if options.training.optim is not None:
        return options
    return changed(options, {"optim": "adamw_torch_fused" if device_type == "cuda" else "adamw_torch"})


def _resumed_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the run in `output_dir` was started with."""
    from unsloth_pack.report.metrics import read_config, read_cwd

    if "output_dir" not in given:
        raise InputError("--resume needs --output_dir; name the folder of the run to continue")
    if given.get("overwrite_output_dir"):
        raise InputError("--resume and --overwrite_output_dir contradict each other; give one of them")
    folder = Path(given["output_dir"])
    known = flat(TrainOptions()).keys() - {"overwrite_output_dir"}  # which was done when the run began
    recorded = {name: value for name, value in read_config(folder).items() if name in known}
    read = read_values(TrainOptions, recorded, f"{folder}: no configuration of a run to resume")
    started_with = flat(build(TrainOptions, read))
    found = _found_again(started_with, read_cwd(folder), folder)
    for name, value in given.items():
        was = started_with[name]
        is_same = value == was or (name in _SOURCES and _are_one_path(value, found[name]))
        if name in recorded and name not in FREE_ON_RESUME and not is_same:
            raise InputError(
                f"--resume continues a run as it was started: {name} was {was!r}, not {value!r}; "
                f"leave out --{name}, or start a new run"
            )
    return {name: found[name] for name in recorded}


def _found_again(values: dict[str, Any], cwd: Path | None, folder: Path) -> dict[str, Any]:
    """The options of a run to resume, which may be resumed from elsewhere, or lie elsewhere by now.

    Args:
        values: the options that it was started with.
        cwd: where it was started, if that is known.
        folder: where it lies now.
    """
    found = dict(values)
    for name in _SOURCES:
        if cwd is None or values[name] in (None, "demo"):
            continue
        if os.path.exists(path := os.path.join(cwd, values[name])):
            found[name] = path
    output_dir, save_path = values["output_dir"], values["save_path"]
    if output_dir and save_path and Path(save_path).is_relative_to(output_dir):
        found["save_path"] = str(folder / Path(save_path).relative_to(output_dir))
    return found


def _are_one_path(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _demo_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The demo's own defaults, if the demo is what runs."""
    if not build(TrainOptions, given).is_demo:
        return {}
    is_packed = given.get("sample_packing") or given.get("streaming")
    return DEMO_DEFAULTS | ({} if is_packed else _DEMO_UNPACKED)


def _with_stream(options: TrainOptions, asked: Mapping[str, Any]) -> TrainOptions:
    """The options as a stream decides them: its documents are packed as they come.

    Raises:
        InputError: an option needs to know all of the data, or contradicts a stream.
    """
    data = options.data
    if options.training.max_steps is None:
        raise InputError(
            "streaming is set and max_steps is not, but a stream has no length; give --max_steps"
        )
    if asked.get("sample_packing") is False:
        raise InputError(
            "sample_packing is false, but the documents of a stream are packed as they come; leave out "
            "--sample_packing, or --streaming"
        )
    if data.keep_examples_per_update:
        raise InputError(
            "keep_examples_per_update is set, but nobody knows the lengths of a stream's documents; give "
            "--gradient_accumulation_steps"
        )
    if folder := find_packs(data.dataset):
        raise InputError(
            f"streaming is set and {folder} holds packed rows, which stay on the disk anyway; leave out "
            "--streaming"
        )
    return changed(options, {"sample_packing": True})


def _with_packs(options: TrainOptions, asked: Mapping[str, Any]) -> TrainOptions:
    """The options as rows that are packed on disk decide them: trained on as packed, of their own length.

    Args:
        asked: the values that somebody asked for, now or when the resumed run began, by name.
    """
    if folder := find_packs(options.data.dataset):
        packs = read_manifest(folder)
        decided = {
            "sample_packing": True,
            "padding_free": True,
            "train_on_responses_only": packs.train_on_responses_only,
        }
        _refuse_otherwise(asked, decided, folder)
        length = asked.get("max_seq_length", packs.capacity)
        options = changed(options, {**decided, "max_seq_length": length})
        _check_capacity(folder, packs.capacity, length)
    if options.data.eval_dataset and (folder := find_packs(options.data.eval_dataset)):
        packs = read_manifest(folder)
        decided = {"sample_packing": True, "train_on_responses_only": packs.train_on_responses_only}
        _refuse_otherwise(flat(options), decided, folder)
        _refuse_otherwise(asked, {"eval_packing": True}, folder)
        options = changed(options, {"eval_packing": True})
        _check_capacity(folder, packs.capacity, options.model.max_seq_length)
    return options


def _refuse_otherwise(asked: Mapping[str, Any], decided: Mapping[str, Any], folder: Path) -> None:
    for name, value in decided.items():
        if asked.get(name, value) != value:
            raise InputError(
                f"{name} is {asked[name]}, but {value} for the packed rows in {folder}; "
                f"give --{name} {str(value).lower()}, or other data"
            )


def _check_capacity(folder: Path, capacity: int, max_seq_length: int) -> None:
    if max_seq_length < capacity:
        raise InputError(
            f"max_seq_length is {max_seq_length} and {folder} holds rows of up to {capacity} tokens; "
            f"give --max_seq_length {capacity}, or pack the data anew"
        )


def _with_dependent_defaults(options: TrainOptions) -> TrainOptions:
    """The options with those defaults that depend on other options."""
    training, output = options.training, options.output
    found: dict[str, Any] = {}
    rows = training.per_device_train_batch_size or (1 if options.data.sample_packing else 2)
    found["per_device_train_batch_size"] = rows
    found["per_device_eval_batch_size"] = training.per_device_eval_batch_size or rows
    if training.max_steps is None and training.num_train_epochs is None:
        found["max_steps"] = 400
    folder = _default_folder(options) if output.output_dir is None else output.output_dir
    found["output_dir"] = folder
    if output.save_path is None and output.save_model:
        found["save_path"] = str(Path(folder) / "merged")
    return changed(options, found)


def _default_folder(options: TrainOptions) -> str:
    if count_processes() > 1:
        raise InputError(
            "output_dir is missing, and its default differs between processes, because it contains the time; "
            "give --output_dir"
        )
    model = _as_name(Path(options.model.model_name).name)  # Qwen2.5-0.5B has no suffix
    dataset = _as_name(Path(options.data.dataset).stem)
    return f"outputs/{model}-{dataset}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _as_name(text: str) -> str:
    """A part of a folder's name: letters, digits, dots and dashes, not too many."""
    return re.sub(r"[^\w.-]+", "-", text)[:50] or "run"

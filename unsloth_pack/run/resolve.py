"""Fill in what the caller left out: from the resumed run, the demo, packs on disk or the adapter."""

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from unsloth_pack.config import OPTIONS, TrainOptions, changed, flat, read_record
from unsloth_pack.config.options import OWN_TEACHERS, DataOptions
from unsloth_pack.data.rows import ANSWERS_OF
from unsloth_pack.data.sources import DataSet
from unsloth_pack.demo import BUNDLED_MODELS, DEFAULTS
from unsloth_pack.errors import InputError, written
from unsloth_pack.packing import PackManifest, find_packs, read_manifest
from unsloth_pack.report.metrics import read_config, read_fact
from unsloth_pack.run.from_adapter import saved_config, values_of_adapter
from unsloth_pack.run.machine import count_processes

# The data sets that options name: as a path, or as a list of objects, see `config.values.DataSets`.

Named = str | Sequence[Mapping[str, Any]]


def data_sets_of(
    named: Named,
    columns: Mapping[str, str | None] | None = None,
    split: str | None = None,
    *,
    are_shared: bool = False,
) -> list[DataSet]:
    """The data sets that an option names.

    Args:
        columns, split: of those that have none of their own. A single file has no splits, and is read whole
            beside others.
        are_shared: data sets elsewhere have these columns too.
    """
    items: Sequence[Mapping[str, Any]] = [{"path": named}] if isinstance(named, str) else named
    without = [item for item in items if "columns" not in item]
    shared = {"columns": columns or {}, "shares_columns": are_shared or len(without) > 1}
    sets = [DataSet(**{**({} if "columns" in item else shared), **item}) for item in items]
    have_splits = [each for each in sets if each.has_splits] or sets
    return [replace(each, split=each.split or split) if each in have_splits else each for each in sets]


def training_sets(data: DataOptions) -> list[DataSet]:
    """The data sets that a run trains on."""
    return data_sets_of(data.dataset, data.columns, data.split)


def evaluation_sets(data: DataOptions) -> list[DataSet]:
    """The data sets that a run evaluates on. They may lack columns of the training data."""
    if data.eval_dataset is None:
        return []
    return data_sets_of(data.eval_dataset, data.columns, are_shared=True)


def paths_of(named: Named | None) -> list[str]:
    """The paths of the data sets."""
    if named is None:
        return []
    return [named] if isinstance(named, str) else [item["path"] for item in named]


def with_paths(named: Named, change: Callable[[str], str]) -> Named:
    """The same data sets, or function of a file (`FILE.py:NAME`), with other paths."""
    if isinstance(named, str):
        file, of_file, name = named.partition(".py:")
        return f"{change(file + '.py')}:{name}" if of_file else change(named)
    return [{**item, "path": change(item["path"])} for item in named]


# What a resumed run may change: nothing that alters the order of the data, the steps or the weights.
FREE_ON_RESUME = {"config", "resume", "dry_run", "output_dir", "logging_steps", "verbose", "report_to"}
FREE_ON_RESUME |= {"save_model", "save_method", "save_path", "save_steps", "attn_backend", "no_probe"}
FREE_ON_RESUME |= {"use_gradient_checkpointing", "on_nonfinite", "num_proc", "save_delay_steps"}
FREE_ON_RESUME |= {"push_to_hub", "dataloader_num_workers"}
# What a run reads
SOURCES = (
    *("model_name", "dataset", "eval_dataset", "image_folder", "add_tokens", "init_adapter", "teacher"),
    "rollout_function",
)
_CHOOSING_ROWS = ("mixture", "columns", "split", "sample_limit", "eval_fraction")
# The demo's defaults are for packed rows; a batch of single documents holds about as many of them.
_DEMO_UNPACKED = {"per_device_train_batch_size": 16}


def resolve(asked: TrainOptions) -> TrainOptions:
    """Fill in all defaults but those that depend on the device, see `with_optimizer`.

    A value comes from the command line, else from the config file, else from the run that is resumed or from
    the demo, else it is the default. Nothing comes from an adapter that is not there: an earlier stage may
    have yet to make it.

    Raises:
        InputError: the resumed run is missing or was started otherwise, or an option contradicts packed rows.
    """
    given = asked.given
    if given.get("resume") and asked.training.per_device_train_batch_size == "auto":
        given = {name: value for name, value in given.items() if value != "auto"}  # as many as before
    resumed = _resumed_run(given) if given.get("resume") else {}
    options = changed(asked, {**(resumed or _demo_values(asked)), **given})
    if resumed:
        options = _with_rows_of_an_update(options)
    options = changed(options, values_of_adapter(options.adapter, given))
    if options.training.objective == "rollouts":  # its prompts are read as they are needed
        options = changed(options, {"streaming": True})
    if options.data.streaming:  # its documents are packed as they come
        options = changed(options, {"sample_packing": True})
    return _with_dependent_defaults(_with_packs(options, {**resumed, **given}))


def with_optimizer(options: TrainOptions, device_type: str) -> TrainOptions:
    """Fill in the default optimizer of a device, "cuda" or "cpu"."""
    if options.training.optim is not None:
        return options
    return changed(options, {"optim": "adamw_torch_fused" if device_type == "cuda" else "adamw_torch"})


def _resumed_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the run in `output_dir`."""
    if "output_dir" not in given:
        raise InputError("--resume needs --output_dir; name the folder of the run to continue")
    if given.get("overwrite_output_dir"):
        raise InputError("--resume and --overwrite_output_dir contradict each other; give one of them")
    folder = Path(given["output_dir"])
    known = flat(TrainOptions()).keys() - {"overwrite_output_dir"}  # which was done when the run began
    recorded = {name: value for name, value in read_config(folder).items() if name in known}
    read = read_record(recorded, f"{folder}: no configuration of a run to resume")
    started_with = flat(changed(TrainOptions(), read))
    moved = _moved(started_with, read_fact(folder, "cwd"), folder)
    for name, value in given.items():
        was = started_with[name]
        is_same = value == was or (name in SOURCES and _is_one_source(value, moved[name]))
        if name in recorded and name not in FREE_ON_RESUME and not is_same:
            raise InputError(
                f"{name} is {written(value)} and was {written(was)} when the run began that --resume "
                f"continues; leave out --{name}, or start a new run"
            )
    return {name: moved[name] for name in recorded}


def _with_rows_of_an_update(options: TrainOptions) -> TrainOptions:
    """Have the updates of a resumed run see as many rows on another number of processes."""
    before, now = read_fact(options.output.folder, "processes"), count_processes()
    steps = options.training.gradient_accumulation_steps * (before or now) // now
    return changed(options, {"gradient_accumulation_steps": max(1, steps)})


def _moved(values: dict[str, Any], cwd: str | None, folder: Path) -> dict[str, Any]:
    """The options of a run that was started in the folder `cwd`, and lies in `folder` now."""
    moved = dict(values)
    for name in SOURCES:
        is_own = name == "teacher" and values[name] in OWN_TEACHERS
        if cwd is not None and values[name] is not None and not is_own:
            moved[name] = with_paths(values[name], partial(_path_from, cwd))
    output_dir, save_path = values["output_dir"], values["save_path"]
    if output_dir and save_path and Path(save_path).is_relative_to(output_dir):
        moved["save_path"] = str(folder / Path(save_path).relative_to(output_dir))
    return moved


def _path_from(cwd: str, path: str) -> str:
    """A path relative to the folder `cwd`; a name of the hub stays."""
    there = os.path.join(cwd, path)
    return there if path not in BUNDLED_MODELS and os.path.exists(there) else path


def _is_one_source(one: Any, other: Any) -> bool:
    """Whether two values of an option name the same files, the same part of them, and the same weights."""
    if one is None or other is None or with_paths(one, lambda _: "") != with_paths(other, lambda _: ""):
        return False
    return all(
        a == b or (os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b))
        for a, b in zip(paths_of(one), paths_of(other), strict=True)
    )


def _demo_values(asked: TrainOptions) -> dict[str, Any]:
    """The defaults of a demo, if a bundled model trains on its own data, as it does by default."""
    name, adapter, given = asked.model.model_name, asked.adapter.init_adapter, asked.given
    if adapter is not None and os.path.exists(adapter):
        name = saved_config(adapter)["base_model_name_or_path"]
    if name not in BUNDLED_MODELS or given.get("dataset", name) != name:
        return {}
    is_packed = given.get("sample_packing") or given.get("streaming")
    return DEFAULTS[name] | {"dataset": name} | ({} if is_packed else _DEMO_UNPACKED)


def _with_packs(options: TrainOptions, requested: Mapping[str, Any]) -> TrainOptions:
    """Take from rows that are packed on disk how they are trained on, and how long they are."""
    stored = {name: _stored_temperature(options, name) for name in ("dataset", "eval_dataset")}
    if folder := packs_in(options.data.dataset):
        packs = _packs_for(options.training.objective, folder)
        fixed = {"sample_packing": True, "padding_free": True}
        fixed |= {"train_on_responses_only": packs.train_on_responses_only, **stored["dataset"]}
        # The rows are chosen already
        chosen = {name: OPTIONS[name].default for name in _CHOOSING_ROWS}
        length = requested.get("max_seq_length", packs.capacity)
        _refuse_otherwise({**requested, "max_seq_length": length}, fixed | chosen, folder, packs.capacity)
        options = changed(options, {**fixed, "max_seq_length": length})
    if options.data.eval_dataset and (folder := packs_in(options.data.eval_dataset)):
        packs = _packs_for(options.training.objective, folder)
        fixed = {"sample_packing": True, "train_on_responses_only": packs.train_on_responses_only}
        fixed |= stored["eval_dataset"]
        _refuse_otherwise(flat(options), fixed, folder, packs.capacity)
        _refuse_otherwise(requested, {"eval_packing": True}, folder)
        options = changed(options, {"eval_packing": True})
    return options


def _packs_for(objective: str, folder: Path) -> PackManifest:
    """The manifest of packs whose documents are those of an objective."""
    packs = read_manifest(folder)
    if ANSWERS_OF.get(objective) != ANSWERS_OF.get(packs.objective):
        raise InputError(
            f"objective is {objective!r}, but {packs.objective!r} for the packed rows in {folder}; give "
            f"--objective {packs.objective}, or other data"
        )
    return packs


def _stored_temperature(options: TrainOptions, name: str) -> dict[str, Any]:
    """The temperature of the teacher in the packs that an option names, where a stored one teaches."""
    named = getattr(options.data, name)
    if (options.training.objective, options.distill.teacher) != ("distill", "stored") or named is None:
        return {}
    folder = packs_in(named)
    teacher = None if folder is None else read_manifest(folder).teacher
    if teacher is None:
        problem = f"teacher is 'stored', and {name} {', '.join(paths_of(named))} holds none"
        raise InputError(f"{problem}; give packs that `unsloth-pack teach` wrote")
    return {"temperature": teacher.temperature}


def packs_in(named: Named) -> Path | None:
    """The folder of packed rows that an option names."""
    folder = next(filter(None, map(find_packs, paths_of(named))), None)
    if folder is not None and not isinstance(named, str):
        raise InputError(
            f"{folder} holds packed rows, which are trained on alone and as they were packed; name it as "
            "a single path, or pack the data sets together with `unsloth-pack pack`"
        )
    return folder


def _refuse_otherwise(
    requested: Mapping[str, Any], fixed: Mapping[str, object], folder: Path, capacity: int = 0
) -> None:
    for name, value in fixed.items():
        if requested.get(name, value) != value:
            raise InputError(
                f"{name} is {written(requested[name])}, but {written(value)} for the packed rows in "
                f"{folder}; give --{name} {written(value)}, or other data"
            )
    max_seq_length = requested.get("max_seq_length", capacity)
    if max_seq_length < capacity:
        raise InputError(
            f"max_seq_length is {max_seq_length} and {folder} holds rows of up to {capacity} tokens; "
            f"give --max_seq_length {capacity}, or pack the data anew"
        )


def _with_dependent_defaults(options: TrainOptions) -> TrainOptions:
    """Fill in the defaults that depend on other options."""
    training, output = options.training, options.output
    asked = training.per_device_train_batch_size or (1 if options.data.sample_packing else 2)
    rows = 1 if asked == "auto" else asked
    values: dict[str, Any] = {"per_device_train_batch_size": asked}
    values["per_device_eval_batch_size"] = training.per_device_eval_batch_size or rows
    has_end = options.data.streaming or training.num_train_epochs is not None  # a stream has to be given one
    if training.max_steps is None and not has_end:
        values["max_steps"] = 400
    if training.effective_batch_size is not None:  # `validate` refuses one that does not divide
        steps = training.effective_batch_size // (rows * count_processes())
        values["gradient_accumulation_steps"] = max(1, steps)
    values["output_dir"] = _default_folder(options) if output.output_dir is None else output.output_dir
    if output.save_path is None and output.save_model:
        values["save_path"] = str(Path(values["output_dir"]) / "merged")
    return changed(options, values)


def _default_folder(options: TrainOptions) -> str:
    if count_processes() > 1:
        raise InputError(
            "output_dir is missing, and its default differs between processes, because it contains the time; "
            "give --output_dir"
        )
    model = _as_name(Path(options.model.model_name).name)  # Qwen2.5-0.5B has no suffix
    dataset = _as_name("-".join(Path(path).stem for path in paths_of(options.data.dataset)))
    return f"outputs/{model}-{dataset}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def _as_name(text: str) -> str:
    """A part of a folder's name: letters, digits, dots and dashes, not too many."""
    return re.sub(r"[^\w.-]+", "-", text)[:50] or "run"

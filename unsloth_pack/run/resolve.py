"""From the options that were given to those of a run, which may be resumed, the demo, or on packed rows."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from unsloth_pack.config import TrainOptions, changed, flat, load, read_record, telling_places
from unsloth_pack.config.options import DataOptions, TrainingOptions
from unsloth_pack.data.sources import DataSet
from unsloth_pack.demo import BUNDLED_MODELS, DEFAULTS
from unsloth_pack.errors import InputError, about, at_once, written
from unsloth_pack.packing import find_packs, read_manifest
from unsloth_pack.run.from_adapter import check_init_adapter, saved_config, with_init_adapter
from unsloth_pack.run.machine import count_processes
from unsloth_pack.run.trained import check_of_an_adapter

# The data sets that options name: as a path, or as a list of objects, see `config.values.DataSets`.

Named = str | Sequence[Mapping[str, Any]]


def data_sets_of(
    named: Named,
    columns: Mapping[str, str | None] | None = None,
    split: str | None = None,
    *,
    are_shared: bool = False,
    option: str = "dataset",
) -> list[DataSet]:
    """The data sets.

    Args:
        named: by the option `option`.
        columns, split: of those that have none of their own. A single file has no splits, and is read whole
            beside others.
        are_shared: whether data sets elsewhere have these columns too.
    """
    items: Sequence[Mapping[str, Any]] = [{"path": named}] if isinstance(named, str) else named
    without = [item for item in items if "columns" not in item]
    shared = {"columns": columns or {}, "shares_columns": are_shared or len(without) > 1}
    options = [option] if isinstance(named, str) else [f"{option}.{number}" for number in range(len(items))]
    sets = [
        DataSet(**{**({} if "columns" in item else shared), **item, "option": name})
        for item, name in zip(items, options, strict=True)
    ]
    have_splits = [each for each in sets if each.has_splits] or sets
    return [replace(each, split=each.split or split) if each in have_splits else each for each in sets]


def training_sets(data: DataOptions) -> list[DataSet]:
    """What a run trains on."""
    return data_sets_of(data.dataset, data.columns, data.split)


def evaluation_sets(data: DataOptions) -> list[DataSet]:
    """What a run evaluates on, beside what it holds out of the training.

    Columns that the training data has may be missing here: the data may have a format already.
    """
    if data.eval_dataset is None:
        return []
    named = data_sets_of(data.eval_dataset, data.columns, are_shared=True, option="eval_dataset")
    return [first_rows(each, data.sample_limit) for each in named]


def first_rows(data_set: DataSet, most: int | None) -> DataSet:
    """The data set with no more rows than `most`."""
    limits = [limit for limit in (data_set.limit, most) if limit is not None]
    return replace(data_set, limit=min(limits, default=None))


def check_data(data: DataOptions) -> Iterator[InputError]:
    """Refuse to mix a single data set, whose documents come as they are, and columns that no data set has."""
    if data.mixture != DataOptions().mixture and len(paths_of(data.dataset)) == 1:
        yield InputError(
            f"mixture is {data.mixture!r}, and there is one data set, {name_of(data.dataset)}; leave out "
            "--mixture, or name several in dataset",
            about="mixture",
        )
    named = (data.dataset, data.eval_dataset or [])
    is_used = any(isinstance(each, str) or any("columns" not in item for item in each) for each in named)
    if data.columns and not is_used:
        yield InputError(
            "columns is set, and every item of dataset has columns of its own; leave out --columns",
            about="columns",
        )


def paths_of(named: Named | None) -> list[str]:
    """The paths of the data sets."""
    if named is None:
        return []
    return [named] if isinstance(named, str) else [item["path"] for item in named]


def name_of(named: Named | None) -> str:
    """What the data is called in a message."""
    return ", ".join(paths_of(named))


def with_paths(named: Named, change: Callable[[str], str]) -> Named:
    """The same data sets, where they lie now."""
    if isinstance(named, str):
        return change(named)
    return [{**item, "path": change(item["path"])} for item in named]


# What a resumed run may change: nothing that alters the order of the data, the steps or the weights.
FREE_ON_RESUME = {"config", "resume", "output_dir", "logging_steps", "report_to"}
FREE_ON_RESUME |= {"save_model", "save_method", "save_path", "save_steps", "attn_backend", "no_probe"}
FREE_ON_RESUME |= {"use_gradient_checkpointing", "on_nonfinite", "num_proc", "save_delay_steps"}
FREE_ON_RESUME |= {"push_to_hub", "dataloader_num_workers"}
SCHEDULES_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
# What a run reads
_SOURCES = ("model_name", "dataset", "eval_dataset", "image_folder", "add_tokens", "init_adapter")
# The demo's defaults are for packed rows; a batch of single documents holds about as many of them.
_DEMO_UNPACKED = {"per_device_train_batch_size": 16}


def read_options(arguments: Sequence[str]) -> TrainOptions:
    """The options of a run, with all defaults filled in but those that depend on the device.

    A value comes from the command line, else from the config file, else from the run that is resumed or from
    the demo, else it is the default.

    Raises:
        InputError: as `load` and `resolve`.
    """
    asked = load(arguments)
    with telling_places(asked):
        return resolve(asked.given)


def resolve(given: Mapping[str, Any], *, may_lack_adapter: bool = False) -> TrainOptions:
    """The options of a run; what depends on the device is left to `with_optimizer`.

    Args:
        given: the values that somebody asked for, by name.
        may_lack_adapter: whether the adapter that the run begins with may be missing, as an earlier stage
            has yet to make it; then nothing comes from it.

    Raises:
        InputError: as `filled_in`, or what was asked for contradicts itself.
    """
    options = filled_in(given, may_lack_adapter=may_lack_adapter)
    check_given(options, given)
    return options


def check_given(options: TrainOptions, given: Mapping[str, Any]) -> None:
    """Refuse values that somebody asked for and that contradict each other, all at once.

    Raises:
        InputError: names the options, their values and the remedy.
    """
    checks = [_check_warmup, _check_accumulation, _check_stream, check_of_an_adapter, check_init_adapter]
    at_once(partial(check, options, given) for check in checks)


def filled_in(given: Mapping[str, Any], *, may_lack_adapter: bool = False) -> TrainOptions:
    """As `resolve`, with less checked.

    Raises:
        InputError: the resumed run is missing or was started otherwise, or an option contradicts packed rows.
    """
    resumed = _resumed_run(given) if given.get("resume") else {}
    options = changed(TrainOptions(), {**(resumed or _demo_values(given)), **given})
    asked = {**resumed, **given}
    adapter = options.adapter.init_adapter
    if not (may_lack_adapter and adapter is not None and not os.path.exists(adapter)):
        options = with_init_adapter(options, given)
    if options.data.streaming:  # its documents are packed as they come
        options = changed(options, {"sample_packing": True})
    options = _with_packs(options, asked)
    return _with_accumulation(_with_dependent_defaults(options))


def with_optimizer(options: TrainOptions, device_type: str) -> TrainOptions:
    """The options with the default optimizer of a device, "cuda" or "cpu", unless they name one."""
    if options.training.optim is not None:
        return options
    return changed(options, {"optim": "adamw_torch_fused" if device_type == "cuda" else "adamw_torch"})


def _resumed_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the run in `output_dir` was started with."""
    from unsloth_pack.report.metrics import read_config, read_cwd

    if "output_dir" not in given:
        raise InputError(
            "--resume needs --output_dir; name the folder of the run to continue", about="resume"
        )
    if given.get("overwrite_output_dir"):
        raise InputError(
            "--resume and --overwrite_output_dir contradict each other; give one of them",
            about=("resume", "overwrite_output_dir"),
        )
    folder = Path(given["output_dir"])
    known = flat(TrainOptions()).keys() - {"overwrite_output_dir"}  # which was done when the run began
    recorded = {name: value for name, value in read_config(folder).items() if name in known}
    read = read_record(recorded, f"{folder}: no configuration of a run to resume")
    started_with = flat(changed(TrainOptions(), read))
    found = _found_again(started_with, read_cwd(folder), folder)
    for name, value in given.items():
        was = started_with[name]
        is_same = value == was or (name in _SOURCES and _are_one_source(value, found[name]))
        if name in recorded and name not in FREE_ON_RESUME and not is_same:
            raise InputError(
                f"--resume continues a run as it was started: {name} was {written(was)}, not "
                f"{written(value)}; leave out --{name}, or start a new run",
                about=name,
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
        if cwd is not None and values[name] is not None:
            found[name] = with_paths(values[name], partial(_path_from, cwd))
    output_dir, save_path = values["output_dir"], values["save_path"]
    if output_dir and save_path and Path(save_path).is_relative_to(output_dir):
        found["save_path"] = str(folder / Path(save_path).relative_to(output_dir))
    return found


def _path_from(cwd: Path, path: str) -> str:
    """Where a path leads that was given in the folder `cwd`; a name that is no path stays."""
    there = os.path.join(cwd, path)
    return there if path not in BUNDLED_MODELS and os.path.exists(there) else path


def _are_one_source(one: Any, other: Any) -> bool:
    """Whether two values of an option name the same files, the same part of them, and the same weights."""
    if one is None or other is None or with_paths(one, lambda _: "") != with_paths(other, lambda _: ""):
        return False
    return all(map(_are_one_path, paths_of(one), paths_of(other)))


def _are_one_path(one: str, other: str) -> bool:
    if one == other:
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _demo_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a demo, if a bundled model runs on its own data. It does unless other data is given."""
    options = changed(TrainOptions(), given)
    name, adapter = options.model.model_name, options.adapter.init_adapter
    if adapter is not None and os.path.exists(adapter):
        name = saved_config(adapter)["base_model_name_or_path"]
    if name not in BUNDLED_MODELS or given.get("dataset", name) != name:
        return {}
    is_packed = given.get("sample_packing") or given.get("streaming")
    return DEFAULTS[name] | {"dataset": name} | ({} if is_packed else _DEMO_UNPACKED)


def _with_packs(options: TrainOptions, asked: Mapping[str, Any]) -> TrainOptions:
    """The options as rows that are packed on disk decide them: trained on as packed, of their own length.

    Args:
        asked: the values that somebody asked for, now or when the resumed run began, by name.
    """
    if folder := _packs_in(options.data.dataset):
        _refuse_choice_of_rows(options.data, asked, folder)
        with about("dataset"):
            packs = read_manifest(folder)
        decided = {
            "sample_packing": True,
            "padding_free": True,
            "train_on_responses_only": packs.train_on_responses_only,
        }
        _refuse_otherwise(asked, decided, folder, "dataset")
        length = asked.get("max_seq_length", packs.capacity)
        options = changed(options, {**decided, "max_seq_length": length})
        _check_capacity(folder, packs.capacity, length, "dataset")
    if options.data.eval_dataset and (folder := _packs_in(options.data.eval_dataset, "eval_dataset")):
        with about("eval_dataset"):
            packs = read_manifest(folder)
        decided = {"sample_packing": True, "train_on_responses_only": packs.train_on_responses_only}
        _refuse_otherwise(flat(options), decided, folder, "eval_dataset")
        _refuse_otherwise(asked, {"eval_packing": True}, folder, "eval_dataset")
        options = changed(options, {"eval_packing": True})
        _check_capacity(folder, packs.capacity, options.model.max_seq_length, "eval_dataset")
    return options


def _packs_in(named: Named, option: str = "dataset") -> Path | None:
    """The folder of packed rows that an option names, if it does.

    Raises:
        InputError: something else is named beside it, or a part of it.
    """
    for number, path in enumerate(paths_of(named)):
        folder = find_packs(path)
        if folder is not None and not isinstance(named, str):
            raise InputError(
                f"{folder} holds packed rows, which are trained on alone and as they were packed; name it as "
                "a single path, or pack the data sets together with `unsloth-pack pack`",
                about=f"{option}.{number}",
            )
        if folder is not None:
            return folder
    return None


def _refuse_choice_of_rows(data: DataOptions, asked: Mapping[str, Any], folder: Path) -> None:
    for name in ("mixture", "columns", "split", "sample_limit", "eval_fraction"):
        if name in asked and getattr(data, name) != getattr(DataOptions(), name):
            way = (
                "give --eval_dataset" if name == "eval_fraction" else f"give --{name} to `unsloth-pack pack`"
            )
            raise InputError(
                f"{name} is set, and the rows in {folder} are packed already, each with several documents; "
                f"{way}, or train on the data that it was packed from",
                about=(name, "dataset"),
            )


def _refuse_otherwise(
    asked: Mapping[str, Any], decided: Mapping[str, Any], folder: Path, option: str
) -> None:
    for name, value in decided.items():
        if asked.get(name, value) != value:
            raise InputError(
                f"{name} is {written(asked[name])}, but {written(value)} for the packed rows in {folder}; "
                f"give --{name} {written(value)}, or other data",
                about=(name, option),
            )


def _check_capacity(folder: Path, capacity: int, max_seq_length: int, option: str) -> None:
    if max_seq_length < capacity:
        raise InputError(
            f"max_seq_length is {max_seq_length} and {folder} holds rows of up to {capacity} tokens; "
            f"give --max_seq_length {capacity}, or pack the data anew",
            about=("max_seq_length", option),
        )


def _with_dependent_defaults(options: TrainOptions) -> TrainOptions:
    """The options with those defaults that depend on other options."""
    training, output = options.training, options.output
    found: dict[str, Any] = {}
    rows = training.per_device_train_batch_size or (1 if options.data.sample_packing else 2)
    found["per_device_train_batch_size"] = rows
    found["per_device_eval_batch_size"] = training.per_device_eval_batch_size or rows
    has_end = options.data.streaming or training.num_train_epochs is not None  # a stream has to be given one
    if training.max_steps is None and not has_end:
        found["max_steps"] = 400
    folder = _default_folder(options) if output.output_dir is None else output.output_dir
    found["output_dir"] = folder
    if output.save_path is None and output.save_model:
        found["save_path"] = str(Path(folder) / "merged")
    return changed(options, found)


def _with_accumulation(options: TrainOptions) -> TrainOptions:
    """The options with as many steps an update as `effective_batch_size` asks for."""
    if options.training.effective_batch_size is None:
        return options
    steps, _ = _steps_of_an_update(options.training)
    return changed(options, {"gradient_accumulation_steps": max(1, steps)})


def _steps_of_an_update(training: TrainingOptions) -> tuple[int, int]:
    """How many `effective_batch_size` asks for, and the rows that remain."""
    rows = (training.per_device_train_batch_size or 1) * count_processes()
    return divmod(training.effective_batch_size or 0, rows)


def _check_stream(options: TrainOptions, given: Mapping[str, Any]) -> Iterator[InputError]:
    """Refuse what needs to know all of the data, or contradicts a stream."""
    data = options.data
    if not data.streaming:
        return
    if options.training.max_steps is None:
        yield InputError(
            "streaming is set and max_steps is not, but a stream has no length; give --max_steps",
            about="streaming",
        )
    if given.get("sample_packing") is False:
        yield InputError(
            "sample_packing is false, but the documents of a stream are packed as they come; leave out "
            "--sample_packing, or --streaming",
            about=("sample_packing", "streaming"),
        )
    if data.keep_examples_per_update:
        yield InputError(
            "keep_examples_per_update is set, but nobody knows the lengths of a stream's documents; give "
            "--gradient_accumulation_steps",
            about=("keep_examples_per_update", "streaming"),
        )
    if folder := _packs_in(data.dataset):
        yield InputError(
            f"streaming is set and {folder} holds packed rows, which stay on the disk anyway; leave out "
            "--streaming",
            about=("streaming", "dataset"),
        )


def _check_warmup(options: TrainOptions, given: Mapping[str, Any]) -> Iterator[InputError]:
    """Refuse a warmup that is given twice, or that the schedule passes over."""
    name, ratio = options.training.lr_scheduler_type, options.training.warmup_ratio
    if ratio is not None and "warmup_steps" in given:
        yield InputError(
            f"warmup_ratio is {ratio:g} and warmup_steps is {given['warmup_steps']}; give one of them",
            about=("warmup_ratio", "warmup_steps"),
        )
    for option in ("warmup_ratio", "warmup_steps"):
        if given.get(option) and name in SCHEDULES_WITHOUT_WARMUP:
            instead = "constant_with_warmup" if name == "constant" else "another lr_scheduler_type"
            yield InputError(
                f"{option} is {given[option]:g} and lr_scheduler_type is {name!r}, which has no warmup; give "
                f"{instead}, or leave out --{option}",
                about=(option, "lr_scheduler_type"),
            )


def _check_accumulation(options: TrainOptions, given: Mapping[str, Any]) -> Iterator[InputError]:
    """Refuse an `effective_batch_size` that does not divide, or is not alone in deciding the steps."""
    training = options.training
    if training.effective_batch_size is None:
        return
    others = {
        "gradient_accumulation_steps": given.get("gradient_accumulation_steps"),
        "keep_examples_per_update": given.get("keep_examples_per_update"),
    }
    for name, value in others.items():
        if value:
            yield InputError(
                f"effective_batch_size is {training.effective_batch_size} and {name} is {written(value)}, "
                f"but either decides the steps of an update; leave out --{name}",
                about=("effective_batch_size", name),
            )
    steps, rest = _steps_of_an_update(training)
    if rest or not steps:
        rows = (training.per_device_train_batch_size or 1) * count_processes()
        yield InputError(
            f"effective_batch_size is {training.effective_batch_size}, which {rows} rows a step "
            f"(per_device_train_batch_size times {count_processes()} processes) do not divide; give a "
            f"multiple of {rows}",
            about=("effective_batch_size", "per_device_train_batch_size"),
        )


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

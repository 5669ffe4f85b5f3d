"""The folder of a run: what may be there before it begins, and what a resumed run goes on with."""

import glob
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.checkpoints.names import (
    ADAPTER,
    ADAPTER_CONFIG,
    CARD,
    MERGED_BASE,
    RUN_CONFIG,
    TOKENIZER,
    VOCABULARY,
    holds_model,
    model_files,
)
from unsloth_pack.config import OPTIONS, SECTIONS, TrainOptions, flat
from unsloth_pack.config.yaml12 import line_of
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.demo import BUNDLED_MODELS, DEFAULTS
from unsloth_pack.errors import Check, InputError, about, at_once
from unsloth_pack.report.metrics import FILE_NAME
from unsloth_pack.run.from_adapter import check_merged_base, has_merged_base
from unsloth_pack.run.machine import check_new_folder, check_writable, count_processes, is_main_process
from unsloth_pack.run.resolve import SCHEDULES_WITHOUT_WARMUP, name_of, paths_of, resolve, with_paths
from unsloth_pack.run.trained import OF_AN_ADAPTER

# The values of a run as a config file: `config.yaml` in its folder, and what `config show` prints.

_FIRST_LINE = "# Written by a run of unsloth-pack, with all defaults filled in.\n"
_HEAD = f"""{_FIRST_LINE}# To repeat the run: unsloth-pack --config {RUN_CONFIG} --output_dir FOLDER
# output_dir and save_path are left out, because a second run needs folders of its own.
"""
_OF_ONE_RUN = ("output_dir", "save_path")
_FOR_THE_COMMAND_LINE = ("config", "resume", "overwrite_output_dir")
# Options that may name files
_READ = (
    *("model_name", "dataset", "eval_dataset", "image_folder", "add_tokens", "init_adapter"),
    *("fsdp", "deepspeed"),
)
_WIDEST = 44  # columns of a value whose origin stands in line with the others


def save_config(options: TrainOptions) -> None:
    """Write the options into the folder of the run, unless a file of that name is there that no run wrote."""
    path = options.folder / RUN_CONFIG
    if os.path.lexists(path) and not is_of_a_run(path):
        return
    values = flat(options) | dict.fromkeys(_decided_by(options))
    values |= {name: with_paths(values[name], _from_anywhere) for name in _READ if values[name] is not None}
    lines = _HEAD
    for section, kind in SECTIONS.items():
        names = [n for n in kind.model_fields if n not in (*_OF_ONE_RUN, *_FOR_THE_COMMAND_LINE)]
        lines += f"{section}:\n" + "".join(f"  {line_of(name, values[name])}\n" for name in names)
    with write_file(path) as file:
        file.write(lines.encode())


def is_of_a_run(path: Path) -> bool:
    """Whether a run wrote the file, which then may be replaced; a link is none, whatever it leads to."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline() == _FIRST_LINE.encode()


def _from_anywhere(name: str) -> str:
    """The absolute path of what lies here; a name of the hub, the demo or a preset as it is."""
    is_here = name not in BUNDLED_MODELS and (os.path.exists(name) or glob.glob(name))
    return os.path.abspath(name) if is_here else name


def _decided_by(options: TrainOptions) -> dict[str, str]:
    """The options whose values another one decides, by name. A file that gives both is refused."""
    found = dict.fromkeys(OF_AN_ADAPTER, "tuning") if options.adapter.tuning == "full" else {}
    if options.training.lr_scheduler_type in SCHEDULES_WITHOUT_WARMUP:
        found["warmup_steps"] = "lr_scheduler_type"
    if options.training.warmup_ratio is not None:
        found["warmup_steps"] = "warmup_ratio"
    if options.training.effective_batch_size is not None:
        found["gradient_accumulation_steps"] = "effective_batch_size"
    return found


def lines_with_origins(asked: TrainOptions) -> Iterator[str]:
    """Every value of a run, in sections, as lines of YAML that end with the origin of the value."""
    given = asked.given
    options = resolve(given, may_lack_adapter=True)
    values, decided = flat(options), _decided_by(options)
    for section, kind in SECTIONS.items():
        yield f"{section}:"
        for name in kind.model_fields:
            value = None if name in _OF_ONE_RUN else values[name]
            if name in _FOR_THE_COMMAND_LINE:
                continue
            if name in given and isinstance(given[name], dict) and given[name]:
                yield f"  {name}:"
                for part, each in given[name].items():
                    yield _line(f"    {line_of(part, each)}", _origin(asked, f"{name}.{part}"))
            elif name in given:
                yield _line(f"  {line_of(name, values[name])}", _origin(asked, name))
            elif name in decided:
                yield _line(f"  {line_of(name, None)}", f"follows from {decided[name]}")
            else:
                yield _line(f"  {line_of(name, value)}", _why(name, value, options))


def _line(line: str, origin: str) -> str:
    return f"{line:{_WIDEST + len(line) - len(line.lstrip())}}  # {origin}"


def _origin(asked: TrainOptions, name: str) -> str:
    place = asked.place_of(name)
    return f"{place[0]}:{place[1]}" if place else "command line"


def _why(name: str, value: Any, options: TrainOptions) -> str:
    """Why an option has a value that nobody asked for."""
    if options.output.resume:
        return "the run that is resumed"
    option, of_demo = OPTIONS[name], DEFAULTS[options.model.model_name] if options.is_demo else {}
    if value != option.default and (name in of_demo or (of_demo and name == "dataset")):
        return "default of the demo"
    if value is None:
        return f"default: {option.shown_default}"
    return "default" if value == option.default else "follows from other options"


_SUFFIXES_OF_A_RUN = {
    "json",
    "jsonl",
    "safetensors",
    "png",
    "html",
    "md",
    "jinja",
    "txt",
    "model",
    "tmp",
    "yaml",
}
_RUN_FILES = (FILE_NAME, *sorted(ADAPTER))
_PLOTS_AND_CARD = ("lengths.png", "loss.png", "report.html", CARD)


def check_folders(options: TrainOptions) -> None:
    """Refuse folders that cannot be written to, or hold files that the run would replace, all at once.

    Raises:
        InputError: names the option, the folder and what it holds.
    """
    output, folder = options.output, options.folder
    if output.output_dir is not None and not output.output_dir.strip():
        return  # `check_paths` refuses it, and a blank save_path
    checks: list[Check] = [partial(_check_output, options)]
    if output.save_path is not None and output.save_path.strip():
        target = Path(output.save_path)
        if target.absolute().is_relative_to(folder.absolute()):  # what is wrong with the folder comes first
            at_once(checks)
            checks = []
        checks.append(partial(_check_save_path, options, target))
    at_once(checks)


def _check_output(options: TrainOptions) -> None:
    folder = options.folder
    check_writable("output_dir", folder)
    checks: list[Check] = [
        partial(_check_apart_from_data, options, folder),
        partial(_check_held, options, folder),
    ]
    checks += [partial(check_merged_base, options)] if is_main_process() else []
    checks += [partial(_check_resumable, folder)] if options.output.resume else []
    at_once(checks)


def _check_held(options: TrainOptions, folder: Path) -> None:
    """Refuse a folder with files of another model or run, or of the names that a run writes."""
    begins, may_replace = f"output_dir {str(folder)!r} holds", _may_replace(options)
    with about("output_dir"):
        if holds_model(folder) and not (may_replace and _is_full_run(folder)):
            raise InputError(f"{begins} a model; give another folder")
        if not may_replace and is_main_process() and (found := run_files(folder)):
            raise InputError(
                f"{begins} a run already ({found[0].name}); "
                "give --resume, --overwrite_output_dir, or another folder"
            )
        if not may_replace and is_main_process() and (name := _in_the_way(folder)):
            raise InputError(
                f"{begins} {name}, and the run writes a file of that name; give another folder, or "
                "--overwrite_output_dir to replace it"
            )
        config = folder / RUN_CONFIG
        if options.output.overwrite_output_dir and os.path.lexists(config) and not is_of_a_run(config):
            raise InputError(f"{begins} a {RUN_CONFIG} that no run wrote; move it, or give another folder")


def _may_replace(options: TrainOptions) -> bool:
    return options.output.overwrite_output_dir or options.output.resume


def _is_full_run(folder: Path) -> bool:
    """Whether the model in `folder` is what a run with full tuning has saved there."""
    from unsloth_pack.report.metrics import read_config

    with suppress(InputError):
        return bool(read_config(folder).get("tuning") == "full")
    return False


def _in_the_way(folder: Path) -> str | None:
    """A file in `folder` of a name that a run writes there."""
    names = sorted({*_PLOTS_AND_CARD, RUN_CONFIG, *TOKENIZER, *VOCABULARY})
    return next((name for name in names if os.path.lexists(folder / name)), None)


def _is_of_the_run(target: Path, folder: Path) -> bool:
    """Whether `target` is where the run in `folder` saves its merged model."""
    from unsloth_pack.report.metrics import read_config, read_cwd

    saved = [folder / "merged"]
    with suppress(InputError):  # there is no run
        run, cwd = read_config(folder), read_cwd(folder) or Path()
        was_started_here = (cwd / str(run.get("output_dir"))).resolve() == folder.resolve()
        if run.get("save_path") and was_started_here:  # else it is a copy, and that model is the original's
            saved.append(cwd / run["save_path"])
    return target.resolve() in [path.resolve() for path in saved]


def _check_save_path(options: TrainOptions, target: Path) -> None:
    folder, begins = options.folder, f"save_path {str(target)!r}"
    check_writable("save_path", target)
    may_replace = _may_replace(options) and _is_of_the_run(target, folder)
    with about("save_path"):
        if target.resolve() == folder.resolve():
            raise InputError(f"{begins} is output_dir, which gets the adapter; give another folder")
        if _is_taken(target, folder):
            raise InputError(f"{begins} is where the run itself writes in output_dir; give another folder")
        if target.is_symlink() and target.parent.resolve() == folder.resolve():
            raise InputError(f"{begins} is a link; remove it, or give the folder that it points to")
        check_new_folder("save_path", target, may_replace)


def _is_taken(target: Path, folder: Path) -> bool:
    """Whether `target` is one of the files or folders that a run saves in its `folder`, or lies in one."""
    if not target.resolve().is_relative_to(folder.resolve()):
        return False
    name = target.resolve().relative_to(folder.resolve()).parts[0]
    return name.startswith((".", "checkpoint-")) or Path(name).suffix[1:] in _SUFFIXES_OF_A_RUN


def _check_apart_from_data(options: TrainOptions, folder: Path) -> Iterator[InputError]:
    """Refuse a folder in which the run's files would be mistaken for data."""
    for name in ("dataset", "eval_dataset"):
        for data in paths_of(getattr(options.data, name)):
            if os.path.isdir(data) and folder.resolve().is_relative_to(Path(data).resolve()):
                yield InputError(
                    f"output_dir {str(folder)!r} is in {name} {data!r}, where every file is read as data; "
                    "give another folder",
                    about=("output_dir", name),
                )


def _check_resumable(folder: Path) -> None:
    from unsloth_pack.report.metrics import has_ended, read_losses, read_processes
    from unsloth_pack.training.checkpoints import has_stopped_early, last_checkpoint, state_of

    checkpoint = last_checkpoint(folder)
    if checkpoint is None:  # a run that was killed before its first checkpoint starts over
        if has_saved(folder):
            raise InputError(
                f"--resume: the run in {str(folder)!r} has saved what it trained and left no checkpoint; "
                "start a new run in another folder"
            )
        if broken := _checkpoints(folder):
            raise InputError(
                f"--resume: {broken[-1].name} in {str(folder)!r} is not whole, and there is no other "
                "checkpoint; start anew with --overwrite_output_dir"
            )
        return
    state = state_of(checkpoint)
    assert state is not None
    losses = read_losses(folder)
    for entry in state["log_history"]:
        loss, was = entry.get("loss", math.nan), losses.get(entry["step"])
        if was is not None and math.isfinite(loss) and loss != was:
            raise InputError(
                f"--resume: {checkpoint.name} in {str(folder)!r} is of another run: its loss of update "
                f"{entry['step']} is {loss:.6g}, and {FILE_NAME} has {was:.6g}; remove that checkpoint"
            )
    if (state["global_step"] >= state["max_steps"] or has_stopped_early(state)) and has_ended(folder):
        raise InputError(
            f"--resume: the run in {str(folder)!r} is complete after {state['global_step']} updates; "
            "merge its adapter with `unsloth-pack merge`, or start a new run in another folder"
        )
    before, now = read_processes(folder), count_processes()
    if before not in (None, now):
        raise InputError(
            f"--resume: the run in {str(folder)!r} had {before} processes and this one has {now}, whose "
            f"updates would see other rows; continue with {before}, or start a new run"
        )


def check_same_data(options: TrainOptions, use: str, ledger: TokenLedger, fingerprint: str | None) -> None:
    """Refuse to resume with other data than the run began with. Before a checkpoint it begins anew with any.

    Args:
        use: "train" or "eval".
        ledger, fingerprint: of that data as it is now.

    Raises:
        InputError: its rows or tokens have changed, or how they are tokenised or packed.
    """
    from unsloth_pack.report.metrics import read_data
    from unsloth_pack.training.checkpoints import last_checkpoint

    goes_on = options.output.resume and last_checkpoint(options.folder) is not None
    before = read_data(options.folder, use) if goes_on else None
    if before is None:
        return
    was, now = asdict(TokenLedger(**before["ledger"])), asdict(ledger)
    was["fingerprint"], now["fingerprint"] = before.get("fingerprint"), fingerprint
    if was != now:
        name = next(name for name in now if now[name] != was.get(name))
        data = name_of(
            options.data.eval_dataset or options.data.dataset if use == "eval" else options.data.dataset
        )
        raise InputError(
            f"--resume: {data} is not what the run began with ({name} was {was.get(name)}, is "
            f"{now[name]}); give the same data and tokenizer, or start anew",
            about="eval_dataset" if use == "eval" and options.data.eval_dataset else "dataset",
        )


def run_files(folder: Path) -> list[Path]:
    """The files and folders that a run has left in `folder`."""
    names = [*_RUN_FILES, *(model_files(folder) if _is_full_run(folder) else ())]
    names += [MERGED_BASE] if has_merged_base(folder) else []
    return [folder / name for name in names if os.path.lexists(folder / name)] + _checkpoints(folder)


def has_saved(folder: Path) -> bool:
    """Whether the run in `folder` has saved what it trained: an adapter, or a model."""
    return (folder / ADAPTER_CONFIG).exists() or (_is_full_run(folder) and holds_model(folder))


def _checkpoints(folder: Path) -> list[Path]:
    """Whole or not, and links; a folder of another name, such as checkpoint-best, is somebody's own."""
    found = sorted(folder.glob("checkpoint-*"))
    return [path for path in found if path.is_symlink() or path.name.removeprefix("checkpoint-").isdigit()]

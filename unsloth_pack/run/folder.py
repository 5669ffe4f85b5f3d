"""The folder of a run: what may be there before it begins, and how a resumed run continues."""

import glob
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.checkpoints.names import (
    ADAPTER,
    ADAPTER_CONFIG,
    CARD,
    MERGED_BASE,
    METRICS,
    RUN_CONFIG,
    TOKENIZER,
    VOCABULARY,
    holds_model,
    model_files,
)
from unsloth_pack.config import OPTIONS, SECTIONS, TrainOptions, flat
from unsloth_pack.config.options import OWN_TEACHERS, OutputOptions
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.demo import BUNDLED_MODELS, DEFAULTS
from unsloth_pack.errors import InputError, errors_of
from unsloth_pack.report.metrics import has_ended, read_data, read_fact, read_losses
from unsloth_pack.run.contradictions import OF_AN_ADAPTER, SCHEDULES_WITHOUT_WARMUP
from unsloth_pack.run.from_adapter import options_of_run
from unsloth_pack.run.machine import check_new_folder, check_writable, count_processes, is_main_process
from unsloth_pack.run.resolve import SOURCES, with_paths

# The values of a run as a config file: `config.yaml` in its folder, and what `config show` prints.

_FIRST_LINE = "# Written by a run of unsloth-pack, with all defaults filled in.\n"
_HEAD = f"""{_FIRST_LINE}# To repeat the run: unsloth-pack --config {RUN_CONFIG} --output_dir FOLDER
# output_dir and save_path are left out, because a second run needs folders of its own.
"""
_OF_ONE_RUN = ("output_dir", "save_path")
_FOR_THE_COMMAND_LINE = ("config", "dry_run", "resume", "overwrite_output_dir")
_MAY_BE_FILES = (*SOURCES, "fsdp", "deepspeed")
_OF_ONE_PERSON = ("push_to_hub", "report_to")
_WIDEST = 44  # columns of a value whose origin stands in line with the others
_RUN_FILES = (METRICS, *sorted(ADAPTER))
_REPLACEABLE = sorted({"lengths.png", "loss.png", "report.html", CARD, RUN_CONFIG, *TOKENIZER, *VOCABULARY})


def save_config(options: TrainOptions) -> None:
    """Write the options into the folder of the run, unless a file of that name is there that no run wrote."""
    path = options.output.folder / RUN_CONFIG
    if os.path.lexists(path) and not _is_of_a_run(path):
        return
    values = _values_to_repeat(options)
    lines = _HEAD
    for section, kind in SECTIONS.items():
        names = [n for n in kind.model_fields if n not in (*_OF_ONE_RUN, *_FOR_THE_COMMAND_LINE)]
        lines += f"{section}:\n" + "".join(f"  {line_of(name, values[name])}\n" for name in names)
    with write_file(path) as file:
        file.write(lines.encode())


def _values_to_repeat(options: TrainOptions) -> dict[str, Any]:
    """Every value by name, with whole paths; None for one that another option decides."""
    values = flat(options) | dict.fromkeys(_decided_by(options))
    files = {name: values[name] for name in _MAY_BE_FILES if values[name] is not None}
    if files["teacher"] in OWN_TEACHERS:
        del files["teacher"]
    return values | {name: with_paths(named, _absolute) for name, named in files.items()}


def settings_of(options: TrainOptions) -> str:
    """Return a config file that repeats the run, without the defaults."""
    asked = {"model_name", "dataset", *options.given}
    left_out = {*_OF_ONE_RUN, *_OF_ONE_PERSON, *_FOR_THE_COMMAND_LINE}
    return "".join(
        f"{line_of(name, value)}\n"
        for name, value in _values_to_repeat(options).items()
        if value is not None and name not in left_out
        if name in asked or value != OPTIONS[name].default
    )


def _is_of_a_run(path: Path) -> bool:
    """Whether a run wrote the file, which then may be replaced; a link is none, whatever it leads to."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline() == _FIRST_LINE.encode()


def _absolute(name: str) -> str:
    """The absolute path of what lies here; a name of the hub, the demo or a preset as it is."""
    is_here = name not in BUNDLED_MODELS and (os.path.exists(name) or glob.glob(name))
    return os.path.abspath(name) if is_here else name


def _decided_by(options: TrainOptions) -> dict[str, str]:
    """The options whose values another one decides, by name. A file that gives both is refused."""
    training = options.training
    decided = dict.fromkeys(OF_AN_ADAPTER, "tuning") if options.adapter.tuning == "full" else {}
    if training.lr_scheduler_type in SCHEDULES_WITHOUT_WARMUP:
        decided["warmup_steps"] = "lr_scheduler_type"
    if training.warmup_ratio is not None:
        decided["warmup_steps"] = "warmup_ratio"
    if training.effective_batch_size is not None:
        decided["gradient_accumulation_steps"] = "effective_batch_size"
    return decided


def lines_with_origins(options: TrainOptions) -> Iterator[str]:
    """Every value of a run, in sections, as lines of YAML that end with the origin of the value."""
    given, values, decided = options.given, flat(options), _decided_by(options)
    for section, kind in SECTIONS.items():
        yield f"{section}:"
        for name in kind.model_fields:
            value = None if name in _OF_ONE_RUN and name not in given else values[name]
            if name in _FOR_THE_COMMAND_LINE:
                continue
            if isinstance(given.get(name), dict) and given[name]:
                yield f"  {name}:"
                for part, each in given[name].items():
                    yield _line(f"    {line_of(part, each)}", _origin(options, f"{name}.{part}"))
            elif name in given:
                yield _line(f"  {line_of(name, value)}", _origin(options, name))
            elif name in decided:
                yield _line(f"  {line_of(name, None)}", f"follows from {decided[name]}")
            else:
                yield _line(f"  {line_of(name, value)}", _why(name, value, options))


def line_of(name: str, value: object) -> str:
    """`name: value` as one line of YAML."""
    flow = yaml.safe_dump({name: value}, default_flow_style=True, sort_keys=False, width=10**9)
    return str(flow).strip()[1:-1]


def _line(line: str, origin: str) -> str:
    return f"{line:{_WIDEST + len(line) - len(line.lstrip())}}  # {origin}"


def _origin(options: TrainOptions, name: str) -> str:
    place = options.place_of(name)
    return f"{place[0]}:{place[1]}" if place else "command line"


def _why(name: str, value: object, options: TrainOptions) -> str:
    """Why an option has a value that is not given."""
    option, of_demo = OPTIONS[name], DEFAULTS[options.model.model_name] if options.is_demo else {}
    if options.output.resume:
        return "the run that is resumed"
    if value != option.default:
        return "default of the demo" if {name} & {"dataset", *of_demo} else "follows from other options"
    return "default" if value is not None else f"default: {option.shown_default}"


# Folders that cannot be written to, or hold files that the run would replace.


def check_folders(
    output: OutputOptions, sources: Sequence[str], merges_adapter: bool
) -> Iterator[InputError]:
    """Refuse folders that cannot be written to, or hold data or files that the run would replace."""
    folder = output.folder
    check_writable("output_dir", folder)
    for path in sources:
        if os.path.isdir(path) and folder.resolve().is_relative_to(Path(path).resolve()):
            yield InputError(
                f"output_dir {str(folder)!r} is in dataset {path!r}, where every file is read as data; give "
                "another folder"
            )
    may_replace = output.overwrite_output_dir or output.resume
    replaced = options_of_run(folder) if may_replace else {}
    yield from _check_files(output, folder, may_replace, _leaves_config(replaced))
    if output.resume:
        yield from errors_of(_check_resumable, folder)
    base, is_own = folder / MERGED_BASE, replaced.get("merge_init_adapter")
    if merges_adapter and is_main_process() and os.path.lexists(base) and not is_own:
        yield InputError(
            f"merge_init_adapter puts the merged model into {str(base)!r}, which is there already; give "
            "another --output_dir"
        )
    if output.save_path is not None:
        yield from errors_of(_check_save_path, Path(output.save_path), folder, may_replace)


def _check_files(
    output: OutputOptions, folder: Path, may_replace: bool, leaves_config: bool
) -> Iterator[InputError]:
    """Refuse a folder with files of another model or run, or of the names that a run writes."""
    begins, config, is_main = f"output_dir {str(folder)!r} holds", folder / RUN_CONFIG, is_main_process()
    in_the_way = next((name for name in _REPLACEABLE if os.path.lexists(folder / name)), None)
    if holds_model(folder) and not leaves_config:
        yield InputError(f"{begins} a model; give another folder")
    elif not may_replace and is_main and (files := run_files(folder)):
        yield InputError(
            f"{begins} a run already ({files[0].name}); give --resume, --overwrite_output_dir, or another "
            "folder"
        )
    elif not may_replace and is_main and in_the_way:
        yield InputError(
            f"{begins} {in_the_way}, and the run writes a file of that name; give another folder, or "
            "--overwrite_output_dir to replace it"
        )
    elif output.overwrite_output_dir and os.path.lexists(config) and not _is_of_a_run(config):
        yield InputError(f"{begins} a {RUN_CONFIG} that no run wrote; move it, or give another folder")


def _check_save_path(target: Path, folder: Path, may_replace: bool) -> None:
    """Refuse a folder that is not new, or where the run itself writes: names with a dot, checkpoints."""
    real, here = target.resolve(), folder.resolve()
    is_taken = target.is_symlink() and target.parent.resolve() == here
    if real.is_relative_to(here):
        first = (*real.relative_to(here).parts, ".")[0]
        is_taken |= "." in first or first.startswith("checkpoint-") or first == MERGED_BASE
    if is_taken:
        raise InputError(
            f"save_path is {str(target)!r}, where the run itself writes in output_dir, or a link; give "
            "another folder, without a dot in its name"
        )
    check_new_folder("save_path", target, may_replace and _is_of_the_run(target, folder))


def _leaves_config(run: Mapping[str, Any]) -> bool:
    """Whether a run with these options leaves a model's configuration: with the model, or with classes."""
    return run.get("tuning") == "full" or run.get("task") is not None


def _is_of_the_run(target: Path, folder: Path) -> bool:
    """Whether the run in `folder` saves its merged model at `target`."""
    saved, run = [folder / "merged"], options_of_run(folder)
    if run.get("save_path"):
        cwd = Path(read_fact(folder, "cwd") or "")
        if (cwd / str(run.get("output_dir"))).resolve() == folder.resolve():  # else it is a copy of that run
            saved.append(cwd / run["save_path"])
    return target.resolve() in [path.resolve() for path in saved]


def _check_resumable(folder: Path) -> None:
    from unsloth_pack.training.checkpoints import has_stopped_early, last_checkpoint, state_of

    checkpoint = last_checkpoint(folder)
    if checkpoint is None:  # a run that was killed before its first checkpoint starts over
        saved_model = options_of_run(folder).get("tuning") == "full" and holds_model(folder)
        if saved_model or (folder / ADAPTER_CONFIG).exists():
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
                f"{entry['step']} is {loss:.6g}, and {METRICS} has {was:.6g}; remove that checkpoint"
            )
    if (state["global_step"] >= state["max_steps"] or has_stopped_early(state)) and has_ended(folder):
        raise InputError(
            f"--resume: the run in {str(folder)!r} is complete after {state['global_step']} updates; "
            "merge its adapter with `unsloth-pack merge`, or start a new run in another folder"
        )
    before, now = read_fact(folder, "processes"), count_processes()
    if before not in (None, now) and (why := _why_as_many(options_of_run(folder), before, now)):
        raise InputError(
            f"--resume: the run in {str(folder)!r} had {before} processes and this one has {now}, but {why}; "
            f"continue with {before}, or start a new run"
        )


def _why_as_many(options: Mapping[str, Any], before: int, now: int) -> str | None:
    """Return why a run goes on with as many processes as it had; None if updates see the same rows anyway."""
    rows = options["per_device_train_batch_size"]
    an_update = options.get("effective_batch_size") or rows * options["gradient_accumulation_steps"] * before
    if options.get("streaming") or not options["sample_packing"]:
        return "only packed rows that do not stream are dealt out anew"
    if options.get("deepspeed"):
        return "DeepSpeed has cut its optimizer"
    if options.get("keep_examples_per_update"):
        return "keep_examples_per_update counts by process"
    if an_update % (rows * now):
        return f"an update has {an_update} rows"
    return None


def check_same_data(
    folder: Path, use: str, names: Sequence[str], ledger: TokenLedger, fingerprint: str | None
) -> None:
    """Refuse to resume with other data than the run began with. Before a checkpoint it begins anew with any.

    Args:
        use: "train" or "eval".
        names: the paths of the data.
        ledger, fingerprint: of that data as it is now.
    """
    from unsloth_pack.training.checkpoints import last_checkpoint

    before = read_data(folder, use) if last_checkpoint(folder) is not None else None
    if before is None:
        return
    was, now = asdict(TokenLedger(**before["ledger"])), asdict(ledger)
    was["fingerprint"], now["fingerprint"] = before.get("fingerprint"), fingerprint
    if was != now:
        name = next(name for name in now if now[name] != was.get(name))
        raise InputError(
            f"--resume: {', '.join(names)} is not what the run began with ({name} was {was.get(name)}, is "
            f"{now[name]}); give the same data and tokenizer, or start anew"
        )


def run_files(folder: Path) -> list[Path]:
    """The files and folders that a run has left in `folder`."""
    run = options_of_run(folder)
    names = [*_RUN_FILES, *(model_files(folder) if _leaves_config(run) else ())]
    names += [MERGED_BASE] if run.get("merge_init_adapter") else []
    return [folder / name for name in names if os.path.lexists(folder / name)] + _checkpoints(folder)


def _checkpoints(folder: Path) -> list[Path]:
    """Whole or not, and links; a folder of another name, such as checkpoint-best, is somebody's own."""
    paths = sorted(folder.glob("checkpoint-*"))
    return [path for path in paths if path.is_symlink() or path.name.removeprefix("checkpoint-").isdigit()]

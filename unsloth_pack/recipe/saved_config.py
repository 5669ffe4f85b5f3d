"""The values of a run as a config file: `config.yaml` in its folder, and what `config show` prints."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.checkpoints.names import RUN_CONFIG
from unsloth_pack.config import OPTIONS, SECTIONS, TrainOptions, flat
from unsloth_pack.config.yaml12 import line_of
from unsloth_pack.demo import BUNDLED_MODELS, DEFAULTS
from unsloth_pack.recipe.named_data import with_paths
from unsloth_pack.recipe.resolve import SCHEDULES_WITHOUT_WARMUP, resolve
from unsloth_pack.recipe.what_trains import OF_AN_ADAPTER

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

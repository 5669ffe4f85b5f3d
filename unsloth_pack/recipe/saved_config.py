"""`config.yaml` in the folder of a run: its options and defaults, so that `--config` repeats the run."""

import glob
import os
from pathlib import Path

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.checkpoints.names import RUN_CONFIG
from unsloth_pack.demo import BUNDLED_MODELS
from unsloth_pack.recipe.flags import flat, sections_of
from unsloth_pack.recipe.named_data import with_paths
from unsloth_pack.recipe.options import TrainOptions
from unsloth_pack.recipe.origins import FOR_THE_COMMAND_LINE, OF_ONE_RUN, decided_by
from unsloth_pack.recipe.yaml_file import line_of

_FIRST_LINE = "# Written by a run of unsloth-pack, with all defaults filled in.\n"
_HEAD = f"""{_FIRST_LINE}# To repeat the run: unsloth-pack --config {RUN_CONFIG} --output_dir FOLDER
# {" and ".join(OF_ONE_RUN)} are left out, because a second run needs folders of its own.
"""
# Options that may name files
_READ = (
    *("model_name", "dataset", "eval_dataset", "image_folder", "add_tokens", "init_adapter"),
    *("fsdp", "deepspeed"),
)


def save_config(options: TrainOptions) -> None:
    """Write the options into the folder of the run, unless a file of that name is there that no run wrote."""
    path = options.folder / RUN_CONFIG
    if os.path.lexists(path) and not is_of_a_run(path):
        return
    with write_file(path) as file:
        file.write(_text_of(options).encode())


def is_of_a_run(path: Path) -> bool:
    """Whether a run wrote the file, which then may be replaced; a link is none, whatever it leads to."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline() == _FIRST_LINE.encode()


def _text_of(options: TrainOptions) -> str:
    values, lines = flat(options) | dict.fromkeys(decided_by(options)), []
    for section in sections_of(TrainOptions):
        lines.append(f"{'.'.join(section.path)}:")
        names = [option.name for option in section.options]
        for name in names:
            if name not in (*OF_ONE_RUN, *FOR_THE_COMMAND_LINE):
                value = values[name]
                if name in _READ and value is not None:
                    value = with_paths(value, _from_anywhere)
                lines.append(f"  {line_of(name, value)}")
    return _HEAD + "\n".join(lines) + "\n"


def _from_anywhere(name: str) -> str:
    """The absolute path of what lies here; a name of the hub, the demo or a preset as it is."""
    is_here = name not in BUNDLED_MODELS and (os.path.exists(name) or glob.glob(name))
    return os.path.abspath(name) if is_here else name

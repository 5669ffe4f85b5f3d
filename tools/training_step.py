"""Print the files of the package that one update of the demo passes: `python -m tools.training_step`.

`docs/one-training-step.md` explains them in this order, and a test compares both.
"""

import contextlib
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import ClassVar, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS

import unsloth_pack
from unsloth_pack.cli import main

PACKAGE = Path(unsloth_pack.__file__).parent
TRACED = 3  # updates before it compile, capture and read options


class Tracer(TrainerCallback):
    """Record the files whose functions are called in one update, in the order of their first call."""

    files: ClassVar[dict[str, None]] = {}  # transformers makes the instance

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        profile = self._record if state.global_step == TRACED else None
        sys.setprofile(profile)
        threading.setprofile(profile)

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.files[str(path.relative_to(PACKAGE))] = None


def files_of_a_step(folder: str) -> list[str]:
    """Train the packed demo for a few updates in a new folder; returns paths below the package."""
    cast(list[type], DEFAULT_CALLBACKS).append(Tracer)
    main(["--sample_packing", "--max_steps", str(TRACED + 2), "--output_dir", folder])
    return [*Tracer.files]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        names = files_of_a_step(f"{folder}/run")
    print(*names, sep="\n")

"""Checkpoints that are whole or not there: written aside, flushed to the disk, then renamed.

output_dir/
  checkpoint-8/      whole
  .saving/           of a save under way, or of one that was killed; nothing reads it
    checkpoint-12/
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from transformers import EarlyStoppingCallback, TrainerState, TrainingArguments

from unsloth_pack.checkpoints.atomic import put_in_place, remove_folder
from unsloth_pack.errors import RunStopped, first_line
from unsloth_pack.training.updates import COUNTS_FILE, TokenCounts

ASIDE = ".saving"
_ADAPTER = "adapter_model.safetensors"
_MODEL_INDEX = "model.safetensors.index.json"
_OPTIMIZERS = ("optimizer.pt", "latest")  # written by transformers, DeepSpeed
_STATE = "trainer_state.json"  # the last that transformers writes
STREAM_FILES = "stream_*.safetensors"  # where the stream of each process stood


def last_checkpoint(folder: Path) -> Path | None:
    """Return the whole checkpoint of the most updates."""
    return next((path for path in reversed(_checkpoints(folder)) if state_of(path) is not None), None)


def state_of(checkpoint: Path) -> dict[str, Any] | None:
    """Return the trainer's state in a checkpoint, or None if the checkpoint is not whole."""
    optimizers = [path for name in _OPTIMIZERS if (path := checkpoint / name).is_file()]
    random_states = [*checkpoint.glob("rng_state*.pth")]  # one of each process
    streams = [*checkpoint.glob(STREAM_FILES)]  # one of each process, if the data streams
    if not optimizers or not random_states or len(streams) not in (0, len(random_states)):
        return None
    parts = [checkpoint / "scheduler.pt", checkpoint / COUNTS_FILE, *_weights(checkpoint)]
    is_whole = all(map(_is_whole, [*parts, *optimizers, *random_states, *streams]))
    return _read_json(checkpoint / _STATE) if is_whole else None


def _weights(checkpoint: Path) -> list[Path]:
    """Return the files of the weights, there or not: of an adapter, or of a model, perhaps in shards."""
    if index := _read_json(checkpoint / _MODEL_INDEX):
        return [checkpoint / name for name in {*index["weight_map"].values()}]
    whole = checkpoint / "model.safetensors"
    return [whole if whole.exists() else checkpoint / _ADAPTER]


def _read_json(path: Path) -> Any:
    """Return the content of a file, or None if it is not there or has been cut."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))


def _is_whole(path: Path) -> bool:
    """True if a file is there and has not been cut, as by an interrupted copy."""
    if path.suffix == ".json":
        return _read_json(path) is not None
    if path.suffix != ".safetensors":
        return is_zipfile(path) or path.name == "latest"
    try:
        with safe_open(path, "pt"):
            return True
    except (OSError, SafetensorError):
        return False


def step_of(checkpoint: Path) -> int:
    """Return the number of updates before a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def lost_a_process(error: BaseException) -> bool:
    """True if `error` was raised because another process has ended."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def _checkpoints(folder: Path) -> list[Path]:
    """List checkpoints by number of updates, whole or not."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return sorted(checkpoints, key=step_of)


class WholeCheckpoints:
    """Saves checkpoints so that a kill or a full disk never leaves half of one.

    Beside the trainer's files, a checkpoint holds what has been trained on until then.
    """

    def __init__(self, arguments: TrainingArguments, accelerator: Accelerator, counts: TokenCounts):
        self._arguments, self._accelerator, self._counts = arguments, accelerator, counts
        self.best: int | None = None  # updates before the checkpoint that is to stay
        self.aside: str | None = None  # where the trainer has to write in place of its folder, during a save

    def save(self, folder: Path, step: int, write: Callable[[], None]) -> None:
        """Save a checkpoint after `step` updates, and remove the oldest beyond `save_total_limit`.

        Every process has to call this. `write` lets the trainer write its part into `aside`. Raises
        RunStopped if the disk is full, or something else cannot be saved.
        """
        name, aside = f"checkpoint-{step}", folder / ASIDE
        try:
            self._write_aside(aside, name, write)
            if self._arguments.should_save:
                if os.path.lexists(folder / name):  # it is not whole, or the run was resumed from it
                    os.replace(folder / name, aside / "replaced")
                put_in_place(aside / name, folder / name)
        except Exception as error:  # a full disk: OSError, or whatever torch and safetensors make of it
            remove_folder(aside)
            if lost_a_process(error):
                raise
            free = f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB free in {str(folder)!r}"
            why = first_line(error) or type(error).__name__
            raise RunStopped(f"{name} could not be saved: {why} ({free})") from error
        if self._arguments.should_save:
            for old in _checkpoints(folder)[: -(self._arguments.save_total_limit or 2**31)]:
                if step_of(old) != self.best:  # renamed first: a kill leaves no half of it in its place
                    os.replace(old, aside / old.name)
            remove_folder(aside)

    def _write_aside(self, aside: Path, name: str, write: Callable[[], None]) -> None:
        if self._arguments.should_save:
            remove_folder(aside)
            (aside / name).mkdir(parents=True)
            self._counts.save(aside / name)
        self._accelerator.wait_for_everyone()
        self.aside = str(aside)
        try:
            write()
        finally:
            self.aside = None
        self._accelerator.wait_for_everyone()


class EarlyStopping(EarlyStoppingCallback):
    """Ends a run after some evaluations without a better loss; a resumed run counts those before it too."""

    def on_train_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self.early_stopping_patience_counter = _saved_patience(vars(state))[0]


def has_stopped_early(state: Mapping[str, object]) -> bool:
    """True if early stopping ended the run at the checkpoint with this state of the trainer."""
    count, patience = _saved_patience(state)
    return 0 < patience <= count


def _saved_patience(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the evaluations without a better loss, and how many end the run; (0, 0) if no number does."""
    saved = (state.get("stateful_callbacks") or {}).get(EarlyStopping.__name__)
    if saved is None:
        return 0, 0
    return saved["attributes"]["early_stopping_patience_counter"], saved["args"]["early_stopping_patience"]

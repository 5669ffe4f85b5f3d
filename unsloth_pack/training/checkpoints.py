"""Checkpoints that are whole or not there: written aside, flushed to the disk, then renamed.

output_dir/
  checkpoint-8/      whole
  .saving/           what a save is writing, or was when the run was killed; nothing reads it
    checkpoint-12/
"""

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerState

from unsloth_pack.errors import RunStopped, first_line
from unsloth_pack.files.whole_folders import put_in_place, remove_folder

ASIDE = ".saving"
_COUNTS = "counts.json"
# Written in this order by transformers; the state comes last.
_PARTS = ("adapter_model.safetensors", "scheduler.pt", _COUNTS)
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "latest")  # what transformers, FSDP2 and DeepSpeed write
_STATE = "trainer_state.json"


def last_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the most updates that is whole."""
    whole = [path for path in _checkpoints(folder) if state_of(path) is not None]
    return whole[-1] if whole else None


def state_of(checkpoint: Path) -> dict[str, Any] | None:
    """The trainer's state in a checkpoint, or None where the checkpoint is not whole."""
    has_optimizer = any((checkpoint / name).is_file() for name in _OPTIMIZERS)
    if not (has_optimizer and all((checkpoint / part).is_file() for part in _PARTS)):
        return None
    try:
        return json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def step_of(checkpoint: Path) -> int:
    """The updates that the run had made by then."""
    return int(checkpoint.name.rpartition("-")[2])


def lost_a_process(error: BaseException) -> bool:
    """Whether `error` is of waiting for another process, which has ended."""
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def _checkpoints(folder: Path) -> list[Path]:
    """By updates made, whole or not."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return sorted(found, key=step_of)


@dataclass(frozen=True)
class Trained:
    """What a run has trained on.

    Args:
        tokens: padding not counted.
        slots: tokens and padding.
        counted: tokens that the loss was a mean of.
    """

    seconds: float = 0.0
    tokens: int = 0
    slots: int = 0
    counted: int = 0


class WholeCheckpoints(Trainer):
    """A trainer that resumes as if nothing had interrupted it, and never leaves half of a checkpoint.

    Beside what transformers saves, a checkpoint holds what has been `trained` until then.
    """

    _aside: str | None = None
    _started: float | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._before = Trained()  # by processes that were ended
        self._seen: Any = 0  # tensors on the device, perhaps, which are read when they are asked for
        self._slots: Any = 0
        self._counted: Any = 0

    @property
    def trained(self) -> Trained:
        """What this run has trained on, in all the processes that it took."""
        return Trained(
            self._seconds(),
            self._before.tokens + int(self._seen),
            self._before.slots + int(self._slots),
            self._before.counted + int(self._counted),
        )

    def _seconds(self) -> float:
        return self._before.seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, counted = super().get_batch_samples(*args, **kwargs)
        slots: Any = [batch["input_ids"].numel() for batch in batches]
        tokens: Any = [
            batch["attention_mask"].sum() if "attention_mask" in batch else of_batch
            for batch, of_batch in zip(batches, slots, strict=True)
        ]
        held: Any = (sum(tokens), sum(slots))
        if self.args.world_size > 1:
            here = [torch.as_tensor(x, device=self.args.device) for x in held]  # which does not wait for it
            held = self.accelerator.reduce(torch.stack(here))
        self._seen, self._slots = self._seen + held[0], self._slots + held[1]
        self._counted = self._counted + (0 if counted is None else counted)
        return batches, counted

    def train_from(self, checkpoint: Path | None) -> None:
        """Train to the end, from the beginning or from a whole checkpoint."""
        state = state_of(checkpoint) if checkpoint else None
        if state and state["global_step"] >= state["max_steps"]:  # killed between its last update and its end
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState(**state)
        else:
            if state:  # a share of all updates, counted out by now: transformers warns of a difference
                self.args.eval_steps = state["eval_steps"]
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._started = time.monotonic()
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._before, self._started = replace(self._before, seconds=self._seconds()), None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        counts = (Path(resume_from_checkpoint) / _COUNTS).read_text(encoding="utf-8")
        self._before = Trained(**json.loads(counts))

    def _get_output_dir(self, trial: Any = None) -> str:
        return self._aside or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial))
        name, aside = f"checkpoint-{self.state.global_step}", folder / ASIDE
        try:
            self._write_aside(aside, name, model, trial)
            if self.args.should_save:
                if os.path.lexists(folder / name):  # not whole, or `train_from` had begun there
                    os.replace(folder / name, aside / "replaced")
                put_in_place(aside / name, folder / name)
        except Exception as error:  # a full disk: OSError, or whatever torch and safetensors make of it
            remove_folder(aside)
            if lost_a_process(error):
                raise
            raise RunStopped(
                f"{name} could not be saved: {first_line(error) or type(error).__name__} "
                f"({_free(folder)} free in {str(folder)!r})"
            ) from error
        if self.args.should_save:
            self._remove_oldest(folder, aside)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card into the output folder; a link of its name is replaced."""
        card = Path(str(self.args.output_dir)) / "README.md"
        if card.is_symlink():
            card.unlink(missing_ok=True)
        super().create_model_card(*args, **kwargs)

    def _write_aside(self, aside: Path, name: str, model: Any, trial: Any) -> None:
        if self.args.should_save:
            remove_folder(aside)
            (aside / name).mkdir(parents=True)
            (aside / name / _COUNTS).write_text(json.dumps(asdict(self.trained)), encoding="utf-8")
        self.accelerator.wait_for_everyone()
        self._aside = str(aside)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._aside = None
        self.accelerator.wait_for_everyone()

    def _remove_oldest(self, folder: Path, aside: Path) -> None:
        """Rename before deleting: what a kill leaves of a deleted checkpoint must not pass for one."""
        for old in _checkpoints(folder)[: -(self.args.save_total_limit or 2**31)]:
            os.replace(old, aside / old.name)
        remove_folder(aside)


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**20:,.0f} MiB"

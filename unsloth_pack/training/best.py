"""Which checkpoints a run makes, which of them is the best, and how long a run waits for a better one."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class DelayedSaves(TrainerCallback):
    """Makes no checkpoint within the first updates. What stops a run comes later, and still makes one.

    Args:
        updates: of which none makes a checkpoint.
    """

    def __init__(self, updates: int):
        self.updates = updates

    def is_early(self, state: TrainerState) -> bool:
        """Whether no checkpoint is made at this update."""
        return state.global_step < min(self.updates, state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.is_early(state):
            control.should_save = False


class KeptBest(TrainerCallback):
    """Finds the best checkpoint of a resumed run, which otherwise would only be loaded if a better one came.

    transformers has recorded where it wrote it, warns that nothing is there, and forgets it.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        best = best_checkpoint(state, Path(str(args.output_dir)))
        if best is not None:
            state.best_model_checkpoint = str(best)


@contextmanager
def without_untrue_warning() -> Iterator[None]:
    """Inside this context transformers does not say that the best checkpoint, see `KeptBest`, is gone."""
    logger = logging.getLogger("transformers.trainer")

    def is_true(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("The best checkpoint")

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)


def best_checkpoint(state: TrainerState, folder: Path) -> Path | None:
    """The checkpoint of the lowest evaluation loss, if there is one.

    The trainer's own record names the folder that the checkpoint was written in, before it was moved.
    """
    found = folder / f"checkpoint-{state.best_global_step}"
    return found if state.best_global_step and found.is_dir() else None


class EarlyStopping(EarlyStoppingCallback):
    """Ends a run after some evaluations without a better loss; a resumed run counts those before it too."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.early_stopping_patience_counter = _evaluations_without_a_better(vars(state))[0]


def has_stopped_early(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was made where early stopping ended its run.

    Args:
        state: of the trainer, see `state_of`.
    """
    count, patience = _evaluations_without_a_better(state)
    return 0 < patience <= count


def _evaluations_without_a_better(state: Mapping[str, Any]) -> tuple[int, int]:
    """How many there were, and how many end the run; (0, 0) if no number does."""
    saved = (state.get("stateful_callbacks") or {}).get(EarlyStopping.__name__)
    if saved is None:
        return 0, 0
    return saved["attributes"]["early_stopping_patience_counter"], saved["args"]["early_stopping_patience"]

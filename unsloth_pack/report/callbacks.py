"""What listens to the trainer: the metrics file, the progress on screen, and the signals that stop a run."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsloth_pack.report.metrics import MetricsFile

_LINES = 20  # of progress in a run, where there is no terminal for a bar


class MetricsCallback(TrainerCallback):
    """Writes every log line of the trainer to the metrics file, with the seconds since training began."""

    def __init__(self, metrics: MetricsFile):
        self.metrics = metrics

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.began = time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **_: Any,
    ) -> None:
        seconds = round(time.monotonic() - self.began, 4)
        self.metrics.write("log", step=state.global_step, seconds=seconds, **logs)


class ProgressCallback(TrainerCallback):
    """A bar with the loss on a terminal, else a line now and then.

    Args:
        announce: called before the first step, with the number of updates that the run will have.
    """

    def __init__(self, console: Console, announce: Callable[[int], None]):
        self.console = console
        self.announce = announce
        self.progress = Progress(
            TextColumn("update"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.announce(state.max_steps)
        self.task = self.progress.add_task("", total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **_: Any,
    ) -> None:
        name = "eval_loss" if "eval_loss" in logs else "loss"
        if name not in logs:
            return
        line = f"{name.replace('_', ' ')} {logs[name]:.4f}"
        self.progress.update(self.task, description=line, completed=state.global_step)
        every = -(-state.max_steps // _LINES)
        if not self.console.is_terminal and (name == "eval_loss" or state.global_step % every == 0):
            self.console.print(f"update {state.global_step}/{state.max_steps}  {line}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.progress.stop()


class StopOnSignal(TrainerCallback):
    """Inside `with`, the first SIGINT or SIGTERM ends the run after the step at hand, with a checkpoint.

    The second one does what it would without us.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._received_anywhere(args.device):
            control.should_training_stop = control.should_save = True

    def _received_anywhere(self, device: torch.device) -> bool:
        """Whether any process got a signal: all must stop at the same step, or some would wait forever."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return self.received is not None
        number = torch.tensor(int(self.received or 0), device=device)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        if number.item():
            self.received = signal.Signals(int(number))
        return self.received is not None

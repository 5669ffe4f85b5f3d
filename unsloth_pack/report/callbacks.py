"""Callbacks of the trainer: the metrics file, the progress on screen, and the signals that stop a run."""

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
from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args

from unsloth_pack.host_copy import HostCopy
from unsloth_pack.report.metrics import MetricsFile, peak_memory

_FAILED = 1000  # above the number of any signal
_LINES = 20  # of progress in a run, where there is no terminal for a bar


class MetricsCallback(TrainerCallback):
    """Writes log lines to the metrics file, with the seconds since training began and the peak of memory."""

    def __init__(self, metrics: MetricsFile):
        self.metrics = metrics

    def on_train_begin(self, args: Args, state: State, control: Control, **_: object) -> None:
        self.began = time.monotonic()

    def on_log(
        self, args: Args, state: State, control: Control, logs: dict[str, object] | None = None, **_: object
    ) -> None:
        seconds = round(time.monotonic() - self.began, 4)
        memory = {"memory_bytes": peak_memory()[0]}
        self.metrics.write("log", step=state.global_step, seconds=seconds, **(logs or {}), **memory)


class ProgressCallback(TrainerCallback):
    """A bar with the loss on a terminal, else a line now and then.

    `announce` is called before the first step, with the number of updates that the run will have.
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

    def on_train_begin(self, args: Args, state: State, control: Control, **_: object) -> None:
        self.announce(state.max_steps)
        self.task = self.progress.add_task("", total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_log(
        self, args: Args, state: State, control: Control, logs: dict[str, object] | None = None, **_: object
    ) -> None:
        name = next((name for name in ("eval_loss", "loss") if name in (logs or {})), None)
        if logs is None or name is None:
            return
        line = f"{name.replace('_', ' ')} {logs[name]:.4f}"
        self.progress.update(self.task, description=line)
        every = -(-state.max_steps // _LINES)
        if not self.console.is_terminal and (name == "eval_loss" or state.global_step % every == 0):
            self.console.print(f"update {state.global_step}/{state.max_steps}  {line}")

    def on_step_end(self, args: Args, state: State, control: Control, **_: object) -> None:
        self.progress.update(self.task, completed=state.global_step)

    def on_train_end(self, args: Args, state: State, control: Control, **_: object) -> None:
        self.progress.stop()


class StopOnSignal(TrainerCallback):
    """Inside `with`, the first SIGINT, SIGTERM or SIGHUP ends the run after the step, with a checkpoint.

    A SIGHUP that is ignored, as under nohup, stays so.

    Several processes ask each other at the end of every step, and read the answer at the end of the next, so
    that nobody waits for it: they all stop at the same step, one later. A second signal goes to the handler
    that was there before. Once an error has ended the run, SIGTERM is ignored: torchrun sends it to the
    processes that remain when one has ended, and each still has to say how to go on.

    Args:
        has_failed: whether something else is wrong in this process, so that all should stop in the same way.

    Attributes:
        received: the signal that stopped the run.
        failed: whether a process failed.
    """

    def __init__(self, has_failed: Callable[[], bool] = lambda: False) -> None:
        self.received: signal.Signals | None = None
        self.failed = False
        self._has_failed = has_failed
        self._handlers: dict[signal.Signals, Any] = {}
        self._greatest: _Greatest | None = None

    def __enter__(self) -> "StopOnSignal":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._handlers[signal.SIGTERM] = signal.SIG_IGN
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def on_step_end(self, args: Args, state: State, control: Control, **_: object) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            shall_stop = self._read_answer()
            failed = _FAILED if self._has_failed() else 0
            self._greatest = _Greatest(int(self.received or failed), args.device)
        else:
            self.failed = self._has_failed()
            shall_stop = self.received is not None or self.failed
        if shall_stop:
            control.should_training_stop = control.should_save = True

    def on_train_end(self, args: Args, state: State, control: Control, **_: object) -> None:
        self._read_answer()

    def _read_answer(self) -> bool:
        """Return whether any process had a signal, or had failed, when they asked each other last."""
        number = self._greatest.read() if self._greatest is not None else 0
        self._greatest = None
        self.failed = self.failed or number == _FAILED
        if 0 < number < _FAILED:
            self.received = signal.Signals(number)
        return number > 0


class _Greatest:
    """The greatest of one number a process, sent now and read later."""

    def __init__(self, number: int, device: torch.device):
        greatest = torch.full((), number, device=device)
        self._work = torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX, async_op=True)
        if greatest.is_cuda:
            self._work.wait()  # the stream does, not the host
        self._copy = HostCopy(greatest)

    def read(self) -> int:
        self._work.wait()
        return int(self._copy.read())

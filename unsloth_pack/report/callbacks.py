"""Callbacks of the trainer: the metrics file, the progress on screen, and the signals that stop a run."""

import json
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
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

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.checkpoints.names import METRICS
from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.report.metrics import read_lines
from unsloth_pack.report.terminal import LastingConsole

_FAILED = 1000  # above the number of any signal
_LINES = 20  # of progress in a run, where there is no terminal for a bar; more where
_MOST_SECONDS = 60  # between two of them would be exceeded


class MetricsFile(TrainerCallback):
    """Appends to the metrics of a run, log lines by itself; the file is whole after every line, and no link.

    Args:
        folder: made where it is missing.
        enabled: False in all but one of the processes that train together.
    """

    def __init__(self, folder: Path, enabled: bool = True):
        self.path = folder / METRICS
        self.enabled = enabled
        folder.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, args: Args, state: State, control: Control, **_: object) -> None:
        self._began = time.monotonic()

    def on_log(
        self, args: Args, state: State, control: Control, logs: dict[str, object] | None = None, **_: object
    ) -> None:
        seconds = round(time.monotonic() - self._began, 4)
        memory = {"memory_bytes": peak_memory()[0]}
        self.write("log", step=state.global_step, seconds=seconds, **(logs or {}), **memory)

    def write(self, kind: str, **values: object) -> None:
        """Append a line."""
        if not self.enabled:
            return
        line = line_of(kind, **values)
        if self.path.is_file() and not self.path.is_symlink():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_encoded(line))
        else:  # it appears with its first line, which says how to resume the run
            self._replace([*(read_lines(self.path.parent) if self.path.exists() else ()), line])

    def rewind(self, step: int) -> None:
        """Drop what the file holds of later steps, before a run goes on from `step`."""
        if self.enabled:
            self._replace(line for line in read_lines(self.path.parent) if _is_of_step(line, step))

    def _replace(self, lines: Iterable[Mapping[str, object]]) -> None:
        with write_file(self.path) as file:
            file.writelines(_encoded(line).encode() for line in lines)


def line_of(kind: str, **values: object) -> dict[str, Any]:
    """Make a line of a metrics file. Numbers that are not finite, which JSON lacks, are null."""
    return {"kind": kind, **_finite(values)}


def _is_of_step(line: Mapping[str, Any], step: int) -> bool:
    return line["kind"] in ("config", "data") or (
        line["kind"] in ("log", "nonfinite") and line["step"] <= step
    )


def _encoded(line: Mapping[str, object]) -> str:
    return json.dumps(line, ensure_ascii=False) + "\n"


def _finite(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def peak_memory() -> tuple[int, str]:
    """Return the peak of the GPU's memory in bytes, else of the process, and which it is."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "GPU memory allocated"
    if sys.platform == "linux":  # getrusage includes what the parent held when it forked
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        if high_water := re.search(r"VmHWM:\s*(\d+) kB", status):
            return int(high_water[1]) * 1024, "process memory"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process memory"


class RunConsole(LastingConsole):
    """The console of a run, which goes on if its output ends: the reader of a pipe, or its terminal."""

    def _check_buffer(self) -> None:
        """Write; rich knows a pipe without a reader, and a terminal that is gone raises another OSError."""
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Print nothing more, and say so on stderr."""
        super().on_broken_pipe()
        with suppress(OSError):  # stderr may be the same pipe
            print("unsloth-pack: nobody reads the output any more; the run goes on", file=sys.stderr)


class ProgressCallback(TrainerCallback):
    """A bar with the loss on a terminal, else a line now and then with the time that is left.

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
        self._began = self._told = time.monotonic()
        self._from_step = self._told_step = state.global_step
        self._line = ""

    def on_log(
        self, args: Args, state: State, control: Control, logs: dict[str, object] | None = None, **_: object
    ) -> None:
        name = next((name for name in ("eval_loss", "loss") if name in (logs or {})), None)
        if logs is None or name is None:
            return
        self._line = f"{name.replace('_', ' ')} {logs[name]:.4f}"
        if "eval_accuracy" in logs:
            self._line += f", accuracy {logs['eval_accuracy']:.1%}"
        self.progress.update(self.task, description=self._line)
        is_due = state.global_step - self._told_step >= -(-state.max_steps // _LINES)
        if name == "eval_loss" or is_due or self._is_late():
            self._tell(state)

    def on_step_end(self, args: Args, state: State, control: Control, **_: object) -> None:
        self.progress.update(self.task, completed=state.global_step)
        if self._is_late() and not control.should_log:
            self._tell(state)

    def _is_late(self) -> bool:
        return time.monotonic() - self._told >= _MOST_SECONDS

    def _tell(self, state: State) -> None:
        self._told, self._told_step = time.monotonic(), state.global_step
        if self.console.is_terminal:
            return
        passed = self._told - self._began
        left = (state.max_steps - state.global_step) * passed / max(1, state.global_step - self._from_step)
        spent, rest = (timedelta(seconds=round(seconds)) for seconds in (passed, left))
        line = f"update {state.global_step}/{state.max_steps}  {self._line}  {spent} elapsed, {rest} left"
        self.console.print(line, soft_wrap=True)

    def on_train_end(self, args: Args, state: State, control: Control, **_: object) -> None:
        self.progress.stop()


class StopOnSignal(TrainerCallback):
    """Inside `with`, the first SIGINT, SIGTERM or SIGHUP ends the run after the step, with a checkpoint.

    Several processes ask each other at the end of every step, and read the answer at the end of the next, so
    that nobody waits for it: they all stop at the same step, one later. A second signal goes to the handler
    that was there before. Once an error has ended the run, SIGTERM is ignored: torchrun sends it to the
    processes that remain when one has ended, and each still has to say how to go on. Where `has_failed` says
    that something else is wrong in this process, all stop in the same way.
    """

    def __init__(self, has_failed: Callable[[], bool] = lambda: False) -> None:
        self.received: signal.Signals | None = None
        self.failed = False
        self._has_failed = has_failed
        self._handlers: dict[signal.Signals, Any] = {}
        self._asked: tuple[torch.distributed.Work, HostCopy] | None = None  # the greatest of all numbers

    def __enter__(self) -> "StopOnSignal":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
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
            number = self.received or (_FAILED if self._has_failed() else 0)
            greatest = torch.full((), int(number), device=args.device)
            work = torch.distributed.all_reduce(greatest, torch.distributed.ReduceOp.MAX, async_op=True)
            if greatest.is_cuda:
                work.wait()  # the stream does, not the host
            self._asked = work, HostCopy(greatest)
        else:
            self.failed = self._has_failed()
            shall_stop = self.received is not None or self.failed
        if shall_stop:
            control.should_training_stop = control.should_save = True

    def on_train_end(self, args: Args, state: State, control: Control, **_: object) -> None:
        self._read_answer()

    def _read_answer(self) -> bool:
        """Return whether any process had a signal, or had failed, when they asked each other last."""
        if self._asked is None:
            return False
        work, copy = self._asked
        work.wait()
        number, self._asked = int(copy.read()), None
        self.failed = self.failed or number == _FAILED
        if 0 < number < _FAILED:
            self.received = signal.Signals(number)
        return number > 0

"""Decide whether a step is worth a capture, from the times of its first rows.

Replaying graphs saves the time in which the GPU waits for the launches of Python. So the first rows run
uncaptured, and the forward pass is timed on both sides: on the host, and on the GPU between two events. If
the GPU waits, both take equally long; otherwise the GPU finishes long after Python.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch


class DeviceTimer:
    """Time and memory of one device. A CPU is done when a call returns; its memory is not measured."""

    def __init__(self, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def now(self) -> float:
        return time.perf_counter()

    def mark(self) -> Any:
        """Record an event after the work launched so far."""
        if not self._is_cuda:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: Any) -> bool:
        """True if the device has done the work before the mark."""
        return bool(mark.query()) if self._is_cuda else True

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two passed marks."""
        return float(start.elapsed_time(end) / 1e3 if self._is_cuda else end - start)

    def allocated(self) -> int:
        """Return the bytes of tensors."""
        return torch.cuda.memory_allocated(self._device) if self._is_cuda else 0

    def peak(self) -> int:
        """Return the peak bytes of tensors."""
        return torch.cuda.max_memory_allocated(self._device) if self._is_cuda else 0

    def free(self) -> float:
        """Return the bytes that this process can still allocate."""
        return free_bytes(self._device) if self._is_cuda else math.inf


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device.index) * total)
    return min(free + reserved, allowed) - allocated


# Capture if launching takes at least this share of the GPU's time. Less than 1, because the GPU already waits
# at the first layers and after a number is read, time between the passes comes on top, and a host with shared
# cores is slower. Not much less, because a replay gains nothing on a busy GPU and padding costs 1 to 2%.
_HELD_UP_FROM = 0.7
# Seconds of work that the GPU may have left when Python is done. With more it does not wait in the backward
# pass either: Python is slow then only because about 1,000 launches fill the queue.
_MAX_LEFT = 0.05
_ROWS_TO_JUDGE = 2  # of a size: the first compiles kernels and allocates memory
_MAX_TRIALS = 4  # of a size: later ones correct a slow moment of the host or the GPU
_GIB = 2**30


@dataclass
class _Lap:
    """A forward pass that the device may not have finished."""

    timer: DeviceTimer
    tokens: int  # of the row, rounded up
    start: Any  # the marks around it
    end: Any
    host: float | None  # the seconds of its launches; None for a replay


class CaptureDecision:
    """The measurements, by the tokens of a row as its shape rounds them up."""

    def __init__(self, make_timer: Callable[[torch.device], DeviceTimer] = DeviceTimer):
        self._make_timer = make_timer
        self._laps: list[_Lap] = []  # not read yet
        self._host = inf  # seconds of the launches, which are as many for every row
        self._device: dict[int, float] = {}  # seconds of the device, or a little more
        self._n_trials: Counter[int] = Counter()
        self._n_replays: Counter[int] = Counter()
        self._n_read: Counter[int] = Counter()  # of the trials
        self._step_bytes: dict[int, int] = {}  # allocated by a step
        self._before: tuple[int, int, int] | None = None  # the last trial's tokens, bytes at rest, peak

    @contextmanager
    def trial(self, tokens: int, device: torch.device) -> Iterator[None]:
        """Measure the forward pass inside, unless rows of this size have had enough trials."""
        if self._n_trials[tokens] >= _MAX_TRIALS:
            yield
            return
        timer = self._make_timer(device)
        timer.wait()  # pending work of the step before would count as this one's
        at_rest, peak = timer.allocated(), timer.peak()
        start, began = timer.mark(), timer.now()
        yield
        host = timer.now() - began
        self._laps.append(_Lap(timer, tokens, start, timer.mark(), host))
        self._n_trials[tokens] += 1
        self._note_memory(tokens, timer.allocated() - at_rest)
        self._before = tokens, at_rest, peak

    @contextmanager
    def replay(self, tokens: int, device: torch.device) -> Iterator[None]:
        """Measure the replay inside: the time of the device when nothing holds it up."""
        if self._n_replays[tokens] >= _MAX_TRIALS:
            yield
            return
        timer = self._make_timer(device)
        start = timer.mark()
        yield
        self._laps.append(_Lap(timer, tokens, start, timer.mark(), None))
        self._n_replays[tokens] += 1

    def is_held_up(self, tokens: int) -> bool | None:
        """True if the device waits for launches in rows of this size; None if not known yet.

        More tokens take at least as long, and at most proportionally longer, so other sizes may decide.
        """
        self._read()
        if sum(self._n_read.values()) < _ROWS_TO_JUDGE:
            return None
        at_most = min((seconds * max(1, tokens / n) for n, seconds in self._device.items()), default=inf)
        if self._holds_up(at_most):
            return True
        judged = (n for n in self._device if n <= tokens and self._n_read[n] >= _ROWS_TO_JUDGE)
        at_least = max((self._device[n] for n in judged), default=0)
        return None if self._holds_up(at_least) else False

    def _holds_up(self, device: float) -> bool:
        """True if a device that computes for so many seconds waits for Python."""
        return self._host >= _HELD_UP_FROM * device and self._host > device - _MAX_LEFT

    def why_too_large(self, tokens: int, device: torch.device, gradients: int) -> str | None:
        """Explain why graphs for rows of this size would leave too little memory, or None.

        They hold the bytes of a step and of its `gradients`; uncaptured rows need as much again.
        """
        timer = self._make_timer(device)
        self._learn_peak(timer)
        step = max((n_bytes * tokens / n for n, n_bytes in self._step_bytes.items()), default=0)
        graphs, free = step + gradients, timer.free()
        if free >= graphs + step:
            return None
        need = f"graphs would hold {graphs / _GIB:.1f} GiB beside the {step / _GIB:.1f} GiB of a step"
        return f"{need}, and {free / _GIB:.1f} GiB are free"

    def why_not_held_up(self, tokens: int) -> str | None:
        """Explain why rows of this size are known not to wait for Python; None if they may."""
        times = self.times(tokens)
        if times is None or self.is_held_up(tokens) is not False:
            return None
        return "the GPU computes longer than Python launches: {} against {}".format(*times)

    def times(self, tokens: int) -> tuple[str, str] | None:
        """Return the times of the nearest measured size on the device and on the host; None before any."""
        self._read()
        if not self._device:
            return None
        nearest = min(self._device, key=lambda n: abs(n - tokens))
        return f"{1e3 * self._device[nearest]:.1f} ms", f"{1e3 * self._host:.1f} ms"

    def _read(self) -> None:
        """Read the times of finished passes, without waiting for the others."""
        while self._laps and self._laps[0].timer.has_passed(self._laps[0].end):
            lap = self._laps.pop(0)
            seconds = lap.timer.between(lap.start, lap.end)
            self._device[lap.tokens] = min(seconds, self._device.get(lap.tokens, inf))
            if lap.host is not None:
                self._host = min(lap.host, self._host)
                self._n_read[lap.tokens] += 1

    def _note_memory(self, tokens: int, n_bytes: int) -> None:
        self._step_bytes[tokens] = max(n_bytes, self._step_bytes.get(tokens, 0))

    def _learn_peak(self, timer: DeviceTimer) -> None:
        """Read the allocations of the last trial's step with its backward pass, if they set a new peak."""
        if self._before is not None:
            tokens, at_rest, peak = self._before
            if timer.peak() > peak:
                self._note_memory(tokens, timer.peak() - at_rest)
            self._before = None  # later peaks, such as a capture's, are of other sizes

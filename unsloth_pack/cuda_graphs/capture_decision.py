"""Rows that run uncaptured and are measured, to decide whether their step is worth a capture.

Replaying graphs saves the time in which the GPU waits for Python to launch. So the first rows are timed on
both sides: Python from the beginning to the end of the forward pass, and the GPU between two marks around it.
Where the GPU waits, the two take equally long. Where it does not, it finishes long after Python.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch

# What is read off a device: how far it has come in its work, and how much memory it has.


class DeviceTimer:
    """Reads one device. A CPU has done its work when a call returns, and its memory is not looked at.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self._is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def now(self) -> float:
        """Seconds on the host."""
        return time.perf_counter()

    def mark(self) -> Any:
        """A mark behind the work that the device has got so far."""
        if not self._is_cuda:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def has_passed(self, mark: Any) -> bool:
        """Whether the device has done the work before the mark."""
        return bool(mark.query()) if self._is_cuda else True

    def between(self, start: Any, end: Any) -> float:
        """The seconds from one mark to a later one, which has been passed."""
        return float(start.elapsed_time(end) / 1e3 if self._is_cuda else end - start)

    def allocated(self) -> int:
        """Bytes of tensors."""
        return torch.cuda.memory_allocated(self._device) if self._is_cuda else 0

    def peak(self) -> int:
        """The most bytes of tensors so far."""
        return torch.cuda.max_memory_allocated(self._device) if self._is_cuda else 0

    def free(self) -> float:
        """Bytes that this process can still allocate."""
        return free_bytes(self._device) if self._is_cuda else math.inf


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device.index) * total)
    return min(free + reserved, allowed) - allocated


# Of the GPU's time: from here on launching holds the GPU up. Below 1, because the GPU waits already while
# Python catches up, at the first layers and whenever a trainer has read a number; because the time between
# the passes comes on top; and because a host is slower when its cores are shared. Well above 0, because
# replaying is no gain where the GPU is the slower one: padding makes the step 1 to 2% longer.
_HELD_UP_FROM = 0.7
# Seconds of work that the GPU may have left when Python is done. With more it does not wait in the backward
# pass either, whatever the share: Python takes long then because some 1,000 launches are all that queue up.
_MOST_LEFT = 0.05
_ROWS_TO_JUDGE = 2  # of a size: the first compiles kernels and allocates memory
_MOST_TRIALS = 4  # of a size: until then a slow moment of the host or the GPU may be corrected
_GIB = 2**30


class Times(NamedTuple):
    """How long the device computes a forward pass, and how long Python launches it."""

    device: str
    host: str


def longer_than_launching(times: Times) -> str:
    """Why rows that took these times need no graphs."""
    return f"the GPU computes longer than Python launches: {times.device} against {times.host}"


@dataclass
class _Lap:
    """A forward pass that the device may not have done yet.

    Args:
        gauge: of the device.
        tokens: of the row, rounded up.
        start: the mark before it.
        end: the mark after it.
        host: the seconds in which Python has launched it; None of a replay.
    """

    gauge: Any
    tokens: int
    start: Any
    end: Any
    host: float | None


class CaptureDecision:
    """What was measured, by the tokens of a row as its form rounds them up.

    Args:
        gauge_of: makes the gauge of a device.
    """

    def __init__(self, gauge_of: Callable[[torch.device], Any] = DeviceTimer):
        self._gauge_of = gauge_of
        self._laps: list[_Lap] = []  # not read yet
        self._host = inf  # seconds that Python launches: as many for every row
        self._device: dict[int, float] = {}  # seconds that the device computes, or a little more
        self._n_trials: Counter[int] = Counter()
        self._n_replays: Counter[int] = Counter()
        self._n_read: Counter[int] = Counter()  # of the trials
        self._taken: dict[int, int] = {}  # bytes that a step allocates
        self._before: tuple[int, int, int] | None = None  # the last trial's tokens, bytes at rest, peak

    @contextmanager
    def trial(self, tokens: int, device: torch.device) -> Iterator[None]:
        """Measure the forward pass inside, if more has to be known of rows of this size."""
        if self._n_trials[tokens] >= _MOST_TRIALS:
            yield
            return
        gauge = self._gauge_of(device)
        gauge.wait()  # what the step before has left to do would count as this one's
        at_rest, peak = gauge.allocated(), gauge.peak()
        start, began = gauge.mark(), gauge.now()
        yield
        host = gauge.now() - began
        self._laps.append(_Lap(gauge, tokens, start, gauge.mark(), host))
        self._n_trials[tokens] += 1
        self._note_memory(tokens, gauge.allocated() - at_rest)
        self._before = tokens, at_rest, peak

    @contextmanager
    def replay(self, tokens: int, device: torch.device) -> Iterator[None]:
        """Measure the replay inside: how long the device computes where nothing holds it up."""
        if self._n_replays[tokens] >= _MOST_TRIALS:
            yield
            return
        gauge = self._gauge_of(device)
        start = gauge.mark()
        yield
        self._laps.append(_Lap(gauge, tokens, start, gauge.mark(), None))
        self._n_replays[tokens] += 1

    def is_held_up(self, tokens: int) -> bool | None:
        """Whether the device waits for launches in rows of this size; None where it is not known yet.

        More tokens take at least as long, and in proportion at most: other sizes may settle it.
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
        """Whether a device that computes for so many seconds waits for Python."""
        return self._host >= _HELD_UP_FROM * device and self._host > device - _MOST_LEFT

    def why_too_large(self, tokens: int, device: torch.device, gradients: int) -> str | None:
        """Why graphs for rows of this size would leave too little memory, or None.

        They hold what a step allocates, and its gradients a second time; rows that no graph holds take as
        much as a step again beside them.

        Args:
            gradients: bytes of a step's gradients.
        """
        gauge = self._gauge_of(device)
        self._learn_peak(gauge)
        needed = max((taken * tokens / n for n, taken in self._taken.items()), default=0)
        free = gauge.free()
        held = needed + gradients
        if free >= held + needed:
            return None
        return (
            f"graphs would hold {held / _GIB:.1f} GiB beside the {needed / _GIB:.1f} GiB of a step, and "
            f"{free / _GIB:.1f} GiB are free"
        )

    def times(self, tokens: int) -> Times | None:
        """Of a forward pass in the size next to this one that was measured; None before."""
        self._read()
        if not self._device:
            return None
        nearest = min(self._device, key=lambda n: abs(n - tokens))
        return Times(f"{1e3 * self._device[nearest]:.1f} ms", f"{1e3 * self._host:.1f} ms")

    def _read(self) -> None:
        """Take over the times of passes that the device has done. It is not waited for."""
        while self._laps and self._laps[0].gauge.has_passed(self._laps[0].end):
            lap = self._laps.pop(0)
            seconds = lap.gauge.between(lap.start, lap.end)
            self._device[lap.tokens] = min(seconds, self._device.get(lap.tokens, inf))
            if lap.host is not None:
                self._host = min(lap.host, self._host)
                self._n_read[lap.tokens] += 1

    def _note_memory(self, tokens: int, taken: int) -> None:
        self._taken[tokens] = max(taken, self._taken.get(tokens, 0))

    def _learn_peak(self, gauge: Any) -> None:
        """What the step of the last trial has allocated with its backward pass, if that was a new peak."""
        if self._before is not None:
            tokens, at_rest, peak = self._before
            if gauge.peak() > peak:
                self._note_memory(tokens, gauge.peak() - at_rest)
            self._before = None  # what comes now, as a capture does, is no step of that size

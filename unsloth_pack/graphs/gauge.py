"""What is read off a device: how far it has come in its work, and how much memory it has."""

import math
import time
from typing import Any

import torch


class Gauge:
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

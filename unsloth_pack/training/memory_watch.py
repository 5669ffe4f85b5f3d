"""What memory the micro-batches of a run took, for the advice when it runs out."""

import gc
import re
import traceback

import torch
from torch import nn

from unsloth_pack.memory.advice import MemoryUse

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class MemoryWatch:
    """The memory that the largest micro-batch took. Costs two look-ups a step on the host."""

    def __init__(self) -> None:
        self._tokens = 0  # of the micro-batch at hand
        self._largest, self._peak = 0, 0  # tokens of the largest that went through, and bytes held until then

    def begin(self, n_tokens: int) -> None:
        """A micro-batch of so many tokens is about to be trained on."""
        self._tokens = n_tokens

    def end(self) -> None:
        """It went through."""
        if self._tokens > self._largest:
            self._largest, self._peak = self._tokens, most_held()

    def use_at(
        self, error: BaseException, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> MemoryUse | None:
        """The memory in use when `error` was raised; None outside training or without CUDA.

        The frames of `error` are cleared: they hold the activations.
        """
        peak = most_held()
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        there, at_rest = device_memory()
        if not (there and self._tokens and model.training):
            return None
        if not (optimizer and optimizer.state):  # its two moments come with the first update
            at_rest += sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
        if self._largest:
            return MemoryUse(there, at_rest, self._peak, self._largest, self._tokens)
        return MemoryUse(there, at_rest, peak + _asked_for(error), self._tokens, self._tokens)


def device_memory() -> tuple[int, int]:
    """Bytes of the GPU that this process could have, and that it holds; 0 without one."""
    if not torch.cuda.is_available():
        return 0, 0
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


def most_held() -> int:
    """Bytes of the GPU that this process held at most; the host knows them without waiting for the device."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _asked_for(error: BaseException) -> int:
    """Bytes of the allocation that failed, as torch's message says."""
    found = re.search(r"Tried to allocate ([\d.]+) ([KMG]iB)", str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0

"""What a run has trained on: seconds and tokens, in all the processes that it took."""

import gc
import json
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from unsloth_pack.memory.advice import MemoryUse

COUNTS_FILE = "counts.json"  # in a checkpoint


@dataclass(frozen=True)
class TokenCounter:
    """What a run has trained on.

    Args:
        tokens: without padding.
        slots: tokens and padding.
        counted: tokens that the loss was a mean of.
    """

    seconds: float = 0.0
    tokens: int = 0
    slots: int = 0
    counted: int = 0


class TokenCounts:
    """Counts what a run trains on; a checkpoint holds the counts, so that a resumed run goes on counting."""

    def __init__(self) -> None:
        self._before = TokenCounter()  # by processes that have ended
        self._started: float | None = None
        # Tensors on the device, perhaps, which are not read before somebody asks.
        self._tokens: Any = 0
        self._slots: Any = 0
        self._counted: Any = 0
        self.broken_images = 0  # that this process has met

    @property
    def trained(self) -> TokenCounter:
        """What this run has trained on, in all the processes that it took."""
        return TokenCounter(
            self._seconds(),
            int(self.tokens),
            self._before.slots + int(self._slots),
            self._before.counted + int(self._counted),
        )

    @property
    def tokens(self) -> Any:
        """The tokens of `trained`; a tensor on the device, perhaps."""
        return self._before.tokens + self._tokens

    def _seconds(self) -> float:
        return self._before.seconds + (0.0 if self._started is None else time.monotonic() - self._started)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside this context the time counts."""
        self._started = time.monotonic()
        try:
            yield
        finally:
            self._before, self._started = replace(self._before, seconds=self._seconds()), None

    def add(self, batches: Sequence[dict[str, Any]], counted: Any, accelerator: Accelerator) -> None:
        """Add the micro-batches of an update, in all processes.

        Args:
            counted: tokens that the loss will be a mean of, in all processes; None if that is not known.
        """
        slots: Any = [batch["input_ids"].numel() for batch in batches]
        tokens: Any = [
            batch["attention_mask"].sum() if "attention_mask" in batch else of_batch
            for batch, of_batch in zip(batches, slots, strict=True)
        ]
        held: Any = (sum(tokens), sum(slots))
        if accelerator.num_processes > 1:
            held = accelerator.reduce(torch.stack([_on_device(x, accelerator.device) for x in held]))
        self._tokens, self._slots = self._tokens + held[0], self._slots + held[1]
        self._counted = self._counted + (0 if counted is None else counted)

    def save(self, checkpoint: Path) -> None:
        """Write the counts into a checkpoint."""
        (checkpoint / COUNTS_FILE).write_text(json.dumps(asdict(self.trained)), encoding="utf-8")

    def load(self, checkpoint: Path) -> None:
        """Go on from the counts in a checkpoint."""
        self._before = TokenCounter(**json.loads((checkpoint / COUNTS_FILE).read_text(encoding="utf-8")))


def _on_device(count: Any, device: torch.device) -> torch.Tensor:
    """A count as a tensor there. Unlike a copy, filling it does not wait for the device."""
    return count if isinstance(count, torch.Tensor) else torch.full((), count, device=device)


# The memory of a run's micro-batches, for the advice when memory runs out.

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

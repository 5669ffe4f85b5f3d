"""What a run has trained on: seconds and tokens, in all the processes that it took."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

COUNTS_FILE = "counts.json"  # in a checkpoint


@dataclass(frozen=True)
class Trained:
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


class TrainedCounts:
    """Counts what a run trains on; a checkpoint holds the counts, so that a resumed run goes on counting."""

    def __init__(self) -> None:
        self._before = Trained()  # by processes that have ended
        self._started: float | None = None
        # Tensors on the device, perhaps, which are not read before somebody asks.
        self._tokens: Any = 0
        self._slots: Any = 0
        self._counted: Any = 0
        self.broken_images = 0  # that this process has met

    @property
    def trained(self) -> Trained:
        """What this run has trained on, in all the processes that it took."""
        return Trained(
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
        self._before = Trained(**json.loads((checkpoint / COUNTS_FILE).read_text(encoding="utf-8")))


def _on_device(count: Any, device: torch.device) -> torch.Tensor:
    """A count as a tensor there. Unlike a copy, filling it does not wait for the device."""
    return count if isinstance(count, torch.Tensor) else torch.full((), count, device=device)

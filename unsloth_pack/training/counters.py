"""Count the tokens and time of a run, its memory, and the losses of evaluated documents."""

import gc
import json
import re
import time
import traceback
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from torch.optim import Optimizer

from unsloth_pack.memory.advice import MemoryUse

COUNTS_FILE = "counts.json"  # in a checkpoint
Count = Tensor | int  # a tensor may be on the device, and is not read before somebody asks


@dataclass(frozen=True)
class TokenCounter:
    """Seconds and tokens of training."""

    seconds: float = 0.0
    tokens: int = 0  # without padding
    slots: int = 0  # with padding
    counted: int = 0  # that the loss was a mean of


class TokenCounts:
    """Counts seconds and tokens of training; a resumed run goes on from the counts in its checkpoint."""

    def __init__(self) -> None:
        self._seconds = 0.0  # until training was started last
        self._started: float | None = None
        self._sums: dict[str, Count] = {"tokens": 0, "slots": 0, "counted": 0}
        self.broken_images = 0  # that this process has met

    @property
    def trained(self) -> TokenCounter:
        """Return the counts over all processes, and all resumptions."""
        since = 0.0 if self._started is None else time.monotonic() - self._started
        return TokenCounter(self._seconds + since, **{name: int(n) for name, n in self._sums.items()})

    @property
    def tokens(self) -> Count:
        """Return the tokens of `trained`, perhaps on the device."""
        return self._sums["tokens"]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time inside this context."""
        started = self._started = time.monotonic()
        try:
            yield
        finally:
            self._seconds, self._started = self._seconds + time.monotonic() - started, None

    def add(self, batches: Sequence[dict[str, Any]], counted: Count | None, accelerator: Accelerator) -> None:
        """Add the micro-batches of an update, in all processes; `counted` is None where it is not known."""
        slots: Count = sum(batch["input_ids"].numel() for batch in batches)
        tokens: Count = sum(
            batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
            for batch in batches
        )
        if accelerator.num_processes > 1:
            # Unlike a copy, filling a tensor does not wait for the device
            both = [
                x if isinstance(x, Tensor) else torch.full((), x, device=accelerator.device)
                for x in (tokens, slots)
            ]
            tokens, slots = accelerator.reduce(torch.stack(both))
        counts = {"tokens": tokens, "slots": slots, "counted": 0 if counted is None else counted}
        self._sums = {name: self._sums[name] + count for name, count in counts.items()}

    def save(self, checkpoint: Path) -> None:
        """Write the counts into a checkpoint."""
        (checkpoint / COUNTS_FILE).write_text(json.dumps(asdict(self.trained)), encoding="utf-8")

    def load(self, checkpoint: Path) -> None:
        """Go on from the counts in a checkpoint."""
        self._sums = json.loads((checkpoint / COUNTS_FILE).read_text(encoding="utf-8"))
        self._seconds = float(self._sums.pop("seconds"))


class MemoryWatch:
    """The memory that the largest micro-batch took, for advice when memory runs out."""

    def __init__(self) -> None:
        self._tokens = 0  # of the current micro-batch
        self._largest, self._peak = 0, 0  # tokens of the largest that went through, and the bytes until then

    def begin(self, n_tokens: int) -> None:
        """Note that a micro-batch of so many tokens is about to be trained on."""
        self._tokens = n_tokens

    def end(self) -> None:
        """Note that it went through."""
        if self._tokens > self._largest:
            self._largest, self._peak = self._tokens, most_held()

    def use_at(self, error: BaseException, model: nn.Module, optimizer: Optimizer | None) -> MemoryUse | None:
        """Return the memory in use when `error` was raised; None outside training or without CUDA. Clears the
        frames of `error`, which hold the activations."""
        peak = most_held()
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        available, at_rest = device_memory()
        if not (available and self._tokens and model.training):
            return None
        if not (optimizer and optimizer.state):  # its two moments come with the first update
            at_rest += sum(8 * p.numel() for p in model.parameters() if p.requires_grad)
        if self._largest:
            return MemoryUse(available, at_rest, self._peak, self._largest, self._tokens)
        return MemoryUse(available, at_rest, peak + _failed_bytes(error), self._tokens, self._tokens)


def device_memory() -> tuple[int, int]:
    """Return the bytes of the GPU that this process could have, and those it holds; 0 without one."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


def most_held() -> int:
    """Return the peak of GPU memory in bytes, which the host knows without waiting for the device."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _failed_bytes(error: BaseException) -> int:
    """Read the bytes of the failed allocation from torch's message."""
    match = re.search(r"Tried to allocate ([\d.]+) ([KMG])iB", str(error))
    return int(float(match[1]) * 2 ** {"K": 10, "M": 20, "G": 30}[match[2]]) if match else 0


class DocumentLosses:
    """The loss of every document of one evaluation under TRL's loss, whose own mean is over batches."""

    def __init__(self) -> None:
        self._batches: list[Tensor] = []  # each [2, documents], see `_document_losses`

    @contextmanager
    def noted(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
        """Record the losses of the one batch that the model is called with inside this context."""
        outputs: list[Any] = []
        with model.register_forward_hook(lambda *call: outputs.append(call[-1])):
            yield
        self._batches.append(_document_losses(outputs[0], inputs.get("position_ids")))

    def means(self, rows: Dataset, prefix: str) -> dict[str, float]:
        """Return `{prefix}_loss`, a mean over tokens, and `{prefix}_sample_loss`, over means of documents, of
        all ranks. Batching, packing and the ranks do not change them."""
        by_rank = gather_object([[batch.cpu() for batch in self._batches]])
        in_order = [batch for turn in zip(*by_rank, strict=True) for batch in turn]
        # If the ranks cannot share out the rows evenly, the first rows come again at the end.
        packed = "seq_lengths" in rows.column_names
        documents: list[Sized] = rows.with_format(None)["seq_lengths"] if packed else []
        n_documents = sum(map(len, documents)) if packed else len(rows)
        sums, counts = torch.cat(in_order, dim=1)[:, :n_documents]
        by_token, by_document = sums.sum() / counts.sum(), (sums / counts)[counts > 0].mean()
        return {f"{prefix}_loss": float(by_token), f"{prefix}_sample_loss": float(by_document)}


def _document_losses(outputs: Any, position_ids: Tensor | None) -> Tensor:
    """`[2, documents]` float64: the summed loss and the counted tokens of every document of a batch.

    `log_probs` and `label_mask` are `[B, T - 1]`; position_ids `[1, T]`, or None if each row is one document.
    """
    per_token = torch.stack([-outputs.log_probs.double(), outputs.label_mask.double()])
    if position_ids is None:
        return per_token.sum(dim=-1)
    document = (position_ids == 0).cumsum(dim=-1)[0, :-1] - 1
    n_documents = int((position_ids == 0).sum())
    return per_token.new_zeros(2, n_documents).index_add_(1, document, per_token[:, 0])

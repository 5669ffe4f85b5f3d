"""Leave out updates whose loss or gradient is not finite, without waiting for the device.

The device decides whether an update is finite. The host reads that with the next log line, and only then
searches for the documents that are to blame.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler
from transformers import Trainer

from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.modules import whole
from unsloth_pack.patching.deferred_logging import DeferredLogging, LogLine, copy_number

if TYPE_CHECKING:
    from unsloth_pack.training.trainer import RunTrainer

_MAX_SEARCHES = 3  # in a run: each costs a forward and backward pass a document
_N_TOKENS_SHOWN = 12  # of a document, in a message


@dataclass(frozen=True)
class Culprit:
    """A document whose loss or gradients alone are not finite."""

    row: int  # of the training data
    document: int  # its place in the row, from 0
    text: str  # its beginning


@dataclass(frozen=True)
class NonFinite:
    """Describe an update that was left out, in one line."""

    step: int  # its number, from 1
    rows: list[int]  # of the training data
    culprits: list[Culprit] | None  # None without a search
    searched: int = 0  # documents of these rows that were tried alone

    @property
    def has_diverged(self) -> bool:
        """True if the weights are to blame: no document is finite."""
        return self.culprits is not None and 1 < self.searched == len(self.culprits)

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.rows))
        message = f"update {self.step} was left out: its loss or gradient is not finite (rows {rows})"
        if self.has_diverged:
            each = f"each of its {self.searched} documents by itself"
            return f"{message}, as is {each}: the weights have diverged"
        culprits = [f"document {c.document} of row {c.row} ({c.text!r})" for c in self.culprits or ()]
        return f"{message}, because of {', '.join(culprits)}" if culprits else message


def leave_out(optimizer: Any, parameters: Iterable[Tensor], is_bad: Tensor) -> None:
    """Let the optimizer's next step do nothing for these parameters if `is_bad`, a bool on the device. One on
    CUDA that is not fused sees gradients of zero, while momentum and weight decay still act."""
    if is_bad.device.type == "cpu":  # there is nothing to wait for
        if is_bad:
            for parameter in parameters:
                parameter.grad = None  # an optimizer skips weights without a gradient
        return
    if getattr(optimizer, "_step_supports_amp_scaling", False) or hasattr(optimizer, "found_inf"):
        optimizer.found_inf = is_bad.float()
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.masked_fill_(is_bad, 0.0)


class NonFiniteUpdates:
    """Leaves out updates whose loss or gradient is not finite, see `leave_out`.

    Where gradients are applied as they come, the weights before the first that is not finite are updated.
    """

    def __init__(self) -> None:
        self.on_nonfinite = "stop"  # ends the run after such an update, with a checkpoint; "skip" goes on
        self.report: Callable[[NonFinite], None] | None = None  # called with every update left out
        self.stopped_by: NonFinite | None = None  # the update that ended the run
        self.left_out = 0
        self._losses: list[Tensor] = []  # of the micro-batches of this update
        self._verdicts: list[tuple[int, Tensor]] = []  # since the last log line: update, whether it is finite

    def note_loss(self, loss: Tensor) -> Tensor:
        """Keep a micro-batch's loss for `judge`; return it for the trainer's sum, without NaN."""
        self._losses.append(loss)
        return loss.nan_to_num(0.0, 0.0, 0.0)

    def judge(self, trainer: Trainer, norm: Tensor | float) -> Tensor | float:
        """Leave out this update if its losses or its gradients' `norm` are not finite; returns `norm`."""
        norm = whole(norm)
        total = torch.stack(self._losses).sum()
        if trainer.args.world_size > 1:
            total = trainer.accelerator.reduce(total)  # all processes leave out the same updates
        has_scaler = trainer.accelerator.scaler is not None  # it expects infinite gradients, and skips them
        is_finite = torch.isfinite(total if has_scaler else total + norm)
        self._losses.clear()
        self._verdicts.append((trainer.state.global_step + 1, is_finite))
        if not has_scaler:
            optimizer: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            leave_out(optimizer, (p for group in optimizer.param_groups for p in group["params"]), ~is_finite)
        return norm

    def take_verdicts(self) -> tuple[list[int], Tensor]:
        """Return the updates since the last call, and whether each is finite, on the device."""
        verdicts, self._verdicts = self._verdicts, []
        finite = torch.stack([finite for _, finite in verdicts]) if verdicts else torch.empty(0)
        return [step for step, _ in verdicts], finite

    def handle(self, trainer: "RunTrainer", step: int) -> None:
        """Search for the documents that an update was left out for, report it, and stop the run or go on."""
        rows = rows_of_update(trainer, step)
        can_search = not trainer.is_sharded and trainer.row_stream is None  # whose rows are gone by now
        culprits = _search(trainer, rows) if can_search and self.left_out < _MAX_SEARCHES else (None, 0)
        update = NonFinite(step, rows, *culprits)
        self.left_out += 1
        if self.report is not None:
            self.report(update)
        if self.on_nonfinite == "stop":
            self.stopped_by = self.stopped_by or update
            trainer.control.should_training_stop = trainer.control.should_save = True


def rows_of_update(trainer: "RunTrainer", step: int) -> list[int]:
    """Return the rows of the training data that an update, counted from 1, saw; rows of a stream are numbered
    as they come, those of all processes together."""
    n_batches = trainer.args.gradient_accumulation_steps * trainer.args.world_size  # in an update
    if trainer.row_stream is not None:
        size = n_batches * trainer.args.per_device_train_batch_size
        return list(range((step - 1) * size, step * size))
    loader: Any = trainer.callback_handler.train_dataloader
    batches = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
    epoch, update = divmod(step - 1, -(-len(loader) // trainer.args.gradient_accumulation_steps))
    order = copy.copy(batches.sampler)
    order.generator = None  # the original's belongs to the training, which goes on drawing from it
    order.set_epoch(epoch)
    epoch_batches = list(BatchSampler(order, batches.batch_size, batches.drop_last))
    return [row for batch in epoch_batches[update * n_batches : (update + 1) * n_batches] for row in batch]


def _search(trainer: Trainer, rows: list[int]) -> tuple[list[Culprit], int]:
    """Return the documents of these rows that are not finite, and the number of all their documents."""
    model: Any = trainer.model
    dataset: Any = trainer.train_dataset
    tokenizer: Any = trainer.processing_class
    was_training = model.training
    model.eval()
    culprits, searched = [], 0
    try:
        for row in rows:
            for number, document in enumerate(_documents(dataset[row])):
                searched += 1
                if not _is_finite(model, document):
                    text = tokenizer.decode(document["input_ids"][:_N_TOKENS_SHOWN])
                    culprits.append(Culprit(row, number, text))
    finally:
        model.train(was_training)
    return culprits, searched


def _documents(row: dict[str, list[int]]) -> Iterator[dict[str, list[int]]]:
    start = 0
    for length in row.pop("seq_lengths", [len(row["input_ids"])]):
        yield {name: values[start : start + length] for name, values in row.items()}
        start += length


def _is_finite(model: nn.Module, document: dict[str, list[int]]) -> bool:
    """True if the loss and gradients of one document are finite with the current weights."""
    trained = [p for p in model.parameters() if p.requires_grad]
    inputs = {n: torch.tensor([document[n]], device=trained[0].device) for n in ("input_ids", "labels")}
    with torch.enable_grad():
        loss = model(**inputs, use_cache=False).loss
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return all(bool(torch.isfinite(t).all()) for t in (loss, *gradients) if t is not None)


class RunLine(LogLine):
    """A log line that knows the updates left out, and the tokens of all processes."""

    def __init__(self, trainer: "RunTrainer", *numbers: Any):
        super().__init__(trainer, *numbers)
        self._steps, finite = trainer.nonfinite_updates.take_verdicts()
        self._finite = HostCopy(finite)
        self._all_tokens = copy_number(trainer.counts.tokens)
        self.left_out: list[int] = []  # once it is read

    def read(self, trainer: Any) -> dict[str, float]:
        logs, metrics = super().read(trainer), self._trl_metrics
        finite = self._finite.read().tolist()
        self.left_out = [step for step, is_finite in zip(self._steps, finite, strict=True) if not is_finite]
        if metrics:  # TRL does not count rows that come again so that all ranks have some
            metrics["num_tokens"] = [int(self._all_tokens.read())]
        return logs | ({"loss": math.nan} if self.left_out else {})


class RunLogging(DeferredLogging):
    """Writes every log line of a run, and searches for what made an update non-finite."""

    is_of_run = True
    kind_of_line = RunLine

    def write(self, trainer: Any) -> LogLine | None:
        line = super().write(trainer)
        for step in line.left_out if isinstance(line, RunLine) else ():
            trainer.nonfinite_updates.handle(trainer, step)
        return line

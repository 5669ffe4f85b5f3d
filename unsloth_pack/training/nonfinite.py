"""Find the documents for which an update is not finite."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import BatchSampler
from transformers import Trainer

if TYPE_CHECKING:
    from unsloth_pack.training.trainer import RunTrainer

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


def find_culprits(trainer: "RunTrainer", step: int, searches: bool) -> NonFinite:
    """Describe an update, counted from 1, that was left out; try its documents alone if `searches`."""
    rows = rows_of_update(trainer, step)
    can_search = not trainer.is_sharded and trainer.row_stream is None  # whose rows are gone by now
    return NonFinite(step, rows, *(_search(trainer, rows) if can_search and searches else (None, 0)))


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

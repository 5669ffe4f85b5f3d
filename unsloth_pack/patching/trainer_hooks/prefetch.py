"""The next batch is loaded while the device computes the update at hand.

transformers asks for a batch when the one before is done with. By then the device waits, if anything in the
step has waited for it. So the next batches are loaded as soon as an update is launched. No thread is needed:
it is time that the host would spend waiting. Workers load ahead by themselves.

TRL's collator describes packed rows by tensors, which the model would have to read back from the device.
Its batches are described here on the host.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.layers.decoder import FastDecoder
from unsloth_pack.packed_row.describe import ROW_KEYWORDS, describe_row
from unsloth_pack.packed_row.labels import PaddedBatch, is_one_run_a_row, padding_has_labels
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow

# Batches that are described where the data lies: nothing that describes them comes back from the GPU.

_CPU = torch.device("cpu")


class RowCollator:
    """A collator that hands on the `packed_row` of a batch, padded or not, beside its tensors.

    It runs in the loader, in a worker's process if there are workers. A trainer leaves the row on the host
    and passes it to the model, which then has nothing to read from the device.

    Args:
        collate: TRL's collator. The tensors by which it describes a row stay out of the batch, but for
            `position_ids`, from which TRL's trainer counts tokens.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]):
        self.collate = collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        batch = dict(self.collate(examples))
        if "position_ids" not in batch:
            return batch | _padding_of(batch)
        shape = (batch["input_ids"].shape[0], batch["input_ids"].shape[1])
        described = {name: batch.pop(name) for name in ROW_KEYWORDS if name in batch}
        row = describe_row(shape, _CPU, position_ids=batch["position_ids"], **described)
        return batch | {"packed_row": row or PackedRow.of_lengths((shape[1],), _CPU)}


def _padding_of(batch: Mapping[str, Any]) -> dict[str, PaddedBatch]:
    """Where a padded batch has tokens, unless the model has to look at it itself."""
    real, labels = batch["attention_mask"].bool(), batch["labels"]
    if not bool(real[:, 0].all()) or not is_one_run_a_row(real.numpy()):  # TRL pads on the right
        return {}
    if labels.shape != real.shape or padding_has_labels(labels, real, IGNORE_INDEX, is_shifted=False):
        return {}
    return {"packed_row": PaddedBatch.of_mask(real.numpy(), _CPU)}


_TRLS_COLLATOR = "trl.trainer.sft_trainer"  # its module


class PrefetchCallback(TrainerCallback):
    """Acts for trainers of patched models only."""

    def __init__(self) -> None:
        self._batches: _Ahead | None = None  # of the epoch at hand

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        self._batches = None
        loader = getattr(train_dataloader, "base_dataloader", None)  # accelerate's, which moves batches
        if model is None or type(loader) is not DataLoader or args.n_gpu > 1:
            return
        if not any(isinstance(module, FastDecoder) for module in model.modules()):
            return
        if is_trls(loader.collate_fn):
            loader.collate_fn = RowCollator(loader.collate_fn)
        if loader.pin_memory:
            train_dataloader._non_blocking = True
        if loader.num_workers == 0 and _has_only_rows(loader.dataset):
            self._load_ahead(loader)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._batches is not None and state.global_step + 1 < state.max_steps:
            self._batches.fetch(args.gradient_accumulation_steps)

    def _load_ahead(self, loader: Any) -> None:
        begin = loader.__iter__

        def begin_epoch() -> Iterator[Any]:
            self._batches = _Ahead(begin())
            return self._batches

        loader.__iter__ = begin_epoch  # accelerate calls it by this name


class _Ahead:
    """An iterator that can be asked to fetch what comes next."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches
        self._fetched: deque[Any] = deque()
        self._failed: Exception | None = None  # after what is fetched

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._fetched:
            return self._fetched.popleft()
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        return next(self._batches)

    def fetch(self, n_batches: int) -> None:
        """Have `n_batches` at hand, or as many as there are. An error is raised when its batch is due."""
        try:
            while self._failed is None and len(self._fetched) < n_batches:
                self._fetched.append(next(self._batches))
        except Exception as error:  # StopIteration too
            self._failed = error


def is_trls(collate: Any) -> bool:
    """Whether a collator is TRL's own for language models, whose batches `RowCollator` knows."""
    return type(collate).__module__ == _TRLS_COLLATOR and type(collate).__name__ == (
        "DataCollatorForLanguageModeling"
    )


def _has_only_rows(dataset: Any) -> bool:
    """Whether reading a row early does nothing else: a data set of a user's may follow the training."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.Dataset):
        return False
    return dataset.format["type"] != "custom"

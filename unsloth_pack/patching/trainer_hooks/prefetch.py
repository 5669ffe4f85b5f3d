"""Load the next batches while the device computes an update.

transformers asks for a batch once the one before is done. If anything in the step has waited for the device,
it then waits for the batch. So the next batches are loaded as soon as an update is launched, in time that the
host would spend waiting; no thread is needed. Workers load ahead by themselves.

TRL's collator describes packed rows by tensors, which the model would have to read back from the device.
`RowCollator` describes its batches on the host.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.layers.decoder import has_fast_decoder
from unsloth_pack.packed_row.describe import ROW_KEYWORDS, describe_row
from unsloth_pack.packed_row.labels import PaddedBatch, is_one_run_a_row, padding_has_labels
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow

_CPU = torch.device("cpu")


class RowCollator:
    """Add the `packed_row` of a batch, padded or not, to what TRL's collator returns.

    It runs in the loader, in a worker's process if there are workers. A trainer leaves the row on the host
    and passes it to the model, which then has nothing to read from the device.

    Args:
        collate: TRL's collator. The tensors by which it describes a row stay out of the batch, except
            `position_ids`, from which TRL's trainer counts tokens.
    """

    def __init__(self, collate: Callable[[list[Any]], Mapping[str, Any]]):
        self.collate = collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        batch = dict(self.collate(examples))
        if "position_ids" not in batch:
            return batch | _describe_padding(batch)
        shape = (batch["input_ids"].shape[0], batch["input_ids"].shape[1])
        description = {name: batch.pop(name) for name in ROW_KEYWORDS if name in batch}
        row = describe_row(shape, _CPU, position_ids=batch["position_ids"], **description)
        return batch | {"packed_row": row or PackedRow.of_lengths((shape[1],), _CPU)}


def _describe_padding(batch: Mapping[str, Any]) -> dict[str, PaddedBatch]:
    """Describe where a padded batch has tokens, unless the model has to look at it itself."""
    real, labels = batch["attention_mask"].bool(), batch["labels"]
    if not bool(real[:, 0].all()) or not is_one_run_a_row(real.numpy()):  # TRL pads on the right
        return {}
    if labels.shape != real.shape or padding_has_labels(labels, real, IGNORE_INDEX, is_shifted=False):
        return {}
    return {"packed_row": PaddedBatch.of_mask(real.numpy(), _CPU)}


class PrefetchCallback(TrainerCallback):
    """Prefetch batches, and describe them on the host, in the training of a patched model."""

    def __init__(self) -> None:
        self._batches: _PrefetchIterator | None = None  # of this epoch

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
        loader: Any = getattr(
            train_dataloader, "base_dataloader", None
        )  # in accelerate's, which moves batches
        if type(loader) is not DataLoader or args.n_gpu > 1 or not has_fast_decoder(model):
            return
        if is_trls(loader.collate_fn):
            loader.collate_fn = RowCollator(loader.collate_fn)
        if loader.pin_memory:
            train_dataloader._non_blocking = True
        if loader.num_workers == 0 and _is_safe_to_read_early(loader.dataset):
            iterate = loader.__iter__

            def begin_epoch() -> Iterator[Any]:
                self._batches = _PrefetchIterator(iterate())
                return self._batches

            vars(loader)["__iter__"] = begin_epoch  # accelerate calls it by this name

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._batches is not None and state.global_step + 1 < state.max_steps:
            self._batches.prefetch(args.gradient_accumulation_steps)


class _PrefetchIterator:
    """An iterator that can load items before they are asked for."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches
        self._loaded: deque[Any] = deque()
        self._error: Exception | None = None  # of the item after those loaded

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._loaded:
            return self._loaded.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return next(self._batches)

    def prefetch(self, n_batches: int) -> None:
        """Load up to `n_batches`, or as many as there are. An error is raised when its batch is due."""
        try:
            while self._error is None and len(self._loaded) < n_batches:
                self._loaded.append(next(self._batches))
        except Exception as error:  # StopIteration too
            self._error = error


def is_trls(collate: Any) -> bool:
    """Whether a collator is TRL's own for language models, whose batches `RowCollator` knows."""
    name = f"{type(collate).__module__}.{type(collate).__name__}"
    return name == "trl.trainer.sft_trainer.DataCollatorForLanguageModeling"


def _is_safe_to_read_early(dataset: Any) -> bool:
    """Whether reading a row has no side effect: a data set of a user's may depend on the training so far."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.Dataset):
        return False
    return dataset.format["type"] != "custom"

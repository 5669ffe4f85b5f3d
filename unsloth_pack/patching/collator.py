"""Batches that are described where the data lies: nothing that describes them comes back from the GPU."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from unsloth_pack.row.from_call import describe_row
from unsloth_pack.row.keywords import ROW_KEYWORDS
from unsloth_pack.row.packed_row import IGNORE_INDEX, PackedRow
from unsloth_pack.row.padded_batch import PaddedBatch, is_one_run_a_row, padding_has_labels

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

"""How full the rows of a training set are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unsloth_pack.data.mapped import scan
from unsloth_pack.packing.dataset import list_lengths
from unsloth_pack.packing.lengths import padded_slots

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class RowFill:
    """Rows as the model will see them.

    Args:
        rows, documents, tokens: in one pass over the data.
        slots: tokens that the rows have room for: packed rows times their capacity; for padded rows, the
            lengths that their batches are padded to, in one random order.
        slots_computed: slots that the model computes; packed rows end with their last document.
    """

    rows: int
    documents: int
    tokens: int
    slots: int
    slots_computed: int

    @property
    def documents_per_row(self) -> float:
        return self.documents / self.rows

    @property
    def fill(self) -> float:
        """The share of slots that hold a token, 0 to 1."""
        return self.tokens / self.slots

    @property
    def padding(self) -> int:
        """Slots that are computed and hold no token."""
        return self.slots_computed - self.tokens


def row_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """`[rows]` int64: the tokens of every row."""
    return list_lengths(dataset, "input_ids")


def document_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """`[documents]` int64: the tokens of every document, packed or not."""
    import pyarrow.compute as pc

    if "seq_lengths" not in dataset.column_names:
        return row_lengths(dataset)
    batches = scan(dataset, ["seq_lengths"], batch_size=10_000)
    lengths = [pc.list_flatten(table["seq_lengths"]).to_numpy() for table in batches]
    return np.concatenate(lengths).astype(np.int64)


def fill_of_packed(dataset: datasets.Dataset, capacity: int) -> RowFill:
    """The fill of packed rows (`input_ids` and `seq_lengths`) that may hold `capacity` tokens."""
    tokens = int(row_lengths(dataset).sum())
    documents = int(list_lengths(dataset, "seq_lengths").sum())
    return RowFill(len(dataset), documents, tokens, len(dataset) * capacity, tokens)


def fill_of_joined(dataset: datasets.Dataset) -> RowFill:
    """The fill of rows that are joined into one without padding."""
    tokens = int(row_lengths(dataset).sum())
    return RowFill(len(dataset), len(dataset), tokens, tokens, tokens)


def fill_of_padded(dataset: datasets.Dataset, batch_size: int, seed: int) -> RowFill:
    """The fill of rows padded to the longest of their batch, in one random order."""
    lengths = row_lengths(dataset)
    order = np.random.default_rng(seed).permutation(lengths)
    slots = padded_slots(order, batch_size)
    return RowFill(len(lengths), len(lengths), int(lengths.sum()), slots, slots)

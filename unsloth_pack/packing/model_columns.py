"""What a model says of packed rows: further columns of packs.

A teacher says which next tokens are likely. A row of N tokens has N k numbers in each column, those of its
first token first:

    teacher_ids          list of int32
    teacher_log_probs    list of float16, in nats, not renormalised

Those of token t predict token t + 1. If that has no label, they are the ids 0 to k - 1 and -inf: nothing is
known there.

The reference of preferences says how likely answers are. A row of D documents has 4 D numbers, those of its
first document first: one for each part, see `data/rows.py`, 0 for the prompt and an answer that is not there.

    reference_log_probs  list of float64, in nats
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

TEACHER_IDS, TEACHER_LOG_PROBS = "teacher_ids", "teacher_log_probs"
TEACHER_COLUMNS = (TEACHER_IDS, TEACHER_LOG_PROBS)
REFERENCE = "reference_log_probs"
BYTES = 6  # of an id of a teacher's and its log-probability


@dataclass(frozen=True)
class PackedTeacher:
    """The teacher of packs."""

    model_name: str  # by its name at that time
    top_k: int  # tokens that are stored for each token of a row
    temperature: float  # that divided its logits


@dataclass(frozen=True)
class PackedReference:
    """The reference of packs of preferences."""

    model_name: str  # by its name at that time
    model_hash: str = ""  # of its files, once it is loaded, see `run.teacher.model_hash`


class RowModel(Protocol):
    """A teacher or reference that `write_packs` asks."""

    packed: PackedTeacher | PackedReference

    def __call__(self, row: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the columns of a packed row, as above; it has `input_ids`, `labels` and `seq_lengths`."""
        ...


def types_of(packed: PackedTeacher | PackedReference) -> dict[str, pa.DataType]:
    """Return the types of the columns of a teacher or reference."""
    import pyarrow as pa

    if isinstance(packed, PackedReference):
        return {REFERENCE: pa.list_(pa.float64())}
    return {TEACHER_IDS: pa.list_(pa.int32()), TEACHER_LOG_PROBS: pa.list_(pa.float16())}


def add_model_columns(tables: Iterable[pa.Table], model: RowModel) -> Iterator[pa.Table]:
    """Append the columns of a model to packed rows of text, and return each row as a table."""
    import pyarrow as pa

    types = types_of(model.packed)
    for table in tables:
        for batch in table.to_batches(max_chunksize=1):
            row = {name: batch[name].flatten().to_numpy() for name in batch.schema.names}
            scored = pa.Table.from_batches([batch])
            for name, values in model(row).items():
                scored = scored.append_column(name, pa.array([values.ravel()], types[name]))
            yield scored

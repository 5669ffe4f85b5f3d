"""A teacher's most likely next tokens in packed rows: two more columns of packs.

A row of N tokens has N k numbers in each, those of its first token first:

    teacher_ids        list of int32
    teacher_log_probs  list of float16, in nats, not renormalised

Those of token t predict token t + 1. If that has no label, they are the ids 0 to k - 1 and -inf: nothing is
known there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

TEACHER_IDS, TEACHER_LOG_PROBS = "teacher_ids", "teacher_log_probs"
TEACHER_COLUMNS = (TEACHER_IDS, TEACHER_LOG_PROBS)
BYTES = 6  # of one id and its log-probability


@dataclass(frozen=True)
class PackedTeacher:
    """The teacher of packs."""

    model_name: str  # by its name at that time
    top_k: int  # tokens that are stored for each token of a row
    temperature: float  # that divided its logits


class Teacher(Protocol):
    """A teacher that `write_packs` asks."""

    packed: PackedTeacher

    def __call__(
        self, ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int32 and log-probabilities float16 `[N, k]`, aligned as above.

        Args:
            ids, labels: `[N]` of a row, not shifted.
            lengths: of its documents.
        """
        ...


def teacher_types() -> dict[str, pa.DataType]:
    """Return the types of the columns."""
    import pyarrow as pa

    return {TEACHER_IDS: pa.list_(pa.int32()), TEACHER_LOG_PROBS: pa.list_(pa.float16())}


def add_teacher_columns(tables: Iterable[pa.Table], teacher: Teacher) -> Iterator[pa.Table]:
    """Append the columns to packed rows, which have `seq_lengths`, and return each row as a table."""
    import pyarrow as pa

    for table in tables:
        for batch in table.to_batches(max_chunksize=1):
            row = (batch[name].flatten().to_numpy() for name in ("input_ids", "labels", "seq_lengths"))
            taught = pa.Table.from_batches([batch])
            for (name, kind), values in zip(teacher_types().items(), teacher(*row), strict=True):
                taught = taught.append_column(name, pa.array([values.ravel()], kind))
            yield taught

"""A teacher's most likely next tokens in packed rows: two more columns of packs.

A row of N tokens has N k numbers in each, those of its first token first:

    teacher_ids        list of int32
    teacher_log_probs  list of float16, in nats, not renormalised

Those of token t predict token t + 1. If that has no label, they are the ids 0 to k - 1 and -inf: nothing is
known there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from unsloth_pack.errors import InputError

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
    """The types of the columns."""
    import pyarrow as pa

    return {TEACHER_IDS: pa.list_(pa.int32()), TEACHER_LOG_PROBS: pa.list_(pa.float16())}


def with_teacher(rows: pa.Table, teacher: Teacher) -> pa.Table:
    """Append the columns to packed rows, which have `seq_lengths`."""
    import pyarrow as pa

    columns = (rows[name].combine_chunks() for name in ("input_ids", "labels", "seq_lengths"))
    results = [teacher(*(x.values.to_numpy() for x in row)) for row in zip(*columns, strict=True)]
    for name, values in zip(TEACHER_COLUMNS, zip(*results, strict=True), strict=True):
        offsets = pa.array(np.cumsum([0, *(x.size for x in values)]), pa.int32())
        flat = pa.array(np.concatenate([x.ravel() for x in values]), teacher_types()[name].value_type)
        rows = rows.append_column(name, pa.ListArray.from_arrays(offsets, flat))
    return rows


def check_teacher_rows(batch: pa.RecordBatch, top_k: int, n_outputs: int, where: str, first_row: int) -> None:
    """Refuse rows of a shard that do not hold k tokens of the student for each of their own."""
    n_ids = np.diff(batch["input_ids"].offsets)
    ends = [batch[name].offsets.to_numpy() for name in TEACHER_COLUMNS]
    for row, (begin, end) in enumerate(pairwise(ends[0])):
        ids = batch[TEACHER_IDS].values[begin:end].to_numpy()
        is_whole = all(of_rows[row + 1] - of_rows[row] == top_k * n_ids[row] for of_rows in ends)
        if not is_whole or ids.min(initial=0) < 0:
            problem, remedy = f"not {top_k} tokens of the teacher for each", "write the packs anew"
        elif ids.max(initial=0) >= n_outputs:
            problem = f"the teacher has token {ids.max()}, and the model outputs 0 to {n_outputs - 1}"
            remedy = "take a teacher of its vocabulary"
        else:
            continue
        raise InputError(f"{where} {first_row + row}: {problem}; {remedy}")

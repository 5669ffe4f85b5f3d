"""Packed rows of a large data set, in the data set cache: built over several processes, by the same plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unsloth_pack.data.kept import Notes, arrow_file, kept, open_kept
from unsloth_pack.data.spans import in_order, spans_of
from unsloth_pack.packing.dataset import RowBuilder, pack_dataset, plan_rows

if TYPE_CHECKING:
    import datasets

    from unsloth_pack.data.tokenize import Documents

_STRATEGY = "bfd"


def pack_documents(documents: Documents, capacity: int, num_proc: int | None = None) -> datasets.Dataset:
    """The rows of `pack_dataset`; where the documents lie in the data set cache, so do the rows.

    Args:
        num_proc: processes that build rows; None for as many as there are cores.
    """
    if not documents.rows.cache_files:
        return pack_dataset(documents.rows, capacity, _STRATEGY)
    key = [documents.fingerprint, capacity, _STRATEGY]
    make = partial(_write, documents=documents.rows, capacity=capacity, num_proc=num_proc)
    return open_kept(kept("packed", key, make)[0])


def _write(folder: Path, documents: datasets.Dataset, capacity: int, num_proc: int | None) -> Notes:
    from datasets.utils import tqdm

    plan, builder = plan_rows(documents, capacity, _STRATEGY)
    spans = spans_of(plan.n_bins, 8 * plan.tokens)
    tasks = list(enumerate(spans))
    with tqdm(total=plan.n_bins, desc="Packing", unit=" rows") as bar:
        for rows in in_order(partial(_write_span, folder, builder), tasks, num_proc):
            bar.update(rows)
    return {}


def _write_span(folder: Path, builder: RowBuilder, task: tuple[int, tuple[int, int]]) -> int:
    number, (first, end) = task
    size = builder.batch_size
    tables = (builder.build(start, min(start + size, end)) for start in range(first, end, size))
    table = next(tables)
    with arrow_file(folder / f"{number}.arrow", table.schema) as stream:
        stream.write_table(table)
        for table in tables:
            stream.write_table(table)
    return end - first

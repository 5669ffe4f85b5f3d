"""pack_dataset: turn a tokenised Hugging Face data set into TRL's packed columns, planned as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from unsloth_pack.data.cache import (
    Notes,
    from_cache,
    give_back,
    in_order,
    memory_maps,
    open_cached,
    scan,
    spans_of,
    write_tables,
)
from unsloth_pack.data.rows import CHANNEL, DOCUMENT, IMAGES
from unsloth_pack.errors import InputError
from unsloth_pack.packing.in_memory import WHOLE_COLUMNS
from unsloth_pack.packing.planner import PackPlan, plan_packs

if TYPE_CHECKING:
    import datasets

    from unsloth_pack.data.tokenize import Documents

_ROWS_A_BATCH, _BYTES_A_BATCH = 256, 64 << 20  # packed rows that are built and written at a time
DOCUMENTS_A_BATCH = 1_000  # documents whose lengths are read at a time
_SCATTERED_DOCUMENTS = 100  # that are copied before memory is given back: each brings in the pages around it


def pack_dataset(
    dataset: object,
    capacity: int,
    strategy: str = "bfd",
    *,
    num_proc: int | None = None,
    buffer_size: int = 2048,
    seed: int | None = 0,
) -> Any:
    """Pack a tokenised data set into rows of at most `capacity` tokens.

    The rows are ready to train on: give them to `SFTTrainer` with `SFTConfig(packing=False,
    padding_free=True, max_length=None)`, whose collator turns `seq_lengths` into positions that restart at
    each document. The collator of another trainer must pass `seq_lengths` on too; a collator that only
    flattens would treat each row as one document.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset` with `input_ids` and perhaps more columns that hold
            one number per token, such as `labels`. The `labels` of a map-style set may also hold one number
            per document, as a list, for a model that answers once per document.
        capacity: tokens of a row; no document may be longer.
        strategy: as for `plan_packs`. A map-style set is planned as a whole, an iterable one `buffer_size`
            documents at a time.
        num_proc: processes that build the rows of a map-style set.
        buffer_size: documents of an iterable set that are planned together. More of them fill rows better
            and take more memory: about 110 bytes a token and column, in each process that reads.
        seed: of the order of the rows of an iterable set that are planned together, with the epoch; None
            leaves those with the longest documents first.

    Returns:
        A data set of the same kind and with the same columns. A row holds its documents one after another,
        without padding; the new column `seq_lengths` holds their lengths. Documents without tokens are left
        out. The rows of a map-style set are in memory; if they do not fit, put them on disk with
        `write_packs`.

        An iterable set keeps the shards of `dataset`, so every document comes exactly once an epoch over all
        `DataLoader` workers and all ranks. `set_epoch` gives the shards, and the rows that are planned
        together, a new order. `state_dict` and `load_state_dict` resume exactly. They cannot if `dataset` is
        shuffled with a buffer, whose documents datasets does not save: reading on is then an error.

    Raises:
        InputError: a document is longer than `capacity`; a column does not hold one number per token; ids or
            labels are not whole numbers; or the data set is packed already, or has a transform. In an
            iterable set, a fault of a document is raised when the document is read, and the error numbers
            documents in the order in which the process reads them.
    """
    import datasets

    if isinstance(dataset, datasets.IterableDataset):
        from unsloth_pack.packing.iterable import pack_iterable

        if dataset.column_names is not None:
            check_columns(dataset)
        return pack_iterable(dataset, capacity, strategy, buffer_size, seed)
    plan, builder = plan_rows(dataset, capacity, strategy)
    tables = in_order(builder, spans_of(plan.n_bins, 8 * plan.tokens), num_proc or 1)
    fingerprint = datasets.fingerprint.generate_random_fingerprint()
    return datasets.Dataset(pa.concat_tables(tables), fingerprint=fingerprint)


def plan_rows(dataset: datasets.Dataset, capacity: int, strategy: str) -> tuple[PackPlan, RowBuilder]:
    """The plan for the whole set, and the builder of its rows. Raises as `pack_dataset`."""
    columns = check_columns(dataset)
    if dataset.format["type"] == "custom":
        raise InputError(
            "the data set has a transform, which packing would pass over; apply it with .map, or remove it "
            "with .reset_format()"
        )
    lengths = list_lengths(dataset, "input_ids")
    for column in columns:
        if column == CHANNEL or _is_of_images(dataset, column):
            continue
        of_column = list_lengths(dataset, column)
        are_of_documents = column == "labels" and bool((of_column == 1).all())
        if not are_of_documents and not np.array_equal(of_column, lengths):
            raise InputError(f"column {column!r} does not hold one number per token; correct or remove it")
    plan = plan_packs(lengths, capacity, strategy)
    if not plan.n_bins:
        raise InputError(f"none of {len(lengths)} documents has tokens; give a tokenised data set")
    return plan, RowBuilder(dataset.select_columns(columns), plan)


class RowBuilder:
    """Builds packed rows by their numbers from Arrow arrays: no token becomes a Python object."""

    def __init__(self, dataset: datasets.Dataset, plan: PackPlan):
        self._documents = dataset.with_format("arrow")
        self._order, self._offsets = plan.order, plan.offsets
        self.bytes_a_row = dataset.data.nbytes // max(1, plan.n_bins)  # on average
        self._batch_size = max(1, min(_ROWS_A_BATCH, _BYTES_A_BATCH // max(1, self.bytes_a_row)))

    def __call__(self, span: tuple[int, int]) -> pa.Table:
        return pa.concat_tables(self.tables(*span))

    def tables(self, first: int, end: int) -> Iterator[pa.Table]:
        """The packed rows `first` to `end - 1`, some at a time."""
        for start in range(first, end, self._batch_size):
            yield self.build(start, min(start + self._batch_size, end))

    def build(self, first: int, last: int) -> pa.Table:
        """The packed rows `first` to `last - 1`."""
        starts = self._offsets[first : last + 1]
        columns = self._gathered(self._order[starts[0] : starts[-1]])
        starts = starts - starts[0]  # the first document of each row
        lengths = columns["input_ids"].value_lengths().to_numpy()
        images = columns.pop(IMAGES, None)
        rows = {name: _joined(lists, starts) for name, lists in columns.items()}
        if images is not None:
            rows[IMAGES] = _images_of_rows(images, starts)
        rows["seq_lengths"] = pa.ListArray.from_arrays(
            pa.array(starts.astype(np.int32)), pa.array(lengths.astype(np.int64))
        )
        return pa.table(rows)

    def _gathered(self, numbers: np.ndarray) -> dict[str, pa.Array]:
        """The columns of these documents, copied from wherever they lie."""
        parts: dict[str, list[pa.Array]] = {name: [] for name in self._documents.column_names}
        mapped = memory_maps(self._documents)
        for first in range(0, len(numbers), _SCATTERED_DOCUMENTS):
            table = self._documents[numbers[first : first + _SCATTERED_DOCUMENTS]]
            for name, of_column in parts.items():
                of_column.append(pa.concat_arrays(table[name].chunks))
            give_back(mapped)
        return {name: pa.concat_arrays(of_column) for name, of_column in parts.items()}


def _joined(lists: pa.Array, starts: np.ndarray) -> pa.Array:
    """The lists of each row as one, from those of each document."""
    before = np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy())])
    return pa.ListArray.from_arrays(pa.array(before[starts].astype(np.int32)), lists.flatten())


def _images_of_rows(images: pa.Array, starts: np.ndarray) -> pa.Array:
    """The images of rows, each with the number of its document in its row, from those of each document."""
    counts = images.value_lengths().to_numpy().astype(np.int64)
    before = np.concatenate([[0], np.cumsum(counts)])
    place = np.arange(len(counts)) - np.repeat(starts[:-1], np.diff(starts))
    of_images = images.flatten()
    fields = of_images.flatten()
    documents = pa.array(np.repeat(place, counts).astype(np.int32))
    whole = pa.StructArray.from_arrays([documents, *fields], [DOCUMENT, *of_images.type.names])
    return pa.ListArray.from_arrays(pa.array(before[starts].astype(np.int32)), whole)


def _is_of_images(dataset: datasets.Dataset, column: str) -> bool:
    """Whether a column holds the images of documents, as `images.stored` writes them."""
    inner = getattr(dataset.features[column], "feature", None)
    return column == IMAGES and isinstance(inner, dict) and "tokens" in inner


def check_columns(dataset: object) -> list[str]:
    """The names of the columns of a data set that is tokenised and not packed yet; others are refused."""
    names = getattr(dataset, "column_names", None)
    if isinstance(dataset, Mapping) or names is None:
        remedy = "give a datasets.Dataset or IterableDataset, such as one split"
        raise InputError(f"dataset is a {type(dataset).__name__}; {remedy}")
    if "input_ids" not in names:
        raise InputError(f"the data set has the columns {', '.join(names)}; tokenise it, it needs input_ids")
    if "seq_lengths" in names:
        raise InputError("the data set has seq_lengths: it is packed already; train on it as it is")
    return list(names)


def check_kind(column: str, kind: pa.DataType | None, shown: object) -> None:
    """Refuse a column of the type `shown` unless its lists hold numbers, whole ones for ids and labels."""
    from pyarrow import types

    is_fraction = kind is not None and types.is_floating(kind)
    whole = (types.is_integer, types.is_boolean, types.is_null)
    if kind is None or not (is_fraction or any(is_kind(kind) for is_kind in whole)):
        raise InputError(f"column {column!r} holds {shown}, not one number a token; remove it")
    if is_fraction and column in WHOLE_COLUMNS:
        raise InputError(f"column {column!r} holds {kind}; give whole numbers, such as int64")


def list_lengths(dataset: datasets.Dataset, column: str) -> np.ndarray:
    """`[rows]` int64: how many numbers each row's list has. The numbers themselves are checked too."""
    import pyarrow.compute as pc

    parts = [np.zeros(0, np.int64)]
    row = 0
    for table in scan(dataset, [column], DOCUMENTS_A_BATCH):
        lists = table[column].combine_chunks()  # a shuffled set has one chunk per row, slow to read
        _check_lists(lists, column, row)
        parts.append(pc.list_value_length(lists).to_numpy().astype(np.int64))
        row += len(lists)
    return np.concatenate(parts)


def _check_lists(lists: pa.Array, column: str, row: int) -> None:
    """Refuse a column that holds anything but lists of numbers; `row` is the number of its first row here."""
    import pyarrow.compute as pc

    check_kind(column, lists.type.value_type if hasattr(lists.type, "value_type") else None, lists.type)
    values = lists.flatten()
    if lists.null_count:
        row += pc.index(pc.is_null(lists), True).as_py()
    elif values.null_count:
        row += pc.list_parent_indices(lists)[pc.index(pc.is_null(values), True)].as_py()
    else:
        return
    raise InputError(f"row {row}, column {column!r}: a token is None; give numbers, or remove the row")


# Packed rows of a large data set, in the data set cache: built over several processes, by the same plan.

_STRATEGY = "bfd"


def pack_documents(documents: Documents, capacity: int, num_proc: int | None = None) -> datasets.Dataset:
    """The rows of `pack_dataset`; where the documents lie in the data set cache, so do the rows."""
    if not documents.rows.cache_files:
        return pack_dataset(documents.rows, capacity, _STRATEGY)
    key = [documents.fingerprint, capacity, _STRATEGY, *documents.rows.column_names]
    make = partial(_write, documents=documents.rows, capacity=capacity, num_proc=num_proc)
    return open_cached(from_cache("packed", key, make)[0])


def _write(folder: Path, documents: datasets.Dataset, capacity: int, num_proc: int | None) -> Notes:
    from datasets.utils import tqdm

    plan, builder = plan_rows(documents, capacity, _STRATEGY)
    tasks = list(enumerate(spans_of(plan.n_bins, 8 * plan.tokens)))
    with tqdm(total=plan.n_bins, desc="Packing", unit=" rows") as bar:
        for rows in in_order(partial(_write_span, folder, builder), tasks, num_proc):
            bar.update(rows)
    return {}


def _write_span(folder: Path, builder: RowBuilder, task: tuple[int, tuple[int, int]]) -> int:
    number, (first, end) = task
    write_tables(folder / f"{number}.arrow", builder.tables(first, end))
    return end - first

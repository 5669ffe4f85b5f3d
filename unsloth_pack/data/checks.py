"""Checks of tokenised rows, made on the Arrow buffers before training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unsloth_pack.data.mapped import scan
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets


def check_token_ids(dataset: datasets.Dataset, vocab_size: int) -> None:
    """Refuse token ids without an embedding; on a GPU they would fail an assertion that names no row.

    Args:
        dataset: holds `input_ids`, one list of integers a row.
        vocab_size: rows of the embedding; valid ids are 0 to vocab_size - 1.

    Raises:
        InputError: there is no such column, it does not hold lists of integers, or an id is outside the
            vocabulary; the error names the first such row and id.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if "input_ids" not in dataset.column_names:
        raise InputError(
            f"no column 'input_ids' among {', '.join(dataset.column_names)}; tokenise the dataset first"
        )
    start = 0
    for table in scan(dataset, ["input_ids"], batch_size=256):
        column = table["input_ids"].combine_chunks()
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if not is_list or not pa.types.is_integer(column.type.value_type):
            raise InputError(
                f"column 'input_ids' holds {column.type}, not lists of integers; tokenise the dataset first"
            )
        ids, row_of_id = column.flatten(), pc.list_parent_indices(column)
        valid = pc.and_(pc.greater_equal(ids, 0), pc.less(ids, vocab_size)).fill_null(False)
        first = pc.index(valid, False).as_py()
        if first >= 0:
            raise InputError(
                f"row {start + row_of_id[first].as_py()}, column 'input_ids': token id {ids[first]} is "
                f"outside the vocabulary, 0 to {vocab_size - 1} ({vocab_size} ids); tokenise with the "
                "tokenizer of this model, or resize its embeddings"
            )
        start += len(column)

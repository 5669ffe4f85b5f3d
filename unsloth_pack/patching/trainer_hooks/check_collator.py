"""Refuse collators that drop where the documents of packed rows end.

A model sees only what the collator makes of a row. A callback sees the trainer's rows and its collator.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.errors import InputError
from unsloth_pack.layers.decoder import has_fast_decoder
from unsloth_pack.packed_row.describe import ROW_KEYWORDS, describe_row

_COLUMN = "seq_lengths"
_N_ROWS = 32  # to look for a row of several documents in
# Stands for the rows of a stream, which must not be read early
_EXAMPLE = {"input_ids": [0, 0, 0], "labels": [-100, -100, 0], _COLUMN: [1, 2]}


class CheckCollatorCallback(TrainerCallback):
    """Check the collator when the training of a patched model begins."""

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Refuse a collator that drops where the documents of a packed row end.

        Raises:
            InputError: the collator drops it, or `seq_lengths` is a column of something else.
        """
        if not has_fast_decoder(model):
            return
        for row in _packed_rows(getattr(train_dataloader, "dataset", None)):
            documents = _document_lengths(train_dataloader.collate_fn, row)
            if documents is None:
                continue
            if np.ndim(row[_COLUMN]) != 1:  # not a column that packing makes
                n_tokens = len(row.get("input_ids", ()))
                if documents not in ([], [n_tokens]):
                    raise InputError(
                        f"train_dataset has the column {_COLUMN}, {row[_COLUMN]!r} in a row of {n_tokens} "
                        "tokens; rename it: it means lengths of documents"
                    )
                continue
            lengths = [n for n in row[_COLUMN] if n]
            # A collator may pad after them: TRL makes every pad token a document
            if documents[: len(lengths)] != lengths:
                raise InputError(
                    f"train_dataset has the column {_COLUMN}, but the collator drops where documents end; "
                    "give SFTConfig(padding_free=True, packing=False, max_length=None), or Trainer the "
                    "default_data_collator"
                )
            return


def _packed_rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """Yield rows whose `seq_lengths` name several documents or are no list; none of an unpacked data set."""
    if isinstance(dataset, IterableDataset):
        if hasattr((getattr(dataset, "features", None) or {}).get(_COLUMN), "feature"):  # a list
            yield _EXAMPLE
        return
    for number in islice(range(len(dataset or ())), _N_ROWS):
        row = dataset[number]
        lengths = row.get(_COLUMN) if isinstance(row, Mapping) else None
        if lengths is None:
            return
        if np.ndim(lengths) != 1 or sum(n > 0 for n in lengths) > 1:
            yield row


def _document_lengths(collate: Any, row: Mapping[str, Any]) -> list[int] | None:
    """Return the lengths of the documents that the model sees in this row's batch; None if unknown."""
    try:
        batch = collate([row])
        if "packed_row" in batch:  # `RowCollator` and its like drop nothing
            return None
        names = (*ROW_KEYWORDS, "position_ids", "attention_mask")
        arguments = {name: batch[name] for name in names if name in batch}
        described = describe_row(tuple(batch["input_ids"].shape), torch.device("cpu"), **arguments)
    except Exception:  # the first step raises it with a better message
        return None
    if described is None:
        return []
    pairs = zip(described.lengths, described.is_padding, strict=True)
    return [length for length, is_padding in pairs if not is_padding]

"""Rows that are packed before training: the collator has to hand on where their documents end.

A model gets what the collator makes, and cannot know what that has dropped. A callback can: it sees the
trainer's rows and its collator.
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
from unsloth_pack.layers.decoder import FastDecoder
from unsloth_pack.packed_row.describe import ROW_KEYWORDS, describe_row

_COLUMN = "seq_lengths"
_N_ROWS = 32  # among which one of several documents is sought
# Stands for the rows of a stream, of which none can be read ahead
_EXAMPLE = {"input_ids": [0, 0, 0], "labels": [-100, -100, 0], _COLUMN: [1, 2]}


class CheckCollatorCallback(TrainerCallback):
    """Acts for trainers of patched models only."""

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
            InputError: it drops this.
        """
        if model is None or not any(isinstance(module, FastDecoder) for module in model.modules()):
            return
        for row in _packed_rows(getattr(train_dataloader, "dataset", None)):
            documents = _documents(train_dataloader.collate_fn, row)
            if documents is None:
                continue
            if np.ndim(row[_COLUMN]) != 1:  # a column of the same name, which no packing has made
                n_tokens = len(row.get("input_ids", ()))
                if documents not in ([], [n_tokens]):
                    raise InputError(
                        f"train_dataset has the column {_COLUMN}, {row[_COLUMN]!r} in a row of {n_tokens} "
                        "tokens; rename it: it means lengths of documents"
                    )
                continue
            lengths = [n for n in row[_COLUMN] if n]
            # Behind them a collator may pad: TRL makes every pad token a document
            if documents[: len(lengths)] != lengths:
                raise InputError(
                    f"train_dataset has the column {_COLUMN}, but the collator drops where documents end; "
                    "give SFTConfig(padding_free=True, packing=False, max_length=None), or Trainer the "
                    "default_data_collator"
                )
            return


def _packed_rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    """Rows of several documents, or of a foreign column; none where the data set is not packed."""
    if isinstance(dataset, IterableDataset):
        if hasattr((getattr(dataset, "features", None) or {}).get(_COLUMN), "feature"):  # a list of them
            yield _EXAMPLE
        return
    for number in islice(range(len(dataset or ())), _N_ROWS):
        row = dataset[number]
        lengths = row.get(_COLUMN) if isinstance(row, Mapping) else None
        if lengths is None:
            return
        if np.ndim(lengths) != 1 or sum(n > 0 for n in lengths) > 1:
            yield row


def _documents(collate: Any, row: Mapping[str, Any]) -> list[int] | None:
    """The lengths of the documents in the batch of this row, as the model reads them; None if unknown."""
    try:
        batch = collate([row])
        if "packed_row" in batch:  # it is the row itself
            return None
        names = (*ROW_KEYWORDS, "position_ids", "attention_mask")
        given = {name: batch[name] for name in names if name in batch}
        described = describe_row(tuple(batch["input_ids"].shape), torch.device("cpu"), **given)
    except Exception:  # the first step tells it better
        return None
    if described is None:
        return []
    pairs = zip(described.lengths, described.is_padding, strict=True)
    return [length for length, is_padding in pairs if not is_padding]

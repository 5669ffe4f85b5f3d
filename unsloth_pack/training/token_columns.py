"""Batches of rows with further numbers for each token, or for each document."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unsloth_pack.data.rows import CHANNEL
from unsloth_pack.packing.model_columns import TEACHER_IDS, TEACHER_LOG_PROBS
from unsloth_pack.patching.deferred_logging import LOSS_WEIGHTS
from unsloth_pack.training.document_losses import Batch

_COLUMNS = {  # the dtype in a batch, and the size of a token's numbers
    TEACHER_IDS: (torch.int32, [-1]),
    TEACHER_LOG_PROBS: (torch.float16, [-1]),
    LOSS_WEIGHTS: (torch.float32, []),
}


class TokenColumnCollator:
    """Add columns that rows have to a batch `[1, N]`.

    A stored teacher's `teacher_ids` int32 and `teacher_log_probs` float16 `[1, N, k]` of a token predict the
    token after it. `loss_weights` float32 `[1, N]` are those of rollouts. `channel` int64 `[documents]` says
    which data set each is of; batches that are padded have it too.
    """

    def __init__(self, collate: Callable[[Any], Mapping[str, Any]]):
        self.collate = collate

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        batch = dict(self.collate(rows))
        n_tokens = sum(len(row["input_ids"]) for row in rows)
        if CHANNEL in rows[0]:
            batch[CHANNEL] = torch.tensor([number for row in rows for number in row[CHANNEL]])
        for name in _COLUMNS.keys() & rows[0].keys():
            dtype, size = _COLUMNS[name]
            values = torch.from_numpy(np.concatenate([row[name] for row in rows]))
            batch[name] = values.to(dtype).view(1, n_tokens, *size)
        return batch

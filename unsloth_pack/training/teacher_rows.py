"""Batches of packed rows with what a stored teacher predicts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unsloth_pack.packing.teacher_columns import TEACHER_IDS, TEACHER_LOG_PROBS

_DTYPES = {TEACHER_IDS: torch.int32, TEACHER_LOG_PROBS: torch.float16}


class TeacherCollator:
    """Add `teacher_ids` int32 and `teacher_log_probs` float16 `[1, N, k]` to a batch `[1, N]`.

    Those of a token predict the token after it. Rows without these columns get none.
    """

    def __init__(self, collate: Callable[[Any], Mapping[str, Any]]):
        self.collate = collate

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        batch = dict(self.collate(rows))
        n_tokens = sum(len(row["input_ids"]) for row in rows)
        for name, dtype in _DTYPES.items():
            if name in rows[0]:
                values = torch.from_numpy(np.concatenate([row[name] for row in rows])).to(dtype)
                batch[name] = values.view(1, n_tokens, -1)
        return batch

"""A model as the teacher whose most likely tokens packs hold."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.errors import InputError
from unsloth_pack.kernels import linear_top_k
from unsloth_pack.losses.head import LabelledHead, read_head, why_head_not_fused
from unsloth_pack.packed_row.row import IGNORE_INDEX
from unsloth_pack.packing.teacher_columns import PackedTeacher
from unsloth_pack.verification import probe


class ModelTeacher:
    """Asks a patched model for the most likely next tokens of packed rows: a `packing.Teacher`.

    `loading` are further arguments of `FastLanguageModel.from_pretrained`.

    Raises:
        InputError: the model cannot be loaded, or its head only computes all logits.
        LeakFound: documents of a packed row reach each other.
    """

    def __init__(self, packed: PackedTeacher, loading: Mapping[str, Any]):
        model: Any = FastLanguageModel.from_pretrained(packed.model_name, **loading)[0]
        if why := why_head_not_fused(model):
            raise InputError(f"{packed.model_name} cannot teach: {why}; load it in another way")
        self.packed = packed
        probe(model)
        self._model = model.eval()
        self._head = read_head(model).at_temperature(packed.temperature)

    @torch.no_grad()
    def __call__(
        self, ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        labels = np.append(labels, IGNORE_INDEX)
        labels[np.cumsum(lengths)] = IGNORE_INDEX  # the first token of a document is not predicted
        device = self._head.weight.device
        ids_1N, labels_1N = (torch.tensor(x, device=device)[None] for x in (ids, labels[1:]))
        labelled = LabelledHead(self._head, labels_1N)
        decoded = self._model.get_decoder()(ids_1N, packed_seq_lengths=lengths.tolist(), use_cache=False)
        top = labelled.call(linear_top_k, decoded.last_hidden_state, k=self.packed.top_k)
        log_probs = top.log_probs[0].half().cpu().numpy()
        if np.isnan(log_probs).any():
            name = self.packed.model_name
            raise InputError(f"{name} gives probabilities that are no numbers; give --dtype float32")
        return top.ids[0].cpu().numpy(), log_probs

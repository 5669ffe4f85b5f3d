"""A model whose answers packs hold: a teacher's likely tokens, or a reference's log-probabilities."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from unsloth_pack.api import FastLanguageModel
from unsloth_pack.checkpoints.loading import find_model, load_config
from unsloth_pack.checkpoints.names import ADAPTER, model_files
from unsloth_pack.data.cache import digest
from unsloth_pack.errors import InputError
from unsloth_pack.kernels import linear_top_k
from unsloth_pack.losses.head import LabelledHead, read_head, why_head_not_fused
from unsloth_pack.losses.preferences import DpoLoss
from unsloth_pack.packed_row.row import IGNORE_INDEX
from unsloth_pack.packing.model_columns import (
    REFERENCE,
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    PackedReference,
    PackedTeacher,
)
from unsloth_pack.training.objective import causal_lm, trained_model
from unsloth_pack.training.preferences import MISMATCHED_BATCH, PreferenceCollator
from unsloth_pack.verification import probe


class LoadedRowModel:
    """Asks a patched model about packed rows: a `packing.RowModel`.

    `loading` are further arguments of `FastLanguageModel.from_pretrained`.

    Raises:
        InputError: the model cannot be loaded, its head only computes all logits, or it answers with NaN.
        LeakFound: documents of a packed row reach each other.
    """

    def __init__(self, packed: PackedTeacher | PackedReference, loading: Mapping[str, Any]):
        model: Any = FastLanguageModel.from_pretrained(packed.model_name, **loading)[0]
        if why := why_head_not_fused(model):
            raise InputError(f"{packed.model_name} cannot teach: {why}; load it in another way")
        self.packed = packed
        if isinstance(packed, PackedReference):
            trained_model(model)  # it computes the loss of a preference
            self.packed = replace(packed, model_hash=model_hash(packed.model_name))
        probe(model)
        self._model = causal_lm(model.eval())

    @torch.no_grad()
    def __call__(self, row: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        packed = self.packed
        columns = self._predict(row, packed) if isinstance(packed, PackedTeacher) else self._score(row)
        if any(np.isnan(values).any() for values in columns.values()):
            name = packed.model_name
            raise InputError(f"{name} gives probabilities that are no numbers; give --dtype float32")
        return columns

    def _predict(self, row: Mapping[str, np.ndarray], teacher: PackedTeacher) -> dict[str, np.ndarray]:
        """Return the most likely next tokens."""
        ids, lengths = row["input_ids"], row["seq_lengths"]
        labels = np.append(row["labels"], IGNORE_INDEX)
        labels[np.cumsum(lengths)] = IGNORE_INDEX  # the first token of a document is not predicted
        head = read_head(self._model).at_temperature(teacher.temperature)
        device = head.weight.device
        ids_1N, labels_1N = (torch.tensor(x, device=device)[None] for x in (ids, labels[1:]))
        labelled = LabelledHead(head, labels_1N)
        decoded = self._model.get_decoder()(ids_1N, packed_seq_lengths=lengths.tolist(), use_cache=False)
        top = labelled.call(linear_top_k, decoded.last_hidden_state, k=teacher.top_k)
        columns = {TEACHER_IDS: top.ids[0], TEACHER_LOG_PROBS: top.log_probs[0].half()}
        return {name: x.cpu().numpy() for name, x in columns.items()}

    def _score(self, row: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the log-probabilities of answers, as a `PreferenceLoss` sums them up."""
        loss = self._model.training_loss = DpoLoss()
        own = PreferenceCollator(self._model.fast_decoder.why_no_branches is None)([row])
        others = own.pop(MISMATCHED_BATCH, None)
        self._model(**send_to_device(own, self._model.device), use_cache=False)
        chosen, rejected = loss.values["logps/chosen"], loss.values["logps/rejected"]
        nothing = mismatched = torch.zeros_like(chosen)
        if others is not None:
            self._model(**send_to_device(others, self._model.device), use_cache=False)
            mismatched = loss.values["logps/chosen"]
        scores_D4 = torch.stack([nothing, chosen, rejected, mismatched], dim=1)
        return {REFERENCE: scores_D4.cpu().numpy()}


def model_hash(model_name: str) -> str:
    """Hash a model with its adapter: SHA-256 of the files of weights, or of its commit on the hub."""
    base, adapter = find_model(model_name)
    names = [Path(base, name) for name in model_files(Path(base))]
    names += [Path(adapter, name) for name in sorted(ADAPTER)] if adapter is not None else []
    weights = [path for path in names if path.suffix in (".safetensors", ".bin") and path.is_file()]
    commit = str(getattr(load_config(base), "_commit_hash", None))
    return hashlib.sha256("".join([commit, *map(digest, weights)]).encode()).hexdigest()


def check_reference(packed: PackedReference, model_name: str, folder: Path) -> None:
    """Refuse packs whose reference is not the model that a run begins with."""
    if model_hash(model_name) != packed.model_hash:
        raise InputError(
            f"{folder} holds the reference {packed.model_name}, and {model_name} has other weights; "
            "teach the packs by it, or begin with the reference"
        )

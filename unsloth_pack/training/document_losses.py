"""Average the losses of an evaluation over tokens and over documents, however they are batched."""

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn


class DocumentLosses:
    """The loss of every document of one evaluation under TRL's loss, whose own mean is over batches."""

    def __init__(self) -> None:
        self._batches: list[Tensor] = []  # each [2, documents], see `_document_losses`

    @contextmanager
    def noted(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
        """Record the losses of the one batch that the model is called with inside this context."""
        outputs: list[Any] = []
        with model.register_forward_hook(lambda *call: outputs.append(call[-1])):
            yield
        self._batches.append(self._of_batch(outputs[0], inputs))

    def means(self, rows: Dataset, prefix: str) -> dict[str, float]:
        """Return `{prefix}_loss` and the like, of all ranks. Batching, packing and ranks change none."""
        by_rank = gather_object([[batch.cpu() for batch in self._batches]])
        in_order = [batch for turn in zip(*by_rank, strict=True) for batch in turn]
        # If the ranks cannot share out the rows evenly, the first rows come again at the end.
        packed = "seq_lengths" in rows.column_names
        documents: list[Sized] = rows.with_format(None)["seq_lengths"] if packed else []
        n_documents = sum(map(len, documents)) if packed else len(rows)
        return self._means_of(torch.cat(in_order, dim=1)[:, :n_documents], prefix)

    def _of_batch(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        return _document_losses(outputs, inputs.get("position_ids"))

    def _means_of(self, by_document: Tensor, prefix: str) -> dict[str, float]:
        """Return `{prefix}_loss`, a mean over tokens, and `{prefix}_sample_loss`, over means of documents."""
        sums, counts = by_document
        by_token, by_document = sums.sum() / counts.sum(), (sums / counts)[counts > 0].mean()
        return {f"{prefix}_loss": float(by_token), f"{prefix}_sample_loss": float(by_document)}


def _document_losses(outputs: Any, position_ids: Tensor | None) -> Tensor:
    """`[2, documents]` float64: the summed loss and the counted tokens of every document of a batch.

    `log_probs` and `label_mask` are `[B, T - 1]`; position_ids `[1, T]`, or None if each row is one document.
    """
    per_token = torch.stack([-outputs.log_probs.double(), outputs.label_mask.double()])
    if position_ids is None:
        return per_token.sum(dim=-1)
    document = (position_ids == 0).cumsum(dim=-1)[0, :-1] - 1
    n_documents = int((position_ids == 0).sum())
    return per_token.new_zeros(2, n_documents).index_add_(1, document, per_token[:, 0])

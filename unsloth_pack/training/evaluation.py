"""Evaluation losses that do not depend on how documents are batched or packed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn


class DocumentLosses:
    """The loss of every document of an evaluation under TRL's loss, whose own mean is over batches."""

    def __init__(self) -> None:
        self._batches: list[Tensor] = []  # each [2, documents], see `_document_losses`

    def clear(self) -> None:
        """Begin an evaluation."""
        self._batches = []

    @contextmanager
    def noted(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
        """Inside this context the model is called once, with a batch, whose losses are kept."""
        caught: list[Any] = []
        with model.register_forward_hook(lambda *call: caught.append(call[-1])):
            yield
        self._batches.append(_document_losses(caught[0], inputs.get("position_ids")))

    def means(self, rows: Any, prefix: str) -> dict[str, float]:
        """Two means over the evaluation of all ranks, which batching, packing and the ranks do not change.

        Args:
            rows: the data set that was evaluated.
            prefix: of the metrics' names.

        Returns:
            `{prefix}_loss`, over all counted tokens, and `{prefix}_sample_loss`, over the documents' means.
        """
        by_rank = gather_object([[batch.cpu() for batch in self._batches]])
        as_dealt_out = [batch for turn in zip(*by_rank, strict=True) for batch in turn]
        # If the ranks cannot share out the rows evenly, the first rows come again at the end.
        sums, counts = torch.cat(as_dealt_out, dim=1)[:, : _count_documents(rows)]
        by_token, by_document = sums.sum() / counts.sum(), (sums / counts)[counts > 0].mean()
        return {f"{prefix}_loss": float(by_token), f"{prefix}_sample_loss": float(by_document)}


def _count_documents(rows: Any) -> int:
    packed = "seq_lengths" in rows.column_names
    return sum(map(len, rows.with_format(None)["seq_lengths"])) if packed else len(rows)


def _document_losses(outputs: Any, position_ids: Tensor | None) -> Tensor:
    """`[2, documents]` float64: the summed loss and the counted tokens of every document of a batch.

    Args:
        outputs: of TRL's loss; `log_probs` and `label_mask` are `[B, T - 1]`.
        position_ids: `[1, T]`, restarting at every document; None if each row is one document.
    """
    per_token = torch.stack([-outputs.log_probs.double(), outputs.label_mask.double()])
    if position_ids is None:
        return per_token.sum(dim=-1)
    document = (position_ids == 0).cumsum(dim=-1)[0, :-1] - 1
    n_documents = int((position_ids == 0).sum())
    return per_token.new_zeros(2, n_documents).index_add_(1, document, per_token[:, 0])

"""Average the losses of an evaluation over tokens and over documents, however they are batched."""

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn

Scores = dict[str, Tensor]  # `[B, T - 1]` by name, 0 without a label; `counted` are the labels


def _scores_of_trl(outputs: Any) -> Scores:
    return {"counted": outputs.label_mask, "loss": -outputs.log_probs}


class DocumentLosses:
    """The loss of every document of one evaluation under TRL's loss, whose own mean is over batches.

    Args:
        read: the scores of a batch from the model's output, `loss` among them.
    """

    def __init__(self, read: Callable[[Any], Scores] = _scores_of_trl) -> None:
        self._read = read
        self._batches: list[Tensor] = []  # each [scores, documents], see `_sum_by_document`
        self._names: list[str] = []

    @contextmanager
    def noted(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
        """Record the scores of the one batch that the model is called with inside this context."""
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
        scores = self._read(outputs)
        self._names = list(scores)
        return _sum_by_document(list(scores.values()), inputs.get("position_ids"))

    def _means_of(self, by_document: Tensor, prefix: str) -> dict[str, float]:
        """Return `{prefix}_loss`, a mean over tokens, `{prefix}_sample_loss`, over means of documents, ..."""
        counts, *sums = by_document
        means = {f"{prefix}_token_count": float(counts.sum())}
        for name, of_documents in zip(self._names[1:], sums, strict=True):
            means[f"{prefix}_{name}"] = float(of_documents.sum() / counts.sum())
            means[f"{prefix}_sample_{name}"] = float((of_documents / counts)[counts > 0].mean())
        return means


def _sum_by_document(scores: list[Tensor], position_ids: Tensor | None) -> Tensor:
    """`[scores, documents]` float64: sums of scores `[B, T - 1]` over every document of a batch.

    position_ids `[1, T]`, or None if each row is one document.
    """
    per_token = torch.stack([score.double() for score in scores])
    if position_ids is None:
        return per_token.sum(dim=-1)
    document = (position_ids == 0).cumsum(dim=-1)[0, :-1] - 1
    n_documents = int((position_ids == 0).sum())
    return per_token.new_zeros(len(scores), n_documents).index_add_(1, document, per_token[:, 0])

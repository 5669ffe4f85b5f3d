"""Average the losses of an evaluation over tokens and over documents, however they are batched."""

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn

Batch = dict[str, Any]
Values = dict[str, Tensor]
Means = dict[str, float]


class DocumentLosses:
    """The values of every document of one evaluation.

    Args:
        read: `[documents]` by name, from the output of the model and the inputs of a batch.
        mean: what is logged, from those of all documents.
    """

    def __init__(self, read: Callable[[Any, Batch], Values], mean: Callable[[Values], Means]) -> None:
        self._read, self._mean = read, mean
        self._batches: list[Values] = []

    @contextmanager
    def noted(self, model: nn.Module, inputs: Batch) -> Iterator[None]:
        """Record the values of the one batch that the model is called with inside this context."""
        outputs: list[Any] = []
        with model.register_forward_hook(lambda *call: outputs.append(call[-1])):
            yield
        self._batches.append(self._read(outputs[0], inputs))

    def means(self, rows: Dataset, prefix: str) -> Means:
        """Return `{prefix}_loss` and the like, of all ranks. Batching, packing and ranks change none."""
        by_rank = gather_object([[{name: x.cpu() for name, x in each.items()} for each in self._batches]])
        in_order = [batch for turn in zip(*by_rank, strict=True) for batch in turn]
        # If the ranks cannot share out the rows evenly, the first rows come again at the end.
        packed = "seq_lengths" in rows.column_names
        documents: list[Sized] = rows.with_format(None)["seq_lengths"] if packed else []
        n_documents = sum(map(len, documents)) if packed else len(rows)
        values = {name: torch.cat([batch[name] for batch in in_order])[:n_documents] for name in in_order[0]}
        return {f"{prefix}_{name}": mean for name, mean in self._mean(values).items()}


def _read_trl(outputs: Any) -> Values:
    return {"token_count": outputs.label_mask, "loss": -outputs.log_probs}


def _mean_over_labels(sums: Mapping[str, float]) -> Means:
    n_labels = sums["token_count"]
    return {"token_count": n_labels, "loss": sums["loss"] / n_labels if n_labels else math.nan}


def losses_of_tokens(
    read: Callable[[Any], Values] = _read_trl,
    mean: Callable[[Mapping[str, float]], Means] = _mean_over_labels,
) -> DocumentLosses:
    """Record the losses of tokens; log means over tokens, and as `sample_loss` over means of documents.

    Args:
        read: `[B, T - 1]` by name, from the model's output, 0 without a label; `token_count` is 1 at a label.
            By default TRL's loss, whose own mean is over batches.
        mean: means over tokens, from sums.
    """

    def read_documents(outputs: Any, inputs: Batch) -> Values:
        position_ids = inputs.get("position_ids")
        return {name: _sum_by_document(x, position_ids) for name, x in read(outputs).items()}

    def mean_twice(values: Values) -> Means:
        counts = values["token_count"]
        weights = torch.where(counts > 0, 1 / counts, 0)
        means = mean({name: float(x.sum()) for name, x in values.items()})
        by_document = mean({name: float(x @ weights) for name, x in values.items()})
        del by_document["token_count"]
        return means | {f"sample_{name}": each for name, each in by_document.items()}

    return DocumentLosses(read_documents, mean_twice)


def _sum_by_document(x: Tensor, position_ids: Tensor | None) -> Tensor:
    """`[documents]` float64: sums of `[B, T - 1]` over every document of a batch.

    position_ids `[1, T]`, or None if each row is one document.
    """
    if position_ids is None:
        return x.double().sum(dim=-1)
    document = (position_ids == 0).cumsum(dim=-1)[0, :-1] - 1
    n_documents = int((position_ids == 0).sum())
    return x.new_zeros(n_documents, dtype=torch.float64).index_add_(0, document, x[0].double())

"""Average the losses of an evaluation over tokens, over documents and over data sets, however they are
batched; and those of training over data sets."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn

from unsloth_pack.data.rows import CHANNEL
from unsloth_pack.patching.deferred_logging import put_metrics

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
    channels: Sequence[str] = (),
) -> DocumentLosses:
    """Record the losses of tokens; log means over tokens, and as `sample_loss` over means of documents.

    Args:
        read: `[B, T - 1]` by name, from the model's output, 0 without a label; `token_count` is 1 at a label.
            By default TRL's loss, whose own mean is over batches.
        mean: means over tokens, from sums.
        channels: names of data sets, whose means over tokens are logged as `loss/NAME`.
    """

    def read_documents(outputs: Any, inputs: Batch) -> Values:
        position_ids = inputs.get("position_ids")
        values = {name: _sum_by_document(x, position_ids) for name, x in read(outputs).items()}
        return values | ({CHANNEL: inputs[CHANNEL]} if channels else {})

    def mean_twice(values: Values) -> Means:
        channel = values.pop(CHANNEL, None)
        counts = values["token_count"]
        weights = torch.where(counts > 0, 1 / counts, 0)
        means = mean({name: float(x.sum()) for name, x in values.items()})
        by_document = mean({name: float(x @ weights) for name, x in values.items()})
        del by_document["token_count"]
        if channel is not None:
            sums = (_sum_by_channel(values[name], channel, len(channels)) for name in ("loss", "token_count"))
            means |= _means_of_channels(channels, *sums)
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


class ChannelLosses:
    """The losses of training by data set, summed on the device until a line is logged.

    Args:
        names: of the data sets, by the number that batches have for each document as `channel`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.channel: Tensor | None = None  # `[documents]` of the micro-batch that is trained on

    def sums(self, outputs: Any, position_ids: Tensor | None) -> list[Tensor]:
        """Sum the losses of a micro-batch, and count its labels, for each data set."""
        if self.channel is None:
            return []
        if position_ids is None:  # each row is a document
            channel = self.channel[:, None].expand_as(outputs.log_probs)
        else:
            channel = self.channel[(position_ids == 0).cumsum(dim=-1)[:, :-1] - 1]
        both = (-outputs.log_probs.detach(), outputs.label_mask)
        return [total for x in both for total in _sum_by_channel(x, channel, len(self.names))]

    def put_metrics(self, trainer: Any, metrics: dict[str, list[float]], sums: Tensor, n_tokens: int) -> None:
        """Append the values of `[processes, micro-batches, sums]` to TRL's metrics."""
        of_trl, own = sums.split([sums.shape[-1] - 2 * len(self.names), 2 * len(self.names)], dim=-1)
        put_metrics(trainer, metrics, of_trl, n_tokens)
        losses, counts = own.sum(dim=(0, 1)).view(2, -1)
        metrics |= {name: [mean] for name, mean in _means_of_channels(self.names, losses, counts).items()}


def _sum_by_channel(x: Tensor, channel: Tensor, n_channels: int) -> Tensor:
    """`[channels]` float64: sums of `x` over the elements of each, by `channel` of the same shape."""
    zeros = x.new_zeros(n_channels, dtype=torch.float64)
    return zeros.index_add_(0, channel.reshape(-1).to(x.device), x.double().reshape(-1))


def _means_of_channels(names: Sequence[str], losses: Tensor, counts: Tensor) -> Means:
    """Return the mean over labels of each data set that has some."""
    totals = zip(names, losses.tolist(), counts.tolist(), strict=True)
    return {f"loss/{name}": loss / count for name, loss, count in totals if count}

"""pack_iterable: pack a stream of datasets batch by batch, so that datasets can shard and resume it."""

from collections.abc import Iterator
from copy import copy
from typing import Any

import datasets
import numpy as np
from datasets.iterable_dataset import (
    BufferShuffledExamplesIterable,
    FilteredExamplesIterable,
    MappedExamplesIterable,
)
from packaging.version import Version

from unsloth_pack.errors import InputError
from unsloth_pack.packing.dataset import check_kind
from unsloth_pack.packing.stream import PackingStream

_COUNTS_FILTERED = Version("5.1.0")  # of datasets, which resumes filtered streams exactly from then on


def pack_iterable(
    source: datasets.IterableDataset, capacity: int, strategy: str, buffer_size: int, seed: int | None
) -> datasets.IterableDataset:
    """Rows of at most `capacity` tokens, packed from `buffer_size` documents at a time.

    No document waits from one batch to the next. So the result is a plain `map` of the source, and datasets
    itself deals its shards out to workers and ranks, turns to an epoch, and saves its position.
    """
    packer = BatchPacker(capacity, strategy, buffer_size, seed)
    features = None if source.features is None else _features_of_rows(source.features)
    packed = source.with_format(None).map(
        packer, with_indices=True, batched=True, batch_size=buffer_size, features=features
    )
    packed._ex_iterable.__class__ = PackedExamples
    return packed


class PackedExamples(MappedExamplesIterable):  # type: ignore[misc]  # datasets has no types
    """The rows of a `map` with a `BatchPacker`, with two additions.

    The packer's seed follows the epoch, as that of a `shuffle` does. And a position that datasets cannot
    restore is refused, see `_why_not_resumed`.
    """

    def __iter__(self) -> Iterator[tuple[object, dict[str, Any]]]:
        is_resumed = self._state_dict is not None and self._state_dict["previous_state"] is not None
        if is_resumed and (why := _why_not_resumed(self.ex_iterable)) is not None:
            raise InputError(f"{why}; begin anew and skip the rows that are done, with .skip(rows)")
        yield from super().__iter__()

    def shift_rngs(self, value: int) -> "PackedExamples":
        """datasets calls this with the epoch, and in a worker with the worker's number."""
        return self._with(function=self.function.shifted(value))

    def shuffle_data_sources(self, generator: np.random.Generator) -> "PackedExamples":
        return self._with(ex_iterable=self.ex_iterable.shuffle_data_sources(generator))

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> "PackedExamples":
        return self._with(ex_iterable=self.ex_iterable.shard_data_sources(num_shards, index, contiguous))

    def reshard_data_sources(self) -> "PackedExamples":
        return self._with(ex_iterable=self.ex_iterable.reshard_data_sources())

    def _with(self, **changed: object) -> "PackedExamples":
        other = copy(self)
        other.__dict__ |= changed
        return other


def _why_not_resumed(examples: object) -> str | None:
    """Why datasets loses documents of a stream that goes on from a saved position, or None."""
    if isinstance(examples, BufferShuffledExamplesIterable) and examples.buffer_size > 1:
        return "the stream was shuffled with a buffer before packing, and its saved position lacks the buffer"
    if isinstance(examples, FilteredExamplesIterable) and Version(datasets.__version__) < _COUNTS_FILTERED:
        return f"the stream was filtered before packing; update datasets to {_COUNTS_FILTERED}"
    parts = getattr(examples, "ex_iterables", None) or [getattr(examples, "ex_iterable", None)]
    return next(filter(None, (_why_not_resumed(part) for part in parts if part is not None)), None)


class BatchPacker:
    """Packs one batch of documents, whatever came before."""

    def __init__(self, capacity: int, strategy: str, buffer_size: int, seed: int | None):
        PackingStream(capacity, buffer_size, strategy=strategy, seed=seed)  # checks them before any is read
        self.capacity, self.strategy, self.seed = capacity, strategy, seed
        self._columns: set[str] = set()

    def shifted(self, value: int) -> "BatchPacker":
        other = copy(self)
        other.seed = None if self.seed is None else self.seed + value
        return other

    def __call__(self, batch: dict[str, list[object]], numbers: list[int]) -> dict[str, list[Any]]:
        """The packed rows of a batch of columns; `numbers` counts the documents that this process reads."""
        first = numbers[0]
        if self._columns and self._columns != set(batch):
            raise InputError(f"example {first} has other columns than those before it; give all the same")
        self._columns = set(batch)
        seed = None if self.seed is None else self.seed + first
        stream = PackingStream(self.capacity, len(numbers) + 1, strategy=self.strategy, seed=seed)
        stream.consumed = first  # the number that an error names
        documents = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        rows = list(stream.pack(documents))
        return {name: [row[name] for row in rows] for name in [*batch, "seq_lengths"]}


def _features_of_rows(features: datasets.Features) -> datasets.Features:
    """The features of packed rows; a column that does not hold one number per token is refused."""
    rows = {}
    for name, feature in features.items():
        value = feature.feature if isinstance(feature, datasets.List | datasets.LargeList) else None
        check_kind(name, value.pa_type if isinstance(value, datasets.Value) else None, feature)
        rows[name] = datasets.List(value)
    return datasets.Features(rows | {"seq_lengths": datasets.List(datasets.Value("int64"))})

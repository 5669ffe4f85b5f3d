"""plan_packs: which documents share a row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, overload

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.packing.best_fit import arrange, best_fit_decreasing
from unsloth_pack.packing.in_order import first_fit, next_fit
from unsloth_pack.packing.lengths import as_lengths, check_positive, count_lengths, longest_first

STRATEGIES = ("next_fit", "first_fit", "ffd", "bfd")


class Bins(Sequence[list[int]]):
    """The documents of every bin, as lists of indices that are made when they are read."""

    def __init__(self, order: np.ndarray, offsets: np.ndarray):
        self._order, self._offsets = order, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return self._order[self._offsets[i] : self._offsets[i + 1]].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"<{len(self)} bins: {shown}{', ...' if len(self) > 3 else ''}>"


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Documents assigned to bins of `capacity` tokens.

    The numbers are known at once. Which document lies in which bin is computed when `order`, `offsets` or
    `bins` is first used; this takes 8 bytes a document.

    Args:
        n_documents, tokens: documents placed, and the tokens they hold.
        n_empty: documents without tokens; they are in no bin.
        histogram: `[longest + 1]` int64: how many documents have each length, from 0 tokens on.
    """

    capacity: int
    strategy: str
    n_bins: int
    n_documents: int
    n_empty: int
    tokens: int
    histogram: np.ndarray
    _arrange: Callable[[], tuple[np.ndarray, np.ndarray]] = field(repr=False)

    @cached_property
    def _arranged(self) -> tuple[np.ndarray, np.ndarray]:
        return self._arrange()

    @property
    def order(self) -> np.ndarray:
        """`[n_documents]` integers: document indices, bin after bin."""
        return self._arranged[0]

    @property
    def offsets(self) -> np.ndarray:
        """`[n_bins + 1]` int64: bin b holds `order[offsets[b]:offsets[b + 1]]`."""
        return self._arranged[1]

    @cached_property
    def bins(self) -> Bins:
        """The document indices of every bin, as one list for each bin."""
        return Bins(self.order, self.offsets)

    @property
    def padding(self) -> int:
        """Tokens of room left in all bins together."""
        return self.n_bins * self.capacity - self.tokens

    @property
    def efficiency(self) -> float:
        """The share of the bins' room that holds tokens, 0 to 1; 1 for a plan without bins."""
        return self.tokens / (self.n_bins * self.capacity) if self.n_bins else 1.0


def plan_packs(lengths: Any, capacity: int, strategy: str = "bfd") -> PackPlan:
    """Assign whole documents to as few bins as the strategy finds.

    Args:
        lengths: tokens of every document: a list, array or CPU tensor of integers. Keep it unchanged until
            the bins have been read.
        capacity: tokens of a bin.
        strategy: "next_fit" fills one bin after another and keeps the order of the documents. "first_fit"
            puts each document into the first bin with room; "ffd" does the same from the longest document
            down. "bfd" goes from the longest down too, and puts each into the bin with the least room that
            holds it. "bfd" works on the histogram: its time grows with the number of distinct lengths, not
            with the number of documents.

    Raises:
        InputError: a length is negative or above `capacity`; `capacity` is below 1; or the strategy is
            unknown.

    Source: D. S. Johnson, Near-optimal bin packing algorithms, MIT, 1973. Working on the histogram follows
    M. Krell et al., Efficient sequence packing without cross-contamination, arXiv:2107.02027; their
    heuristics differ.
    """
    capacity = check_positive("capacity", capacity)
    if strategy not in STRATEGIES:
        raise InputError(f"no packing strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    lengths = as_lengths(lengths)
    counts = count_lengths(lengths, capacity)
    arranged: Callable[[], tuple[np.ndarray, np.ndarray]]
    if strategy == "bfd":
        moves = best_fit_decreasing(counts, capacity)
        n_bins, arranged = moves.n_bins, partial(arrange, moves, lengths, counts)
    else:
        documents = longest_first(lengths) if strategy == "ffd" else np.flatnonzero(lengths)
        if strategy == "next_fit":
            offsets = next_fit(lengths[documents], capacity)
            n_bins, arranged = len(offsets) - 1, partial(_as_they_are, documents, offsets)
        else:
            bins, n_bins = first_fit(lengths[documents], capacity)
            arranged = partial(_by_bin, documents, bins, n_bins)
    return PackPlan(
        capacity=capacity,
        strategy=strategy,
        n_bins=n_bins,
        n_documents=int(counts[1:].sum()),
        n_empty=int(counts[0]),
        tokens=int(counts @ np.arange(len(counts))),
        histogram=counts,
        _arrange=arranged,
    )


def _as_they_are(documents: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return documents, offsets


def _by_bin(documents: np.ndarray, bins: np.ndarray, n_bins: int) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.bincount(bins, minlength=n_bins)
    return documents[np.argsort(bins, kind="stable")], np.concatenate([[0], np.cumsum(sizes)])

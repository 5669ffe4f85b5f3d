"""plan_packs: which documents share a row."""

import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, overload

import numpy as np

from unsloth_pack.errors import InputError, require_whole

# Document lengths in the form that planners take: a checked integer array.

BLOCK = 1 << 20  # documents worked on at a time, so that temporaries stay small beside the lengths themselves


def as_lengths(lengths: Any) -> np.ndarray:
    """`[documents]` of the integer type that came in: lengths in tokens, from a list, array or CPU tensor.

    Raises:
        InputError: they are not a flat sequence of integers, or one of them is negative.
    """
    try:
        array = np.asarray(lengths)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"lengths of type {type(lengths).__name__} do not make an array ({error}); "
            "give one integer a document"
        ) from error
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"lengths have shape {array.shape} and type {array.dtype}; give one integer a document, in tokens"
        )
    if array.min() < 0:
        first = int(np.argmax(array < 0))
        raise InputError(f"document {first} has {array[first]} tokens; give lengths of 0 or more")
    return array


def is_number(value: Any) -> bool:
    """Whether `value` is a real number, of Python or numpy."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_positive(name: str, value: Any) -> int:
    """`value` as an int.

    Raises:
        InputError: it is not a whole number of at least 1.
    """
    require_whole(name, value, 1)
    return int(value)


def count_lengths(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """`[longest + 1]` int64: how many documents have each length, from 0 tokens on.

    Raises:
        InputError: a document is longer than `capacity`.
    """
    longest = int(lengths.max(initial=0))
    if longest > capacity:
        longer = lengths > capacity
        first = int(np.argmax(longer))
        raise InputError(
            f"document {first} has {lengths[first]} tokens and capacity is {capacity} "
            f"({int(longer.sum())} of {len(lengths)} are over it); truncate, split or drop them first"
        )
    counts = np.zeros(longest + 1, np.int64)
    for start in range(0, len(lengths), BLOCK):
        counts += np.bincount(lengths[start : start + BLOCK].astype(np.int64), minlength=longest + 1)
    return counts


def padded_slots(lengths: np.ndarray, batch_size: int) -> int:
    """Slots of all batches of `batch_size` documents in their order, each padded to its longest document."""
    starts = np.arange(0, len(lengths), batch_size)
    return int(np.maximum.reduceat(lengths, starts) @ np.diff(starts, append=len(lengths)))


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Int64 indices of the documents with tokens, longest first; equal lengths keep the input order."""
    order = np.argsort(int(lengths.max(initial=0)) - lengths.astype(np.int64), kind="stable")
    return order[: np.count_nonzero(lengths)]


# Best-fit decreasing on the histogram of lengths: documents of one length are placed together.
#
# Lengths are taken from the longest down. A document goes into the open bin with the least room that still
# holds it. That bin then has even less room, so it also takes the next documents of this length, until one
# no
# longer fits. Bins with equal room are therefore filled together, with `room // length` documents each:
#
#     length 3, 7 documents; bins with room: 8 8 8 5
#     room 5 -> one bin takes 1; room 8 -> two bins take 2 each, the third takes 2; 0 are left for a new bin


@dataclass(frozen=True, eq=False)
class Moves:
    """All moves. A move puts documents of one length into neighbouring bins that have equal room.

    In their order, the moves place the documents from the longest to the shortest. All fields but `n_bins`
    are `[moves]` int64.

    Args:
        first, bins: the move fills bins `first` to `first + bins - 1`.
        each: documents that the move puts into each of these bins.
        held: documents that each of these bins held before.
        n_bins: number of bins after all moves.
    """

    first: np.ndarray
    bins: np.ndarray
    each: np.ndarray
    held: np.ndarray
    n_bins: int

    def offsets(self) -> np.ndarray:
        """`[n_bins + 1]` int64: the running sum of documents a bin."""
        change = np.zeros(self.n_bins + 1, np.int64)
        np.add.at(change, self.first, self.each)
        np.subtract.at(change, self.first + self.bins, self.each)
        return np.concatenate([[0], np.cumsum(np.cumsum(change)[:-1])])


def best_fit_decreasing(counts: np.ndarray, capacity: int) -> Moves:
    """Best-fit decreasing of `counts[length]` documents of each length into bins of `capacity` tokens."""
    # Capacity beyond the sum of all lengths changes nothing
    capacity = min(capacity, int(counts @ np.arange(len(counts))))
    moves: list[tuple[int, int, int, int]] = []
    alike: dict[int, list[tuple[int, int, int]]] = {}  # room -> runs of bins: first, bins, documents held
    rooms = 0  # bit r is set where alike[r] has bins: the tightest room is one shift away
    n_bins = 0
    for length in (np.flatnonzero(counts[1:]) + 1)[::-1].tolist():
        left = int(counts[length])
        while left:
            if fitting := rooms >> length:
                room = length + (fitting & -fitting).bit_length() - 1
                first, bins, held = alike[room].pop()
                if not alike[room]:
                    rooms ^= 1 << room
            else:
                room = capacity
                first, bins, held = n_bins, -(-left // (capacity // length)), 0
                n_bins += bins
            each = room // length
            whole = min(bins, left // each)
            rest = min(left - whole * each, (bins - whole) * each)
            for taking, take in ((whole, each), (1, rest)):
                if taking and take:
                    moves.append((first, taking, take, held))
                    left -= taking * take
                    remaining = room - take * length
                    alike.setdefault(remaining, []).append((first, taking, held + take))
                    rooms |= 1 << remaining
                    first, bins = first + taking, bins - taking
            if bins:
                alike.setdefault(room, []).append((first, bins, held))
                rooms |= 1 << room
    first_of, bins_of, each_of, held_of = np.array(moves, np.int64).reshape(-1, 4).T
    return Moves(first_of, bins_of, each_of, held_of, n_bins)


def arrange(moves: Moves, lengths: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documents of every bin.

    Returns:
        order: document indices, bin after bin, longest first within each; int32 where they fit, else int64.
        offsets: `[bins + 1]` int64; bin b holds `order[offsets[b]:offsets[b + 1]]`.

    Raises:
        InputError: `lengths` have changed since they were counted.
    """
    if not np.array_equal(count_lengths(lengths, len(counts) - 1), counts):
        raise InputError("lengths changed after they were planned; plan them again")
    offsets = moves.offsets()
    slots = _slots(moves, offsets, np.int32 if len(lengths) < 2**31 else np.int64)
    order = np.empty_like(slots)
    longer = np.concatenate([np.cumsum(counts[::-1])[-2::-1], [0]])  # documents that come before a length
    for start in range(0, len(lengths), BLOCK):
        block = lengths[start : start + BLOCK].astype(np.uint16 if len(counts) <= 2**16 else np.int64)
        documents = np.argsort(block, kind="stable")  # a radix sort for uint16
        block = block[documents]
        runs = np.flatnonzero(np.diff(block, prepend=-1))
        sizes = np.diff(runs, append=len(block))
        present = block[runs]
        rank = np.arange(len(block)) + np.repeat(longer[present] - runs, sizes)
        longer[present] += sizes
        with_tokens = slice(int(np.searchsorted(block, 1)), None)
        order[slots[rank[with_tokens]]] = documents[with_tokens] + start
    return order, offsets


def _slots(moves: Moves, offsets: np.ndarray, dtype: type) -> np.ndarray:
    """`[documents]`: the place of the n-th longest document in the order of the bins."""
    ends = np.cumsum(moves.bins * moves.each)
    starts = ends - moves.bins * moves.each
    slots: np.ndarray = np.empty(int(offsets[-1]), dtype)
    for low in range(0, len(slots), BLOCK):
        high = min(low + BLOCK, len(slots))
        touched = slice(np.searchsorted(ends, low, "right"), np.searchsorted(starts, high, "left"))
        sizes = np.minimum(ends[touched], high) - np.maximum(starts[touched], low)
        within = np.arange(low, high) - np.repeat(starts[touched], sizes)
        nth_bin, nth_document = np.divmod(within, np.repeat(moves.each[touched], sizes))
        bins = nth_bin + np.repeat(moves.first[touched], sizes)
        slots[low:high] = offsets[bins] + nth_document + np.repeat(moves.held[touched], sizes)
    return slots


# Next fit and first fit: documents are placed one after another, in the order given.


def next_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """A bin is closed by the first document that no longer fits into it.

    Args:
        lengths: `[documents]` integers, 1 to `capacity`.

    Returns:
        `[bins + 1]` int64: bin b holds documents `offsets[b]` to `offsets[b + 1] - 1`.
    """
    offsets = [0]
    block = max(BLOCK, 2 * capacity)  # more documents than any bin holds
    while offsets[-1] < len(lengths):
        start = offsets[-1]
        ends = np.cumsum(lengths[start : start + block], dtype=np.int64)
        begins = ends - lengths[start : start + block]
        closed_by = np.searchsorted(ends, begins + capacity, side="right").tolist()
        is_last = start + len(ends) == len(lengths)
        at = 0
        while at < len(ends):
            at = closed_by[at]
            if at < len(ends) or is_last:
                offsets.append(start + at)
    return np.array(offsets, np.int64)


def first_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """A document goes into the first bin, in the order of opening, that has room for it.

    Args:
        lengths: `[documents]` integers, 1 to `capacity`.

    Returns:
        `[documents]` int64: the bin of each document; and the number of bins.
    """
    # Any two neighbouring bins hold more than one capacity, so there are never more leaves than this.
    most = 2 * int(lengths.sum(dtype=np.int64)) // capacity + 2
    size = 1 << (most - 1).bit_length()
    room = [capacity] * (2 * size)  # a tree: node i has the larger room of 2i and 2i + 1; bins are its leaves
    bins = []
    for length in lengths.tolist():
        node = 1
        while node < size:
            node += node
            if room[node] < length:
                node += 1
        bins.append(node - size)
        room[node] -= length
        while node > 1:
            most_room = max(room[node], room[node ^ 1])
            node >>= 1
            if room[node] == most_room:
                break
            room[node] = most_room
    return np.array(bins, np.int64), max(bins, default=-1) + 1


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

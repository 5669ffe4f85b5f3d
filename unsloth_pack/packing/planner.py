"""plan_packs: decide which documents share a row."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from unsloth_pack.errors import InputError, require_whole

STRATEGIES = ("next_fit", "first_fit", "ffd", "bfd")


def as_lengths(lengths: object) -> np.ndarray:
    """`[documents]` of the integer type that came in: lengths in tokens, from a list, array or CPU tensor."""
    array = np.asarray(lengths)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shown = f"shape {array.shape} and type {array.dtype}"
        raise InputError(f"lengths have {shown}; give one integer a document, in tokens")
    if array.min() < 0:
        first = int(np.argmax(array < 0))
        raise InputError(f"document {first} has {array[first]} tokens; give lengths of 0 or more")
    return array


def check_positive(name: str, value: int) -> int:
    """`value` as an int; InputError if it is not a whole number of at least 1."""
    require_whole(name, value, 1)
    return int(value)


def check_strategy(strategy: str) -> str:
    """Refuse an unknown strategy."""
    if strategy not in STRATEGIES:
        raise InputError(f"no packing strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    return strategy


def padded_slots(lengths: np.ndarray, batch_size: int) -> int:
    """Slots of all batches of `batch_size` documents in their order, each padded to its longest document."""
    starts = np.arange(0, len(lengths), batch_size)
    return int(np.maximum.reduceat(lengths, starts) @ np.diff(starts, append=len(lengths)))


def _count_lengths(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """`[longest + 1]` int64: how many documents have each length, from 0 tokens on."""
    if lengths.max(initial=0) > capacity:
        longer = lengths > capacity
        first = int(np.argmax(longer))
        raise InputError(
            f"document {first} has {lengths[first]} tokens and capacity is {capacity} "
            f"({int(longer.sum())} of {len(lengths)} are over it); truncate, split or drop them first"
        )
    return np.bincount(lengths.astype(np.int64), minlength=1)


def _longest_first(lengths: np.ndarray) -> np.ndarray:
    """Indices of the documents with tokens, longest first; equal lengths keep the input order."""
    below = int(lengths.max(initial=0)) - lengths.astype(np.int64)
    order = np.argsort(below.astype(np.uint16) if below.max(initial=0) < 2**16 else below, kind="stable")
    return order[: np.count_nonzero(lengths)]


def _best_fit_decreasing(counts: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best fit for `counts[length]` documents of each length, longest first, in bins of `capacity` tokens.

    A document goes into the open bin with the least room that still holds it. That bin then has even less
    room, so it also takes the next documents of this length, until one no longer fits. Bins with equal room
    are therefore filled together, with `room // length` documents each:

        length 3, 7 documents; bins with room: 8 8 8 5
        room 5 -> one bin takes 1; room 8 -> two bins take 2 each, the third takes 2; 0 are left for a new bin

    Returns:
        `[moves, 3]`: the first of neighbouring bins of equal room, their number, and the documents that go
        into each of them, from the longest documents to the shortest; and the number of bins.
    """
    capacity = min(capacity, int(counts @ np.arange(len(counts))))  # more than all tokens changes nothing
    moves: list[tuple[int, int, int]] = []
    alike: dict[int, list[tuple[int, int]]] = {}  # room -> runs of bins: the first, and their number
    rooms = 0  # bit r is set where alike[r] has bins: the tightest room is one shift away
    n_bins = 0
    for length in (np.flatnonzero(counts[1:]) + 1)[::-1].tolist():
        left = int(counts[length])
        while left:
            if fitting := rooms >> length:
                room = length + (fitting & -fitting).bit_length() - 1
                first, bins = alike[room].pop()
                if not alike[room]:
                    rooms ^= 1 << room
            else:
                room = capacity
                first, bins = n_bins, -(-left // (capacity // length))
                n_bins += bins
            each = room // length
            whole = min(bins, left // each)
            rest = min(left - whole * each, (bins - whole) * each)
            for taking, take in ((whole, each), (min(rest, 1), rest), (bins - whole - min(rest, 1), 0)):
                if taking:
                    if take:
                        moves.append((first, taking, take))
                    left -= taking * take
                    remaining = room - take * length
                    alike.setdefault(remaining, []).append((first, taking))
                    rooms |= 1 << remaining
                    first += taking
    return np.array(moves, np.int64).reshape(-1, 3), n_bins


def _next_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """`[documents]`: the bin of each document. A bin is closed by the first that no longer fits into it."""
    ends = np.cumsum(lengths, dtype=np.int64)
    closed_by = np.searchsorted(ends, ends - lengths.astype(np.int64) + capacity, side="right")
    starts = [0]
    while starts[-1] < len(lengths):
        starts.append(int(closed_by[starts[-1]]))
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def _first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """`[documents]`: the bin of each document, the first one opened that has room for it."""
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
    return np.array(bins, np.int64)


def _by_bin(documents: np.ndarray, bins: np.ndarray, n_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents bin after bin, and where each bin begins, from the bin of each document."""
    sizes = np.bincount(bins, minlength=n_bins)
    return documents[np.argsort(bins, kind="stable")], np.concatenate([[0], np.cumsum(sizes)])


def _by_moves(moves: np.ndarray, n_bins: int, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `_by_bin`, from the moves of best fit."""
    first, bins, each = moves.T
    sizes = bins * each
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    bin_of_document = np.repeat(first, sizes) + within // np.repeat(each, sizes)
    return _by_bin(_longest_first(lengths), bin_of_document, n_bins)


Bins = list[list[int]]  # the documents of every bin


@dataclass(frozen=True, eq=False)
class PackPlan:
    """Documents assigned to bins of `capacity` tokens.

    The numbers are known at once. Which document lies in which bin is computed when `order`, `offsets` or
    `bins` is first used.
    """

    capacity: int
    strategy: str
    n_bins: int
    n_documents: int  # in the bins
    n_empty: int  # documents without tokens, which are in no bin
    tokens: int
    histogram: np.ndarray  # [longest + 1] int64: how many documents have each length, from 0 tokens on
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
        order = self.order.tolist()
        return [order[start:end] for start, end in pairwise(self.offsets.tolist())]

    @property
    def padding(self) -> int:
        """Tokens of room left in all bins together."""
        return self.n_bins * self.capacity - self.tokens

    @property
    def efficiency(self) -> float:
        """The share of the bins' room that holds tokens, 0 to 1; 1 for a plan without bins."""
        return self.tokens / (self.n_bins * self.capacity) if self.n_bins else 1.0


def plan_packs(lengths: object, capacity: int, strategy: str = "bfd") -> PackPlan:
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
    check_strategy(strategy)
    lengths = as_lengths(lengths)
    counts = _count_lengths(lengths, capacity)
    if strategy == "bfd":
        moves, n_bins = _best_fit_decreasing(counts, capacity)
        arrange = partial(_by_moves, moves, n_bins, lengths)
    else:
        documents = _longest_first(lengths) if strategy == "ffd" else np.flatnonzero(lengths)
        fit = _next_fit if strategy == "next_fit" else _first_fit
        bins = fit(lengths[documents], capacity)
        n_bins = int(bins.max(initial=-1)) + 1
        arrange = partial(_by_bin, documents, bins, n_bins)
    return PackPlan(
        capacity=capacity,
        strategy=strategy,
        n_bins=n_bins,
        n_documents=int(counts[1:].sum()),
        n_empty=int(counts[0]),
        tokens=int(counts @ np.arange(len(counts))),
        histogram=counts,
        _arrange=arrange,
    )

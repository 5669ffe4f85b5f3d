"""Best-fit decreasing on the histogram of lengths: documents of one length are placed together.

Lengths are taken from the longest down. A document goes into the open bin with the least room that still
holds it. That bin then has even less room, so it also takes the next documents of this length, until one no
longer fits. Bins with equal room are therefore filled together, with `room // length` documents each:

    length 3, 7 documents; bins with room: 8 8 8 5
    room 5 -> one bin takes 1; room 8 -> two bins take 2 each, the third takes 2; 0 are left for a new bin
"""

from dataclasses import dataclass

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.packing.lengths import BLOCK, count_lengths


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

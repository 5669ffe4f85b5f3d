"""Next fit and first fit: documents are placed one after another, in the order given."""

import numpy as np

from unsloth_pack.packing.lengths import BLOCK


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

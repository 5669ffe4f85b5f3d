"""Document lengths in the form that planners take: a checked integer array."""

import numbers
from typing import Any

import numpy as np

from unsloth_pack.errors import InputError, require_whole

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

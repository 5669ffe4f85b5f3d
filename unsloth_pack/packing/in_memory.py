"""pack_sequences and concatenate_and_pack: pack token sequences in memory into padded rows.

[1 2 3] [4 5] [6 7 8 9] [10 11 12]   rows of 8, padded with 0
1 2 3 4 5 0 0 0
6 7 8 9 10 11 12 0

torch is never imported here: a caller that passes a tensor has imported it already.
"""

import gc
import numbers
import reprlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.packing.planner import check_positive, plan_packs

WHOLE_COLUMNS = ("input_ids", "labels")  # other columns may hold fractions, such as a weight per token
CHOICES = ("error", "truncate", "drop", "split")


class Kind(NamedTuple):
    """The container and number type of sequences; the rows made of them have the same."""

    container: str  # "list", or the module of arrays, whose functions have the same names: "numpy" or "torch"
    dtype: object = None  # this and the device are of arrays and tensors
    device: object = None

    def __str__(self) -> str:
        return "list" if self.container == "list" else f"{self.container} {self.dtype}"

    def full(self, length: int, value: float) -> Any:
        """A sequence of this kind, full of `value`."""
        if self.container == "list":
            return [value] * length
        return sys.modules[self.container].full((length,), value, dtype=self.dtype, device=self.device)


def join(parts: list[Any]) -> Any:
    """One new sequence of the parts, which are of one kind."""
    if not isinstance(parts[0], list | tuple | range):
        return sys.modules["numpy" if isinstance(parts[0], np.ndarray) else "torch"].concatenate(parts)
    row: list[Any] = []
    for part in parts:
        row += part
    return row


_LIST = Kind("list")


def kind_of(name: str, sequence: Any, whole: bool = False) -> Kind:
    """The kind of one sequence, whose values are checked; `whole` refuses fractions.

    Raises:
        InputError: it is not a flat sequence of numbers.
    """
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(sequence, torch.Tensor)
    is_array = isinstance(sequence, np.ndarray) and sequence.dtype.kind in "iufb"
    if isinstance(sequence, list | tuple | range):
        with suppress(TypeError):  # the fastest check of all values; a fraction makes the sum a fraction
            if isinstance(sum(sequence), numbers.Integral if whole else numbers.Real):
                return _LIST
    elif (is_tensor or is_array) and sequence.ndim == 1 and not (whole and "float" in str(sequence.dtype)):
        return Kind("torch" if is_tensor else "numpy", sequence.dtype, sequence.device if is_tensor else None)
    shown = " ".join(reprlib.repr(sequence).split())
    remedy = f"a flat list, array or tensor of {'whole ' if whole else ''}numbers, one a token"
    raise InputError(f"{name} is {shown}; give {remedy}")


def _read(name: str, sequences: Any, whole: bool = False) -> tuple[list[Any], Kind]:
    """The sequences as a list, and the kind that all of them have; "list" if there are none."""
    is_single = not hasattr(sequences, "__iter__") or getattr(sequences, "ndim", 1) == 0
    if is_single or isinstance(sequences, str | bytes | dict):
        raise InputError(f"{name} is a {type(sequences).__name__}; give a list of token sequences")
    sequences = list(sequences)
    kinds = [kind_of(f"{name}[{i}]", sequence, whole) for i, sequence in enumerate(sequences)] or [_LIST]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise InputError(f"{name}[{i}] is {kind} and {name}[0] is {kinds[0]}; give sequences of one kind")
    return sequences, kinds[0]


def _filler(name: str, value: Any, kind: Kind) -> float:
    """A padding or separator as a plain number. Refuses one that sequences of this kind cannot hold."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name} is {value!r}; give a number, such as the id of the padding token")
    try:
        fits = kind.container == "list" or kind.full(1, value).tolist() == [value]
    except (OverflowError, RuntimeError):
        fits = False
    if not fits:
        raise InputError(f"{name} {value} does not fit into {kind}; give sequences of a type that holds it")
    return value


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """New lists of numbers form no cycles, yet garbage collection would visit every number."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Handle and count sequences that are empty or longer than a row.


class PackingWarning(UserWarning):
    """Sequences were dropped or cut, and the caller did not ask for the counts."""


@dataclass
class CutCounts:
    """Sequences that could not be packed as they came."""

    empty: int = 0  # without tokens, dropped
    truncated: int = 0  # this and the next two are over-long, by what was done to them
    dropped: int = 0
    split: int = 0
    tokens_lost: int = 0  # cut off or dropped

    def __bool__(self) -> bool:
        return bool(self.empty or self.truncated or self.dropped or self.split)

    def __str__(self) -> str:
        overlong = f"{self.truncated} truncated, {self.dropped} dropped, {self.split} split"
        return f"{self.empty} empty dropped; over-long: {overlong} ({self.tokens_lost} tokens lost)"


def check_overlong(overlong: str) -> str:
    """Refuse an unknown way to handle sequences that are longer than a row."""
    if overlong not in CHOICES:
        raise InputError(f"overlong is {overlong!r}; choose one of {', '.join(CHOICES)}")
    return overlong


def pieces_of(
    name: str, length: int, capacity: int, overlong: str, counts: CutCounts
) -> list[tuple[int, int]]:
    """The pieces `(start, end)` of one sequence that are to be packed; `counts` notes a cut or a drop.

    Raises:
        InputError: it is longer than `capacity` and `overlong` is "error".
    """
    if length == 0:
        counts.empty += 1
        return []
    if length <= capacity:
        return [(0, length)]
    if overlong == "error":
        raise InputError(
            f"{name} has {length} tokens and a row holds {capacity}; raise the length of a row, or choose "
            'overlong="truncate", "drop" or "split"'
        )
    if overlong == "split":
        counts.split += 1
        return [(start, min(start + capacity, length)) for start in range(0, length, capacity)]
    if overlong == "drop":
        counts.dropped += 1
        counts.tokens_lost += length
        return []
    counts.truncated += 1
    counts.tokens_lost += length - capacity
    return [(0, capacity)]


@_no_garbage_collection()
def pack_sequences(
    sequences: object,
    max_length: int,
    pad_token_id: float,
    *,
    strategy: str = "next_fit",
    return_boundaries: bool = False,
    sep_token_id: float | None = None,
    overlong: str = "error",
    return_counts: bool = False,
) -> Any:
    """Pack whole sequences into rows of `max_length`, padded at the end.

    The rows depend only on the lengths of the sequences, so ids and labels packed in two calls stay aligned.

    Args:
        sequences: lists, numpy arrays or torch tensors of any lengths, one for each document: token ids, or
            other numbers for each token, such as labels or weights.
        strategy: as for `plan_packs`; "next_fit" keeps the order of the documents.
        sep_token_id: is put between two documents of a row, never at its end.
        overlong: how to handle a sequence longer than a row: "error", "truncate" (its end is lost), "drop",
            or "split" (into documents of a row's length, the last perhaps shorter).
        return_boundaries: also return `(row, start, end)` of every document in input order, without its
            separators. A dropped sequence has none, a split one has several.
        return_counts: also return `CutCounts`: how many sequences were empty (those are dropped), truncated,
            dropped or split. Without it, a `PackingWarning` gives these counts.

    Returns:
        The kind that came in: a list of lists, or a `[rows, max_length]` array or tensor of the same type and
        device. With boundaries or counts a tuple, in this order.

    Raises:
        InputError: `max_length` is below 1; a sequence is over-long, is not flat or holds a null; kinds are
            mixed; or the padding or separator is not a number that the sequences' type can hold.
    """
    max_length = check_positive("max_length", max_length)
    documents, kind = _read("sequences", sequences)
    pad = _filler("pad_token_id", pad_token_id, kind)
    separator = None if sep_token_id is None else _filler("sep_token_id", sep_token_id, kind)
    rows, places, counts = _pack("sequences", documents, kind, pad, max_length, overlong, strategy, separator)
    if counts and not return_counts:
        warnings.warn(f"pack_sequences: {counts}", PackingWarning, stacklevel=3)
    extras: list[Any] = [places] if return_boundaries else []
    extras += [counts] if return_counts else []
    return (rows, *extras) if extras else rows


@_no_garbage_collection()
def concatenate_and_pack(
    input_ids: object,
    labels: object,
    attention_masks: object,
    *,
    max_length: int,
    pad_token_id: float,
    label_pad_id: float = -100,
    overlong: str = "error",
    return_counts: bool = False,
) -> tuple[Any, ...]:
    """Pack ids, labels and masks side by side into rows of `max_length`, in the order of the documents.

    Each column keeps its kind, as in `pack_sequences`. Masks are padded with 0. All rows have the full width,
    so the results of several calls can be concatenated.

    Args:
        input_ids, labels, attention_masks: lists, numpy arrays or torch tensors, one for each document; the
            three of a document have the same length.
        overlong, return_counts: as for `pack_sequences`.

    Returns:
        Rows of ids, of labels and of masks; with `return_counts`, the counts as a fourth item.

    Raises:
        InputError: the columns differ in their number of documents or in lengths; ids or labels are not whole
            numbers; or as for `pack_sequences`.
    """
    max_length = check_positive("max_length", max_length)
    columns = {"input_ids": input_ids, "labels": labels, "attention_masks": attention_masks}
    fillers = {"pad_token_id": pad_token_id, "label_pad_id": label_pad_id, "mask padding": 0}
    read = {name: _read(name, column, name in WHOLE_COLUMNS) for name, column in columns.items()}
    lengths = {name: list(map(len, documents)) for name, (documents, _) in read.items()}
    for name, of_column in lengths.items():
        for i, (length, other) in enumerate(zip_longest(lengths["input_ids"], of_column)):
            if length != other:
                raise InputError(
                    f"document {i} has {length} tokens in input_ids and {other} in {name}; give one a token"
                )
    packed = []
    for (name, (documents, kind)), filler in zip(read.items(), fillers.items(), strict=True):
        pad = _filler(*filler, kind)
        rows, _, counts = _pack(name, documents, kind, pad, max_length, overlong)
        packed.append(rows)
    if counts and not return_counts:
        warnings.warn(f"concatenate_and_pack: {counts}", PackingWarning, stacklevel=3)
    return (*packed, counts) if return_counts else tuple(packed)


def _pack(
    name: str,
    documents: list[Any],
    kind: Kind,
    pad: float,
    max_length: int,
    overlong: str,
    strategy: str = "next_fit",
    separator: float | None = None,
) -> tuple[Any, list[tuple[int, int, int]], CutCounts]:
    """Rows of `max_length` numbers, `(row, start, end)` of every document, and what was cut."""
    check_overlong(overlong)
    counts, lengths = CutCounts(), list(map(len, documents))
    if lengths and (min(lengths) == 0 or max(lengths) > max_length):
        documents = [
            document[start:end]
            for i, document in enumerate(documents)
            for start, end in pieces_of(f"{name}[{i}]", len(document), max_length, overlong, counts)
        ]
        lengths = list(map(len, documents))
    padding, between = kind.full(max_length, pad), [] if separator is None else [kind.full(1, separator)]
    gap = len(between)  # planned with documents and rows that are longer by it, separators need no more
    plan = plan_packs(np.array(lengths, np.int64) + gap, max_length + gap, strategy)
    rows: list[list[Any]] = []
    places: dict[int, tuple[int, int, int]] = {}
    for numbers_of_row in plan.bins:
        parts: list[Any] = []
        end = -gap
        for i in numbers_of_row:
            start, end = end + gap, end + gap + lengths[i]
            parts += [*between, documents[i]]
            places[i] = len(rows), start, end
        rows.append([*parts[gap:], padding[end:]])
    in_order = [places[i] for i in range(len(documents))]
    if kind.container == "list":
        return list(map(join, rows)), in_order, counts
    joined = join([padding[:0], *chain.from_iterable(rows)])
    return joined.reshape(len(rows), max_length), in_order, counts

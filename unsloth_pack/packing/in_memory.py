"""pack_sequences and concatenate_and_pack: pack token sequences in memory into padded rows.

[1 2 3] [4 5] [6 7 8 9] [10 11 12]   rows of 8, padded with 0
1 2 3 4 5 0 0 0
6 7 8 9 10 11 12 0
"""

import gc
import numbers
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.packing.planner import check_positive, plan_packs

# Token sequences as lists, numpy arrays or torch tensors: recognise them, join them, lay them out in rows.
#
# torch is never imported here: a caller that passes a tensor has imported it already.

WHOLE_COLUMNS = ("input_ids", "labels")  # other columns may hold fractions, such as a weight per token
_LISTS = (list, tuple, range)
_TRAITS = ("__class__", "dtype", "ndim", "device")  # arrays and tensors that agree in these are of one kind


@dataclass(frozen=True)
class Kind:
    """The container and number type of sequences; the rows made of them have the same.

    Args:
        container: "list", or the module of arrays, "numpy" or "torch", whose functions have the same names.
        dtype, device: of arrays and tensors.
    """

    container: str
    dtype: Any = None
    device: Any = None

    def __str__(self) -> str:
        return "list" if self.container == "list" else f"{self.container} {self.dtype}"


@dataclass(frozen=True, eq=False)
class Layout:
    """Where every document lies in rows of `capacity` tokens.

    Args:
        documents: `[documents]`: the numbers of the documents in all rows, row after row.
        offsets: `[rows + 1]`: row r holds `documents[offsets[r]:offsets[r + 1]]`.
        sizes: `[documents]`: tokens of each of `documents`, plus the gap after it.
        gap: slots between two documents, for a separator.
    """

    capacity: int
    documents: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    gap: int = 0

    @property
    def rows(self) -> Iterator[list[int]]:
        """The documents of every row."""
        documents = self.documents.tolist()
        return (documents[begin:end] for begin, end in pairwise(self.offsets.tolist()))

    @cached_property
    def places(self) -> list[tuple[int, int, int, int]]:
        """`(document, row, first slot in the row, one past the last slot)` of each of `documents`."""
        ends = np.cumsum(self.sizes)
        per_row = np.diff(self.offsets)
        starts = ends - self.sizes
        starts -= np.repeat(starts[self.offsets[:-1]], per_row)
        rows = np.repeat(np.arange(len(per_row)), per_row)
        columns = (self.documents, rows, starts, starts + self.sizes - self.gap)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def read_sequences(name: str, sequences: Any) -> tuple[list[Any], Kind]:
    """The sequences as a list, and the kind that all of them have; "list" if there are none.

    A quick test accepts sequences of one kind. Only if it fails, each is checked, to name the first bad one.

    Args:
        sequences: a collection of sequences, or a 2-D array or tensor.

    Raises:
        InputError: a sequence is not flat, or its kind differs from that of the first.
    """
    if isinstance(sequences, str | bytes | dict) or not hasattr(sequences, "__iter__"):
        raise InputError(f"{name} is a {type(sequences).__name__}; give a list of token sequences")
    if getattr(sequences, "ndim", None) == 2:
        return list(sequences), kind_of_one(name, sequences.reshape(-1))
    if getattr(sequences, "ndim", None) == 0:
        raise InputError(f"{name} is a single number; give a list of token sequences")
    sequences = sequences if isinstance(sequences, list) else list(sequences)
    if set(map(type, sequences)) <= set(_LISTS):
        firsts = set(map(type, map(itemgetter(0), filter(None, sequences))))
        if not any(hasattr(first, "__len__") for first in firsts):
            return sequences, Kind("list")
    else:
        traits = {tuple(getattr(x, trait, None) for trait in _TRAITS) for x in sequences}
        if len(traits) == 1 and (kind := kind_of_one(f"{name}[0]", sequences[0])).container != "list":
            return sequences, kind
    kinds = [kind_of_one(f"{name}[{i}]", sequence) for i, sequence in enumerate(sequences)]
    for i, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise InputError(f"{name}[{i}] is {kind} and {name}[0] is {kinds[0]}; give sequences of one kind")
    return sequences, kinds[0]


def kind_of_one(name: str, sequence: Any) -> Kind:
    """The kind of one sequence. Raises InputError if it is not a flat sequence of tokens."""
    if isinstance(sequence, _LISTS):
        if len(sequence) and hasattr(sequence[0], "__len__"):
            raise InputError(
                f"{name} holds {type(sequence[0]).__name__}s, not tokens; give one flat list a document"
            )
        return Kind("list")
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(sequence, torch.Tensor)
    if not is_tensor and not isinstance(sequence, np.ndarray):
        raise InputError(
            f"{name} is a {type(sequence).__name__}; give a list, a numpy array or a torch tensor"
        )
    if sequence.ndim != 1:
        raise InputError(f"{name} has shape {tuple(sequence.shape)}; give one flat sequence a document")
    if is_tensor:
        return Kind("torch", sequence.dtype, sequence.device)
    if sequence.dtype.kind not in "iufb":
        raise InputError(f"{name} is an array of {sequence.dtype}; give numbers")
    return Kind("numpy", sequence.dtype)


def check_values(sequences: Sequence[Any], name_of: Callable[[int], str], *, whole: bool) -> None:
    """Refuse sequences of one kind that hold anything but numbers.

    Args:
        name_of: gives the name, in the error, of the sequence with an index.
        whole: refuse fractions too.

    Raises:
        InputError: names the first value that is refused.
    """
    if sequences and not isinstance(sequences[0], _LISTS):  # no array holds a null
        if whole and "float" in str(sequences[0].dtype):
            raise InputError(f"{name_of(0)} holds {sequences[0].dtype}; give whole numbers, such as int64")
        return
    wanted = numbers.Integral if whole else numbers.Real
    with np.errstate(all="ignore"):  # a sum of numpy numbers may overflow their type
        for i, sequence in enumerate(sequences):
            if not isinstance(_sum(sequence), wanted):
                place, value = next((k, v) for k, v in enumerate(sequence) if not isinstance(v, wanted))
                raise InputError(
                    f"{name_of(i)} holds {value!r} at place {place}; "
                    f"give {'whole numbers' if whole else 'numbers'}, one a token"
                )


def _sum(values: Any) -> Any:
    """The sum, or None if there is none: the fastest check of all values. A fraction makes it a fraction."""
    try:
        return sum(values)
    except TypeError:
        return None


def as_filler(name: str, value: Any, kind: Kind) -> Any:
    """A plain number that sequences of this kind can hold.

    Raises:
        InputError: it is not a number, or the sequences' type cannot hold it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InputError(
            f"{name} is {value!r}; give a number, such as the id of the tokenizer's padding token"
        )
    value = value.item() if isinstance(value, np.generic) else value
    if kind.container != "list":
        try:
            held = full(kind, (), value).item()
        except (OverflowError, RuntimeError):
            held = None
        if held != value:
            raise InputError(
                f"{name} {value} does not fit into {kind}; give sequences of a type that holds it"
            )
    return value


def full(kind: Kind, shape: tuple[int, ...], value: Any) -> Any:
    """An array or tensor full of `value`."""
    return sys.modules[kind.container].full(shape, value, dtype=kind.dtype, device=kind.device)


def joined(kind: Kind, parts: Sequence[Any]) -> Any:
    """The parts, all of this kind, one after another in a new sequence of the same kind."""
    if kind.container == "list":
        return list(chain.from_iterable(parts))
    return sys.modules[kind.container].concatenate(list(parts))


def fill_lists(layout: Layout, sequences: list[Any], pad: Any, separator: Any = None) -> list[list[Any]]:
    """Rows as lists of `layout.capacity` numbers, with `separator` in the gaps of the layout."""
    padding = [pad] * layout.capacity
    between = [separator] * layout.gap
    rows = []
    for first, *others in layout.rows:
        row = list(sequences[first])
        for document in others:
            if between:
                row += between
            row += sequences[document]
        row += padding[len(row) :]
        rows.append(row)
    return rows


def fill_array(layout: Layout, sequences: list[Any], kind: Kind, pad: Any, separator: Any = None) -> Any:
    """`[rows, capacity]` array or tensor with every document in its place."""
    rows = full(kind, (len(layout.offsets) - 1, layout.capacity), pad)
    flat = rows.reshape(-1)
    for document, row, start, end in layout.places:
        begin = row * layout.capacity
        flat[begin + start : begin + end] = sequences[document]
        if start and layout.gap:
            flat[begin + start - layout.gap : begin + start] = separator
    return rows


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Garbage collection is off here: new lists of numbers form no cycles, yet it would visit every number.

    Then freezing and unfreezing moves the new lists to the oldest generation, which the next collection does
    not visit. If the caller has frozen objects, unfreezing would release those too, so it is left out.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


# Handle and count sequences that are empty or longer than a row.

CHOICES = ("error", "truncate", "drop", "split")


class PackingWarning(UserWarning):
    """Sequences were dropped or cut, and the caller did not ask for the counts."""


@dataclass
class CutCounts:
    """Sequences that could not be packed as they came.

    Args:
        empty: sequences without tokens, dropped.
        truncated, dropped, split: over-long sequences, by what was done to them.
        tokens_lost: tokens cut off or dropped.
    """

    empty: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    tokens_lost: int = 0

    def __bool__(self) -> bool:
        return bool(self.empty or self.truncated or self.dropped or self.split)

    def __str__(self) -> str:
        shown = {
            "empty dropped": self.empty,
            "over-long truncated": self.truncated,
            "over-long dropped": self.dropped,
            "over-long split": self.split,
        }
        parts = ", ".join(f"{number} {what}" for what, number in shown.items() if number)
        return f"{parts or 'none cut'} ({self.tokens_lost} tokens lost)"


def check_overlong(overlong: str) -> str:
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


@no_garbage_collection()
def pack_sequences(
    sequences: Any,
    max_length: int,
    pad_token_id: Any,
    *,
    strategy: str = "next_fit",
    return_boundaries: bool = False,
    sep_token_id: Any = None,
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
    sequences, kind = read_sequences("sequences", sequences)
    check_values(sequences, "sequences[{}]".format, whole=False)
    pad = as_filler("pad_token_id", pad_token_id, kind)
    separator = None if sep_token_id is None else as_filler("sep_token_id", sep_token_id, kind)
    lengths = list(map(len, sequences))
    pieces, counts = _cut("sequences", lengths, max_length, overlong)
    if pieces is not None:
        sequences = _apply(pieces, sequences)
        lengths = list(map(len, sequences))
    layout = _layout(lengths, max_length, strategy, gap=separator is not None)
    rows = _fill(layout, sequences, kind, pad, separator)
    if counts and not return_counts:
        warnings.warn(f"pack_sequences: {counts}", PackingWarning, stacklevel=3)
    extras: list[Any] = []
    if return_boundaries:
        extras.append([(row, start, end) for _, row, start, end in sorted(layout.places)])
    if return_counts:
        extras.append(counts)
    return (rows, *extras) if extras else rows


@no_garbage_collection()
def concatenate_and_pack(
    input_ids: Any,
    labels: Any,
    attention_masks: Any,
    *,
    max_length: int,
    pad_token_id: Any,
    label_pad_id: Any = -100,
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
    read = {name: read_sequences(name, column) for name, column in columns.items()}
    for name, (column, _) in read.items():
        check_values(column, f"{name}[{{}}]".format, whole=name in WHOLE_COLUMNS)
    kinds = [kind for _, kind in read.values()]
    fillers = {"pad_token_id": pad_token_id, "label_pad_id": label_pad_id, "mask padding": 0}
    pads = [as_filler(*filler, kind) for filler, kind in zip(fillers.items(), kinds, strict=True)]
    packed = [column for column, _ in read.values()]
    lengths = _common_lengths(dict(zip(read, packed, strict=True)))
    pieces, counts = _cut("input_ids", lengths, max_length, overlong)
    if pieces is not None:
        packed = [_apply(pieces, column) for column in packed]
        lengths = list(map(len, packed[0]))
    layout = _layout(lengths, max_length, "next_fit")
    rows = [_fill(layout, column, kind, pad) for column, kind, pad in zip(packed, kinds, pads, strict=True)]
    if counts and not return_counts:
        warnings.warn(f"concatenate_and_pack: {counts}", PackingWarning, stacklevel=3)
    return (*rows, counts) if return_counts else tuple(rows)


def _common_lengths(columns: dict[str, list[Any]]) -> list[int]:
    (first, sequences), *others = columns.items()
    lengths = list(map(len, sequences))
    for name, column in others:
        if len(column) != len(lengths):
            raise InputError(
                f"{first} has {len(lengths)} documents and {name} has {len(column)}; give one a document"
            )
        if (theirs := list(map(len, column))) != lengths:
            i = next(i for i, pair in enumerate(zip(lengths, theirs, strict=True)) if pair[0] != pair[1])
            raise InputError(
                f"{first}[{i}] has {lengths[i]} tokens and {name}[{i}] has {theirs[i]}; give one a token"
            )
    return lengths


def _cut(
    name: str, lengths: list[int], max_length: int, overlong: str
) -> tuple[list[tuple[int, int, int]] | None, CutCounts]:
    """Pieces `(sequence, start, end)`, or None if all sequences are packed as they are; and the counts."""
    check_overlong(overlong)
    counts = CutCounts()
    if not lengths or (min(lengths) > 0 and max(lengths) <= max_length):
        return None, counts
    pieces = [
        (i, *piece)
        for i, length in enumerate(lengths)
        for piece in pieces_of(f"{name}[{i}]", length, max_length, overlong, counts)
    ]
    return pieces, counts


def _apply(pieces: list[tuple[int, int, int]], sequences: list[Any]) -> list[Any]:
    return [sequences[i][start:end] for i, start, end in pieces]


def _layout(lengths: list[int], max_length: int, strategy: str, gap: int = 0) -> Layout:
    # Planned with documents and rows that are longer by the gap, separators need no special case.
    sizes = np.array(lengths, np.int64) + gap
    plan = plan_packs(sizes, max_length + gap, strategy)
    return Layout(max_length, plan.order, plan.offsets, sizes[plan.order], gap)


def _fill(layout: Layout, sequences: list[Any], kind: Kind, pad: Any, separator: Any = None) -> Any:
    if kind.container == "list":
        return fill_lists(layout, sequences, pad, separator)
    return fill_array(layout, sequences, kind, pad, separator)

"""Token sequences as lists, numpy arrays or torch tensors: recognise them, join them, lay them out in rows.

torch is never imported here: a caller that passes a tensor has imported it already.
"""

import gc
import numbers
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from unsloth_pack.errors import InputError

WHOLE_COLUMNS = ("input_ids", "labels")  # other columns may hold fractions, such as a weight per token
_LISTS = (list, tuple, range)
_TRAITS = ("__class__", "dtype", "ndim", "device")  # arrays and tensors that agree in these are of one kind


@dataclass(frozen=True)
class Kind:
    """The container and number type of sequences; the rows made of them have the same.

    Args:
        container: "list", "numpy" or "torch".
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
        if whole and _is_fractional(sequences[0]):
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


def _is_fractional(array: Any) -> bool:
    """Whether the type of an array or tensor can hold fractions."""
    return array.dtype.kind == "f" if isinstance(array, np.ndarray) else array.is_floating_point()


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
    if kind.container == "numpy":
        return np.full(shape, value, kind.dtype)
    return sys.modules["torch"].full(shape, value, dtype=kind.dtype, device=kind.device)


def joined(kind: Kind, parts: Sequence[Any]) -> Any:
    """The parts, all of this kind, one after another in a new sequence of the same kind."""
    if kind.container == "list":
        return list(chain.from_iterable(parts))
    if kind.container == "numpy":
        return np.concatenate(parts)
    return sys.modules["torch"].cat(list(parts))


def copy_of(part: Any) -> Any:
    """A slice of a sequence, in memory of its own: slices of arrays and tensors are views."""
    if isinstance(part, _LISTS):
        return part
    return part.copy() if isinstance(part, np.ndarray) else part.clone()


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

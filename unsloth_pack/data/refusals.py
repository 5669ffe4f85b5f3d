"""How data is refused: InputError names row, column, value and remedy."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from unsloth_pack.data.columns import as_flag, as_given
from unsloth_pack.errors import InputError

Columns = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Names:
    """How the data names its columns.

    Args:
        columns: the mapping by which they were renamed.
        are_shared: whether other data sets have the same mapping.
    """

    columns: Columns = field(default_factory=dict)
    are_shared: bool = False

    def of(self, column: str) -> str:
        return next((name for name, to in self.columns.items() if to == column), column)

    def way_to_give(self, offered: Columns) -> str:
        """A mapping as it is given, beside what the present one says of other columns."""
        if not self.columns:
            return as_flag(offered)
        new = {self.of(name): to for name, to in offered.items()}
        kept = {name: to for name, to in self.columns.items() if to is None or to not in new.values()}
        return as_given({**kept, **new}, self.are_shared)


@dataclass(frozen=True)
class Column:
    """In a message, a column by the name that the formats have for it."""

    name: str
    is_quoted: bool = False

    def said(self, names: Names) -> str:
        name = names.of(self.name)
        return repr(name) if self.is_quoted else name


@dataclass(frozen=True)
class Offer:
    """In a message, a mapping of columns that would help."""

    columns: Columns

    def said(self, names: Names) -> str:
        return names.way_to_give(self.columns)


Piece = str | Column | Offer


class ColumnsRefused(InputError):
    """What is wrong with columns, in the names that the data has for them.

    Args:
        pieces: of the message.

    Attributes:
        names: those of the data; `telling_names` sets them.
    """

    names = Names()

    def __init__(self, *pieces: Piece):
        super().__init__(_said(pieces, self.names))
        self.pieces = pieces

    def __str__(self) -> str:
        return _said(self.pieces, self.names) if self.names.columns else super().__str__()


def _said(pieces: Iterable[Piece], names: Names) -> str:
    return "".join(each if isinstance(each, str) else each.said(names) for each in pieces)


@contextmanager
def telling_names(columns: Columns, *, are_shared: bool = False) -> Iterator[None]:
    """Errors inside this context name columns as the data did before `columns` renamed them."""
    try:
        yield
    except ColumnsRefused as error:
        error.names = Names(columns, are_shared)
        raise


def fail(index: int, column: str, problem: str, value: Any, *remedy: Piece) -> NoReturn:
    """Raise the InputError for row `index`, with the value shortened."""
    said = f": {problem}, got {reprlib.repr(value)}; "
    raise ColumnsRefused(f"row {index}, column ", Column(column, is_quoted=True), said, *remedy)


def joined(pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Some of them, with commas between."""
    return [piece for number, each in enumerate(pieces) for piece in ([", "] if number else []) + [*each]]

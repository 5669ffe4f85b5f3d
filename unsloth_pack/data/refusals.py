"""How data is refused: InputError names row, column, value and remedy."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

from unsloth_pack.data.columns import as_flag, as_given
from unsloth_pack.errors import InputError

Columns = Mapping[str, "str | None"]


class ColumnsRefused(InputError):
    """What is wrong with columns. They have the names of the formats, until `by_their_names` says it anew.

    Args:
        message: names the column as `column 'name'`.
        column: the name; empty where the message is of no single column.
        offered: what the message offers, as `as_flag` writes it.
        types: by the names of all columns, as `listed` writes them in the message.
    """

    def __init__(
        self,
        message: str,
        column: str = "",
        offered: Columns | None = None,
        types: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.column, self.offered, self.types = column, offered or {}, types or {}


def fail(
    index: int, column: str, problem: str, value: Any, remedy: str, offered: Columns | None = None
) -> NoReturn:
    """Raise the InputError for row `index`, with the value shortened.

    Args:
        offered: what the remedy offers, as `as_flag` writes it.
    """
    message = f"row {index}, column {column!r}: {problem}, got {reprlib.repr(value)}; {remedy}"
    raise ColumnsRefused(message, column, offered)


def listed(types: Mapping[str, str]) -> str:
    """Columns and their types."""
    return ", ".join(f"{name} ({kind})" for name, kind in types.items())


def by_their_names(error: InputError, columns: Columns, *, are_shared: bool = False) -> InputError:
    """The error with the names that the columns have in the data, and a mapping that keeps the present one.

    Args:
        columns: the mapping by which they were renamed.
        are_shared: whether other data sets have the same mapping.
    """
    if not isinstance(error, ColumnsRefused) or not columns:
        return error
    theirs = {to: name for name, to in columns.items() if to is not None}
    said = str(error)
    if error.column:
        name = theirs.get(error.column, error.column)
        said = said.replace(f"column {error.column!r}", f"column {name!r}", 1)
    if error.types:
        types = {theirs.get(name, name): kind for name, kind in error.types.items()}
        said = said.replace(listed(error.types), listed(types), 1)
    if error.offered:
        offered = {theirs.get(name, name): to for name, to in error.offered.items()}
        kept = {name: to for name, to in columns.items() if to is None or to not in offered.values()}
        said = said.replace(as_flag(error.offered), as_given({**kept, **offered}, are_shared))
    return InputError(said)

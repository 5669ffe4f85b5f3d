"""Labels of whole documents: the classes that a column names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unsloth_pack.data.rows import fail
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Labels:
    """The classes of the documents that a run trains on, in the order of the model's outputs."""

    column: str
    names: tuple[str, ...]

    @classmethod
    def of(cls, column: str, data_sets: Iterable[tuple[str, datasets.Dataset]]) -> Labels:
        """Find the classes in a column of data sets; each comes with its name, for errors.

        They stand in the order of their numbers or of the alphabet, or in that of a `ClassLabel`.

        Raises:
            InputError: no such column, a label that is missing or no class, or less than two classes.
        """
        declared: dict[str, None] = {}
        used: set[str] = set()
        for data_set, rows in data_sets:
            try:
                used |= {*_names_in(rows, column)}
            except InputError as error:
                raise InputError(f"{data_set}: {error}") from None
            declared |= dict.fromkeys(getattr(rows.features[column], "names", ()))
        names = (*declared, *sorted(used - declared.keys(), key=_order))
        if len(names) < 2:
            raise InputError(f"label_column {column!r} holds {len(names)} label; give data with two or more")
        return cls(column, names)

    def numbers(self, rows: datasets.Dataset) -> np.ndarray:
        """Return `[rows]` int32: the class of each row.

        Raises:
            InputError: a label that the training data has not.
        """
        numbers = {name: number for number, name in enumerate(self.names)}
        names = _names_in(rows, self.column)
        for index, name in enumerate(names):
            if name not in numbers:
                fail(index, self.column, "not in the training data", name, "correct or remove it")
        return np.array([numbers[name] for name in names], np.int32)


def _names_in(rows: datasets.Dataset, column: str) -> list[str]:
    """The name of each row's class."""
    if column not in rows.column_names:
        raise InputError(f"no column {column!r} among {', '.join(rows.column_names)}; give --label_column")
    of_numbers = getattr(rows.features[column], "names", None)
    names = []
    for index, value in enumerate(rows.with_format(None)[column][:]):
        is_none = value == (-1 if of_numbers else "")  # as files of CSV hold a missing one
        if is_none or not isinstance(value, str | int):
            fail(index, column, "no class", value, "give whole numbers or names, or remove the row")
        names.append(of_numbers[value] if of_numbers else str(value))
    return names


def _order(name: str) -> tuple[bool, int, str]:
    is_number = name.removeprefix("-").isdecimal()
    return not is_number, int(name) if is_number else 0, name

"""A data set as a run names it: where it lies, which part of it is taken, and what its columns mean."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from unsloth_pack.data.chosen_rows import ChosenRows
from unsloth_pack.data.columns import check_renaming, renamed
from unsloth_pack.data.raw_blocks import RowSource, first_columns
from unsloth_pack.data.sources import check_there, load_rows, open_stream
from unsloth_pack.errors import InputError, about

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class DataSet:
    """One of the data sets of a run.

    Args:
        path: as for `load_rows`.
        weight: of its documents in a mixture, see `mixture`.
        split: which part of a folder or a hub data set; None for the usual one.
        limit: its first rows alone; None for all.
        columns: what its columns are called here; None for those that are left out.
        shares_columns: whether other data sets have the same `columns`, of which each uses those that it has.
        option: the option that names it, for errors: `eval_dataset`, or `dataset.1` for the second of a list.
    """

    path: str
    weight: float = 1.0
    split: str | None = None
    limit: int | None = None
    columns: Mapping[str, str | None] = field(default_factory=dict)
    shares_columns: bool = False
    option: str = ""

    @property
    def name(self) -> str:
        return f"{self.path} ({self.split})" if self.split else self.path

    def for_rows_with(self, names: Sequence[str]) -> DataSet:
        """The same without the shared columns that its rows lack.

        Args:
            names: of the columns that they have.
        """
        if not self.shares_columns:
            return self
        return replace(self, columns={name: to for name, to in self.columns.items() if name in names})

    def read(self, split: str = "train", num_proc: int | None = None) -> datasets.Dataset:
        """Its rows under their own column names, as `load_rows` reads them.

        Args:
            split: which is taken where none is named.

        Raises:
            InputError: it cannot be read, or lacks the split; names the data set.
        """
        with about(self.option):
            self._check_split()
            return load_rows(self.path, self.split or split, num_proc)

    def chosen(self, rows: datasets.Dataset) -> datasets.Dataset:
        """Of the rows that were read those that are taken, under the column names that it gives them.

        Raises:
            InputError: they lack a column; names the data set.
        """
        try:
            rows = renamed(rows, self.columns, are_shared=self.shares_columns)
        except InputError as error:
            raise InputError(f"{self.name}: {error}", about=self.option) from None
        return rows if self.limit is None else rows.select(range(min(self.limit, len(rows))))

    def check_there(self, is_stream: bool = False) -> None:
        """Refuse a path at which nothing lies, and a split of a file.

        Args:
            is_stream: whether a pattern stands for several files.

        Raises:
            InputError: names the data set.
        """
        with about(self.option):
            check_there(self.path, is_stream)
            self._check_split()

    def check(self, is_stream: bool = False) -> None:
        """Refuse what can be told without reading all of it: as `check_there`, and a column that is not among
        those of the first rows.

        Raises:
            InputError: names the data set.
        """
        self.check_there(is_stream)
        if self.columns and not self.shares_columns and (names := self._first_columns()):
            try:
                check_renaming(names, self.columns)
            except InputError as error:
                raise InputError(f"{self.name}: {error}", about=self.option) from None

    def _first_columns(self) -> list[str]:
        """The columns of the first rows; none where these lie elsewhere, or cannot be read for themselves."""
        if not os.path.exists(os.path.expanduser(self.path)):
            return []
        try:
            return first_columns(self.open())
        except (InputError, OSError):
            return []

    def open(self) -> RowSource:
        """Its rows under their own column names, to be read as they are needed.

        Raises:
            InputError: it cannot be read, or lacks the split.
        """
        with about(self.option):
            self._check_split()
            return open_stream(self.path, self.split or "train")

    def chosen_of(self, source: RowSource) -> RowSource:
        """Of a source that was opened the rows that are taken, under the column names that it gives them."""
        return ChosenRows(source, self.columns, self.limit, self.option)

    @property
    def has_splits(self) -> bool:
        """Whether it is neither a file, nor a pattern of files, nor a saved data set without splits."""
        path = os.path.expanduser(self.path)
        if os.path.isdir(path):
            return not os.path.isfile(os.path.join(path, "state.json"))
        return not (os.path.exists(path) or glob.has_magic(path))

    def _check_split(self) -> None:
        if self.split is not None and not self.has_splits:
            raise InputError(
                f"{self.path}: split is {self.split!r}, and it has no splits; leave it out or give the folder"
            )

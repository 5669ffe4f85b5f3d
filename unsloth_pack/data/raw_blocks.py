"""A stream's rows before they are tokenised: of files or a hub data set, some MiB at a time, from any place.

A block is read whole, but only the rows that somebody asks for are parsed: each of the processes that train
together reads all blocks, and takes its own rows out of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unsloth_pack.data.compressed import opened, read_in_one_line, skip
from unsloth_pack.data.file_parts import FilePart, Row, check_ordinary
from unsloth_pack.data.json_files import is_json_lines, line_in_file, rows_of_lines
from unsloth_pack.data.parquet_files import parquet_schema, read_parquet
from unsloth_pack.data.readers import HalfCharacter, exact_tables, exactly, kind_of
from unsloth_pack.data.text_files import TEXT_READERS, read_txt
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_ROWS, _BYTES = 1000, 1 << 20  # of a block, about
_ROWS_WITH_FILES = 50  # of a block of a hub data set whose rows hold images
_LINES_OF_TXT = 10_000  # among which a blank line says that blank lines separate documents


@dataclass(frozen=True)
class Place:
    """Between which rows of a stream one stands. JSON can hold it.

    Args:
        turn: passes over the data that are complete.
        seen: rows of this pass that are done.
        file: in which it is; empty at the begin of a pass, and in a hub data set.
        at: bytes of the file's lines, or rows of it, that are done.
        row: rows of the file, or of the hub data set, that are done.
        state: what a hub data set says of its own place.
    """

    turn: int = 0
    seen: int = 0
    file: str = ""
    at: int = 0
    row: int = 0
    state: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RawBlock:
    """Some rows that follow one another.

    Args:
        name: of the file or the data set, for errors.
        n_rows: how many they are.
        read: gives those of a range of indices; raises InputError or HalfCharacter for what cannot be read.
        begin, end: the places before and after them.
        ends_pass: whether the pass over the data is complete; then the block has no rows.
        part: the number of the source that it comes from, where several are mixed.
        columns: the mapping by which the columns of the rows are renamed.
        option: that names the data set, for errors.
    """

    name: str
    n_rows: int
    read: Callable[[range], datasets.Dataset]
    begin: Place
    end: Place
    ends_pass: bool = False
    part: int = 0
    columns: Mapping[str, str | None] = field(default_factory=dict)
    option: str = ""

    def rows(self, chosen: range) -> datasets.Dataset:
        """Those of a range of indices.

        Raises:
            InputError: one cannot be read; names it.
        """
        try:
            return self.read(chosen)
        except HalfCharacter as error:
            raise error.refusal(Path(self.name), self.begin.row + chosen[error.index]) from None


class RowSource(Protocol):
    """Where a stream's rows come from.

    Attributes:
        name: for errors.
        option: that names it, for errors; empty where none does.
        parts: the sources that are mixed in it; itself, where none are.
    """

    name: str
    option: str
    parts: tuple[RowSource, ...]

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        """The blocks from a place to the end of the data.

        Raises:
            InputError: the data has changed since the place was noted, or cannot be read.
        """


def endless(source: RowSource, place: Place) -> Iterator[RawBlock]:
    """The blocks from a place on, pass after pass; a block without rows ends each pass.

    Raises:
        InputError: there are no rows; or see `RowSource.one_pass`.
    """
    while True:
        for block in source.one_pass(place):
            place = block.end
            yield block
        if not place.seen:
            raise InputError(f"{source.name}: 0 rows; give a dataset with at least one", about=source.option)
        begin, place = place, Place(place.turn + 1)
        yield RawBlock(source.name, 0, _nothing, begin, place, ends_pass=True)


def first_columns(source: RowSource) -> list[str]:
    """The columns of the first rows of a source; none where it has no rows."""
    for block in source.one_pass(Place()):
        return block.rows(range(block.n_rows)).column_names
    return []


class FileRows:
    """The rows of files, one after another.

    Args:
        files: in the order in which they are read.
        root: the folder to which their names are relative.
    """

    option = ""

    def __init__(self, name: str, files: Sequence[Path], root: Path):
        self.name = name
        self.parts: tuple[RowSource, ...] = (self,)
        self._files = {str(file.relative_to(root)): file for file in files}
        kinds = {kind_of(file): file for file in files}
        if len(kinds) > 1:
            names = ", ".join(file.name for file in kinds.values())
            raise InputError(f"{name}: files of several formats ({names}); keep one format a stream")
        (self._kind,) = kinds
        for file in files:
            check_ordinary(file)

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        names = list(self._files)
        if place.file and place.file not in names:
            raise InputError(
                f"{self.name}: {place.file}, in which the run stopped, is gone; give the same data, or start "
                "anew"
            )
        for name in names[names.index(place.file) if place.file else 0 :]:
            here = place if name == place.file else replace(place, file=name, at=0, row=0)
            for n_rows, read, at in self._blocks(self._files[name], here.at, here.row):
                there = replace(here, at=at, row=here.row + n_rows, seen=here.seen + n_rows)
                yield RawBlock(str(self._files[name]), n_rows, read, here, there)
                here = there
            place = here

    def _blocks(self, path: Path, at: int, row: int) -> Iterator[_Read]:
        if self._kind == "parquet":
            yield from _of_parquet(path, row)
            return
        with read_in_one_line(path):
            if self._kind == "json" and is_json_lines(path):
                yield from _of_lines(path, at)
            else:
                yield from _of_lists(path, self._kind, row)


class IterableRows:
    """The rows of a `datasets.IterableDataset`, such as a hub data set that is read as it comes."""

    option = ""

    def __init__(self, name: str, rows: datasets.IterableDataset):
        self.name, self._rows = name, rows
        self.parts: tuple[RowSource, ...] = (self,)

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        rows = self._rows.with_format("arrow")
        rows.load_state_dict(place.state or rows.state_dict())
        size = _ROWS_WITH_FILES if _holds_files(self._rows.features) else _ROWS
        try:
            for table in rows.iter(batch_size=size):
                done = place.row + len(table)
                there = replace(place, row=done, seen=done, state=rows.state_dict())
                yield RawBlock(self.name, len(table), self._reader(table), place, there)
                place = there
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{self.name}: cannot be read on ({reason}); check the network") from None

    def _reader(self, table: pa.Table) -> Callable[[range], datasets.Dataset]:
        return partial(_of_table, Path(self.name), table, self._rows.features)


def _holds_files(features: datasets.Features | None) -> bool:
    """Whether rows may hold images or other bytes."""
    return features is not None and any("binary" in str(kind) for kind in features.arrow_schema.types)


# Rows of a file: their number, what reads those of a range, and what is done of the file after them
_Read = tuple[int, "Callable[[range], datasets.Dataset]", int]


def _of_lines(path: Path, at: int) -> Iterator[_Read]:
    with opened(path) as file:
        skip(file, path, at)
        while lines := file.readlines(_BYTES):
            part = FilePart(path, at, at + sum(map(len, lines)))
            held = [(number, line) for number, line in enumerate(lines) if line.strip()]
            yield len(held), partial(_of_text, part, held), part.end
            at = part.end


def _of_text(part: FilePart, lines: list[tuple[int, bytes]], chosen: range) -> datasets.Dataset:
    def text_of(number: int, line: bytes) -> str:
        try:
            return line.decode("utf-8" if part.start + number else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{part.path} line {line_in_file(part, number)}: byte 0x{line[error.start]:02x} is not "
                "UTF-8; save the file as UTF-8"
            ) from None

    mine = [lines[index] for index in chosen]
    rows = rows_of_lines([(number, text_of(number, line).rstrip("\n")) for number, line in mine], part)
    return _exact(part.path, rows, range(len(rows)))


def _of_lists(path: Path, kind: str, first: int) -> Iterator[_Read]:
    part = FilePart(path, 0, path.stat().st_size)
    lists = read_txt(part, _LINES_OF_TXT) if kind == "txt" else TEXT_READERS[kind](part)
    rows = islice(chain.from_iterable(lists), first, None)
    while held := list(islice(rows, _ROWS)):
        for number, row in enumerate(held, first):
            if any(isinstance(value, str) and "\0" in value for value in row.values()):
                raise InputError(
                    f"{path}: row {number} has a zero byte, as in UTF-16 but not in text; save the file as "
                    "UTF-8"
                )
        first += len(held)
        yield len(held), partial(_exact, path, held), first


def _of_parquet(path: Path, first: int) -> Iterator[_Read]:
    for table in read_parquet(path, parquet_schema([path]), first):
        rows = max(1, min(_ROWS, math.ceil(_BYTES * len(table) / max(1, table.nbytes))))
        for start in range(0, len(table), rows):
            some = table.slice(start, rows)
            first += len(some)
            yield len(some), partial(_of_table, path, some, None), first


def _of_table(
    path: Path, table: pa.Table, features: datasets.Features | None, chosen: range
) -> datasets.Dataset:
    import datasets

    info = None if features is None else datasets.DatasetInfo(features=features)
    return exactly(lambda: datasets.Dataset(table.take(list(chosen)), info=info), [path])


def _exact(path: Path, rows: list[Row], chosen: range) -> datasets.Dataset:
    import datasets

    ((_, table),) = exact_tables(iter([[rows[index] for index in chosen]]), path)
    return exactly(lambda: datasets.Dataset(table), [path])


def _nothing(chosen: range) -> datasets.Dataset:
    raise AssertionError("the block that ends a pass has no rows")

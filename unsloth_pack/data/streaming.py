"""The documents of a stream: tokenised as its rows come, by every process its own share.

A stream's rows come in blocks of some MiB, from any place. A block is read whole, but only the rows that are
wanted are parsed: each of the processes that train together reads all blocks, and takes its own rows of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from unsloth_pack.data.columns import KNOWN_COLUMNS
from unsloth_pack.data.files import kind_of_all, parquet_schema, read_parquet
from unsloth_pack.data.rows import IMAGES
from unsloth_pack.data.text_files import (
    TEXT_READERS,
    FilePart,
    Row,
    is_json_lines,
    line_blocks,
    refuse_unreadable,
    rows_of_lines,
)
from unsloth_pack.data.token_counts import SpanCounts
from unsloth_pack.data.tokenize import DocumentMaker, RowHashes, SpanMaker, check_counted, document_schema
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from unsloth_pack.data.token_counts import TokenLedger

_ROWS, _BYTES = 1000, 1 << 20  # of a block, about
_ROWS_WITH_FILES = 50  # of a block of a hub data set whose rows hold images
_FIRST_ROWS = 1000  # that are looked at before the training, or more: whole blocks are


@dataclass(frozen=True)
class Place:
    """A place between two rows of a stream. JSON can hold it."""

    turn: int = 0  # passes over the data that are complete
    seen: int = 0  # rows of this pass that are done
    file: str = ""  # in which it is; empty at the begin of a pass, and in a hub data set
    at: int = 0  # bytes of the file's lines, or rows of it, that are done
    row: int = 0  # rows of the file, or of the hub data set, that are done
    state: dict[str, Any] | None = None  # what a hub data set, or a mixture, says of its own place
    done: int = 0  # rows after it that are done, where blocks are taken in parts

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RawBlock:
    """Some rows that follow one another."""

    name: str  # of the file or the data set, for errors
    n_rows: int
    read: Callable[[range], datasets.Dataset]  # the rows of a range of indices
    begin: Place
    end: Place
    ends_pass: bool = False  # whether the pass over the data is complete; then the block has no rows
    part: int = 0  # the number of the source that it comes from, where several are mixed


class RowSource(Protocol):
    """Where a stream's rows come from."""

    name: str  # for errors
    parts: tuple[RowSource, ...]  # the sources that are mixed in it; itself, where none are

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        """The blocks from a place to the end of the data."""


def endless(source: RowSource, place: Place) -> Iterator[RawBlock]:
    """The blocks from a place on, pass after pass; a block without rows ends each pass."""
    while True:
        for block in source.one_pass(place):
            place = block.end
            yield block
        if not place.seen:
            raise no_rows(source)
        begin, place = place, Place(place.turn + 1)
        yield RawBlock(source.name, 0, _unreadable, begin, place, ends_pass=True)


def no_rows(source: RowSource) -> InputError:
    """The error of a source whose pass has ended without a row."""
    return InputError(f"{source.name}: 0 rows; give a dataset with at least one")


def _unreadable(chosen: range) -> datasets.Dataset:
    raise AssertionError("the block that ends a pass has no rows")


class FileRows:
    """The rows of files, one after another; the names of files are relative to `root`."""

    def __init__(self, name: str, files: Sequence[Path], root: Path):
        self.name = name
        self.parts: tuple[RowSource, ...] = (self,)
        self._files = {str(file.relative_to(root)): file for file in files}
        self._kind = kind_of_all(files, name)

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
        with refuse_unreadable(path):
            if self._kind == "json" and is_json_lines(path):
                for block, lines in line_blocks(FilePart(path, at, sys.maxsize), _BYTES):
                    yield len(lines), partial(_of_lines, block, lines), block.end
            else:
                yield from _of_lists(path, self._kind, row)


class IterableRows:
    """The rows of a `datasets.IterableDataset`, such as a hub data set that is read as it comes."""

    def __init__(self, name: str, rows: datasets.IterableDataset):
        self.name, self._rows = name, rows
        self.parts: tuple[RowSource, ...] = (self,)

    def one_pass(self, place: Place) -> Iterator[RawBlock]:
        features = self._rows.features
        rows = self._rows.with_format("arrow")
        rows.load_state_dict(place.state or rows.state_dict())
        has_files = features and any("binary" in str(kind) for kind in features.arrow_schema.types)
        try:
            for table in rows.iter(batch_size=_ROWS_WITH_FILES if has_files else _ROWS):
                done = place.row + len(table)
                there = replace(place, row=done, seen=done, state=rows.state_dict())
                read = partial(_of_table, Path(self.name), table, features)
                yield RawBlock(self.name, len(table), read, place, there)
                place = there
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{self.name}: cannot be read on ({reason}); check the network") from None


# Rows of a file: their number, what reads those of a range, and what is done of the file after them
_Read = tuple[int, "Callable[[range], datasets.Dataset]", int]


def _of_lines(block: FilePart, lines: list[tuple[int, bytes]], chosen: range) -> datasets.Dataset:
    rows = rows_of_lines(block, [lines[index] for index in chosen])
    return _of_rows(block.path, rows, range(len(rows)))


def _of_lists(path: Path, kind: str, first: int) -> Iterator[_Read]:
    part = FilePart(path, 0, path.stat().st_size)
    rows = islice(chain.from_iterable(TEXT_READERS[kind](part)), first, None)
    while some := list(islice(rows, _ROWS)):
        first += len(some)
        yield len(some), partial(_of_rows, path, some), first


def _of_parquet(path: Path, first: int) -> Iterator[_Read]:
    for table in read_parquet(path, parquet_schema([path]), first):
        rows = max(1, min(_ROWS, math.ceil(_BYTES * len(table) / max(1, table.nbytes))))
        for start in range(0, len(table), rows):
            some = table.slice(start, rows)
            first += len(some)
            yield len(some), partial(_of_table, path, some, None), first


def _of_rows(path: Path, rows: list[Row], chosen: range) -> datasets.Dataset:
    from unsloth_pack.data.lossless_json import to_dataset

    with refuse_unreadable(path):
        return to_dataset([rows[index] for index in chosen])


def _of_table(
    path: Path, table: pa.Table, features: datasets.Features | None, chosen: range
) -> datasets.Dataset:
    import datasets

    from unsloth_pack.data.lossless_json import read_exactly

    with refuse_unreadable(path):
        info = datasets.DatasetInfo(features=features)
        return read_exactly(datasets.Dataset(table.take(list(chosen)), info=info))


@dataclass(frozen=True, eq=False)
class DocumentBlock:
    """Documents that follow one another in a stream, without those in which no label counts."""

    table: pa.Table  # columns of tokens, `input_ids` and `labels` among them; and images, where some have
    tally: SpanCounts  # of the rows that they were made of
    end: Place  # after these rows
    ends_pass: bool
    part: int = 0  # the data set of a mixture that they are of

    def documents(self) -> Iterator[dict[str, Any]]:
        """Each as `[tokens]` arrays of its ids (int32), labels, ..., and a list of its images."""
        names = [name for name in self.table.column_names if name != IMAGES]
        columns = {name: self.table[name].combine_chunks() for name in names}
        ends = np.cumsum(columns["labels"].value_lengths().to_numpy()).tolist()
        flat = {name: column.flatten().to_numpy() for name, column in columns.items()}
        images = self.table[IMAGES].to_pylist() if IMAGES in self.table.column_names else None
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            document: dict[str, Any] = {name: tokens[start:end] for name, tokens in flat.items()}
            yield document if images is None else document | {IMAGES: images[number]}


class StreamedImages(Protocol):
    """Makes documents of rows with images, and gives others an empty column of images."""

    schema: pa.Schema  # of both

    def are_in(self, rows: datasets.Dataset) -> bool: ...

    def maker(self, rows: datasets.Dataset, numbers: range) -> SpanMaker: ...

    def unused_columns(self, rows: datasets.Dataset) -> tuple[str, ...]: ...

    def beside(self, table: pa.Table) -> pa.Table: ...


@dataclass(frozen=True)
class Share:
    """Which rows of a stream a process takes: those whose number in the pass, plus the pass, leaves `number`
    when divided by `of`. So a process that gets no row of a small data set gets one in a later pass."""

    number: int = 0
    of: int = 1

    def indices(self, block: RawBlock) -> range:
        """Of its rows in a block."""
        first = (self.number - block.begin.turn - block.begin.seen) % self.of
        return range(first, block.n_rows, self.of)


class DocumentStream:
    """Tokenises the rows of a source, in the format that its first rows have; of each part, if it is mixed.

    Args:
        vocab_size: token ids are below it.
        images: makes documents of rows with images; None where no row has any.
        check_text: refuses documents without images, of which one is called as its second argument says.

    The ledger and the fingerprint are of the first rows, of one block at least of each part.
    """

    def __init__(
        self,
        source: RowSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        max_length: int,
        responses_only: bool,
        chat_template: str | None,
        images: StreamedImages | None = None,
        check_text: Callable[[pa.Table, str], None] | None = None,
    ):
        self._images, self._check_text = images, check_text
        self._source, self._tokenizer, self._vocab_size = source, tokenizer, vocab_size
        self._max_length, self._responses_only = max_length, responses_only
        self._chat_template = chat_template
        self.n_parts, self.has_images = len(source.parts), images is not None
        self._formats: dict[int, tuple[str, list[str]]] = {}  # of each part, and the columns that it uses
        self.unused_columns: dict[int, tuple[str, ...]] = {}
        self.first_ledger, self.fingerprint = self._look_at_first_rows()

    def blocks(
        self, place: Place, share: Share, worker: int = 0, workers: int = 1
    ) -> Iterator[DocumentBlock]:
        """The documents of a share from a place on, without an end.

        Args:
            worker, workers: number of this worker, and how many take turns; each gives its own blocks.
        """
        for turn, block in enumerate(endless(self._source, place)):
            if turn % workers == worker:
                yield self._tokenize(block, share)

    def _look_at_first_rows(self) -> tuple[TokenLedger, str]:
        tally, hashes = SpanCounts(), RowHashes()
        for number, part in enumerate(self._source.parts):
            of_part = SpanCounts()
            for block in endless(part, Place()):
                documents = self._tokenize(replace(block, part=number), Share())
                of_part += documents.tally
                hashes.update(documents.table)
                if block.ends_pass or of_part.sums["rows_read"] >= _FIRST_ROWS:
                    break
            tally += of_part
        check_counted(tally.ledger, self._max_length)
        return tally.ledger, hashes.hexdigest()

    def _tokenize(self, block: RawBlock, share: Share) -> DocumentBlock:
        schema = document_schema() if self._images is None else self._images.schema
        chosen, tally, tables = share.indices(block), SpanCounts(), [schema.empty_table()]
        if chosen:
            begin = block.begin.row
            numbers = range(begin + chosen.start, begin + chosen.stop, chosen.step)
            rows = block.read(chosen)
            try:
                maker = self._maker(rows, numbers, block.part)
                tables += [self._beside_images(x, numbers) for x in maker.tables(0, len(rows), tally)]
                if tally.least_id < 0 or tally.last_id >= self._vocab_size:
                    wrong = tally.last_id if tally.last_id >= self._vocab_size else tally.least_id
                    raise InputError(
                        f"rows {numbers[0]} to {numbers[-1]}: token id {wrong} is outside the vocabulary, 0 "
                        f"to {self._vocab_size - 1}; use the tokenizer of this model, or resize embeddings"
                    )
            except InputError as error:
                raise InputError(f"{block.name}: {error}") from None
        if self.n_parts > 1:
            tally = tally.of_part(block.part)
        return DocumentBlock(pa.concat_tables(tables), tally, block.end, block.ends_pass, block.part)

    def _beside_images(self, table: pa.Table, numbers: range) -> pa.Table:
        """Documents of some of the rows with these numbers, with a column of images if the stream has any."""
        if IMAGES in table.column_names:
            return table
        if self._check_text is not None:
            self._check_text(table, f"rows {numbers[0]} to {numbers[-1]}: document")
        return table if self._images is None else self._images.beside(table)

    def _maker(self, rows: datasets.Dataset, numbers: range, part: int) -> SpanMaker:
        """What makes documents of some rows, which have to be as the first rows of their part are."""
        if self._images is not None and self._images.are_in(rows):
            if part not in self.unused_columns:
                self.unused_columns[part] = self._images.unused_columns(rows)
            return self._images.maker(rows, numbers)
        is_first = part not in self._formats
        for name in [] if is_first else self._formats[part][1]:
            if name not in rows.column_names:
                rows = rows.add_column(name, [None] * len(rows))
        make = DocumentMaker(
            rows, self._tokenizer, self._max_length, self._responses_only, self._chat_template, numbers
        )
        data_format = make.conversion.data_format
        if is_first:
            columns = [name for name in rows.column_names if name in KNOWN_COLUMNS]
            self._formats[part] = (data_format, columns)
            template = str(self._tokenizer.chat_template or "")
            self.unused_columns[part] = make.conversion.unused_columns(template)
        if data_format != self._formats[part][0]:
            raise InputError(
                f"rows {numbers[0]} to {numbers[-1]} have the format {data_format}, and the first rows "
                f"{self._formats[part][0]}; keep one format a stream"
            )
        return make

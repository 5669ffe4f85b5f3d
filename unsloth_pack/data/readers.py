"""Reads local files into one `datasets.Dataset`: json, jsonl, csv, parquet, txt. Errors name file and line.

All but parquet may be compressed.

Values stay as they are in the file: no string is parsed into a number, a date or JSON, and no whole number
becomes a fraction. No object of a json file gets another order of keys, or nulls for keys of other rows.

The rows of small files are held in memory, those of large ones in the data set cache.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.compressed import COMPRESSED, is_compressed, plain_name
from unsloth_pack.data.file_parts import FilePart, Row, check_ordinary, check_same_columns, check_text
from unsloth_pack.data.kept import Notes, arrow_file, digest, kept, open_kept
from unsloth_pack.data.parquet_files import parquet_schema, read_parquet, unusable
from unsloth_pack.data.spans import in_order
from unsloth_pack.data.text_files import TEXT_READERS, parts_of
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

SUFFIXES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "txt"}
_SMALL = 4 << 20  # bytes of files whose rows are held in memory
_CHUNKS_A_PART = 1_000_000  # at most


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a file.

    Args:
        schema, rows: their types, and how many there are.
        held: the rows, or the Arrow file that they were written to.
    """

    schema: pa.Schema
    rows: int
    held: pa.Table | Path


class HalfCharacter(Exception):
    """A row holds half of a surrogate pair.

    Args:
        index: of the row, in its part of a file.
        column, value: where it is.
    """

    def __init__(self, index: int, column: str, value: Any):
        super().__init__(index, column, value)
        self.index, self.column, self.value = index, column, value

    def refusal(self, path: Path, row: int) -> InputError:
        """What is told of it, given the number of the row."""
        return InputError(
            f"{path}: row {row}, column {self.column!r}: half of a surrogate pair, which is no character, in "
            f"{reprlib.repr(self.value)}; write the whole character or remove it"
        )


def read_files(files: Sequence[Path], num_proc: int | None = None) -> datasets.Dataset:
    """Read files of one format and with the same columns, in the order given.

    Args:
        num_proc: processes that share out large files; None for as many as there are cores.

    Raises:
        InputError: a suffix is unknown, formats or columns differ between files, or a file is empty or not
            what its suffix says.
    """
    import datasets

    kinds = {kind_of(file): file for file in files}
    if len(kinds) > 1:
        names = ", ".join(file.name for file in kinds.values())
        raise InputError(f"{files[0].parent}: files of several formats ({names}); keep one format a folder")
    (kind,) = kinds
    for file in files:
        check_ordinary(file)
    read = _read_parquet if kind == "parquet" else partial(_read_text, kind=kind)
    if sum(file.stat().st_size for file in files) <= _SMALL:
        return exactly(lambda: datasets.Dataset(read(files, None, 1)), files)
    key = [[plain_name(file).suffix.lower(), is_compressed(file), _digest(file)] for file in files]

    def write(folder: Path) -> Notes:
        read(files, folder, num_proc)
        return {}

    return exactly(lambda: open_kept(kept("rows", key, write)[0]), files)


def kind_of(path: Path) -> str:
    """The format of a file by its suffix, which a compression may follow: json, csv, parquet or txt.

    Raises:
        InputError: it is unknown, or a parquet file is compressed.
    """
    kind = SUFFIXES.get(plain_name(path).suffix.lower())
    if kind is None:
        raise InputError(
            f"{path}: unknown suffix {path.suffix!r}; give a {', '.join(SUFFIXES)} file, which may be "
            f"compressed ({', '.join(COMPRESSED)}), a folder or a hub name"
        )
    if kind == "parquet" and is_compressed(path):
        raise InputError(f"{path}: a compressed parquet file is not read; unpack it")
    return kind


def _digest(path: Path) -> str:
    try:
        return digest(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def exactly(opened: Callable[[], datasets.Dataset], files: Sequence[Path]) -> datasets.Dataset:
    """What `opened` gives, with objects as Python's own JSON module reads them."""
    import pyarrow as pa

    from unsloth_pack.data.exact import read_exactly

    try:
        return read_exactly(opened())
    except InputError:
        raise
    except RecursionError:
        raise _too_deep(files[0]) from None
    except (pa.ArrowException, NotImplementedError, ValueError) as error:
        raise unusable(files[0], error) from None


def _read_parquet(files: Sequence[Path], folder: Path | None, num_proc: int | None) -> pa.Table | None:
    """The rows of parquet files, or None if they were written into `folder`."""
    import pyarrow as pa

    schema = parquet_schema(files)
    work = partial(_parquet_file, schema=schema, folder=folder)
    tables = list(in_order(work, list(enumerate(files)), num_proc))
    return None if folder else pa.concat_tables(table for table in tables if table is not None)


def _parquet_file(task: tuple[int, Path], schema: pa.Schema, folder: Path | None) -> pa.Table | None:
    import pyarrow as pa

    number, file = task
    tables = read_parquet(file, schema)
    if folder is None:
        return pa.Table.from_batches([batch for table in tables for batch in table.to_batches()], schema)
    with arrow_file(folder / f"{number}.arrow", schema) as stream:
        for table in tables:
            stream.write_table(table)
    return None


def _read_text(
    files: Sequence[Path], folder: Path | None, num_proc: int | None, kind: str
) -> pa.Table | None:
    """The rows of files of JSON, CSV or text, or None if they were written into `folder`."""
    import pyarrow as pa

    from unsloth_pack.data.exact import joined_schema, with_types

    for file in files:
        check_text(file)
    parts = [part for file in files for part in parts_of(file)]
    work = partial(_text_part, kind=kind, folder=folder)
    chunks_of: dict[Path, list[_Chunk]] = {file: [] for file in files}
    rows = 0
    try:
        for part, chunks in zip(parts, in_order(work, list(enumerate(parts)), num_proc), strict=True):
            chunks_of[part.path] += chunks
            rows += sum(chunk.rows for chunk in chunks)
    except HalfCharacter as error:
        raise error.refusal(files[0], rows + error.index) from None
    for file, chunks in chunks_of.items():
        if not sum(chunk.rows for chunk in chunks):
            raise InputError(f"{file}: 0 rows; give a file with at least one")
    schemas = [joined_schema([chunk.schema for chunk in chunks]) for chunks in chunks_of.values()]
    check_same_columns(files, [schema.names for schema in schemas])
    schema = joined_schema(schemas)
    every = [chunk for chunks in chunks_of.values() for chunk in chunks]
    if folder is None:
        return pa.concat_tables(with_types(chunk.held, schema) for chunk in every)
    others = [chunk.held for chunk in every if chunk.schema != schema]
    for _ in in_order(partial(_write_again, schema=schema), others, num_proc):
        pass
    return None


def _text_part(task: tuple[int, FilePart], kind: str, folder: Path | None) -> list[_Chunk]:
    number, part = task
    chunks: list[_Chunk] = []
    for rows, table in exact_tables(TEXT_READERS[kind](part), part.path):
        held: pa.Table | Path = table
        if folder is not None:
            held = folder / f"{number * _CHUNKS_A_PART + len(chunks)}.arrow"
            with arrow_file(held, table.schema) as stream:
                stream.write_table(table)
        chunks.append(_Chunk(table.schema, rows, held))
    return chunks


def exact_tables(lists: Iterator[list[Row]], path: Path) -> Iterator[tuple[int, pa.Table]]:
    """Lists of rows, counted, and as Arrow tables that hold the same values."""
    import pyarrow as pa

    from unsloth_pack.data.exact import exact_table

    done = 0
    for rows in lists:
        try:
            yield len(rows), exact_table(rows)
        except (RecursionError, pa.ArrowException):
            raise _too_deep(path) from None
        except UnicodeEncodeError:
            index, name = next(
                (index, name)
                for index, row in enumerate(rows)
                for name in row
                if not _is_unicode((name, row[name]))
            )
            raise HalfCharacter(done + index, name, rows[index][name]) from None
        done += len(rows)


def _too_deep(path: Path) -> InputError:
    return InputError(
        f"{path}: lists or objects nested too deeply to be held; leave out what is not trained on"
    )


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _write_again(path: Path, schema: pa.Schema) -> None:
    """Write an Arrow file anew with other types, which hold the same values."""
    import pyarrow as pa

    from unsloth_pack.data.exact import with_types

    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
    aside = path.with_suffix(".new")
    with arrow_file(aside, schema) as written:
        written.write_table(with_types(table, schema))
    os.replace(aside, path)

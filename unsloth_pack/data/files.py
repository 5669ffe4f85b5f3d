"""Reads local files into one `datasets.Dataset`: json, jsonl, csv, parquet, txt. Errors name file and line.

All but parquet may be compressed.

Values stay as they are in the file: no string is parsed into a number, a date or JSON, and no whole number
becomes a fraction. No object of a json file gets another order of keys, or nulls for keys of other rows.

The rows of small files are held in memory, those of large ones in the data set cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from unsloth_pack.data.cache import Notes, digest, from_cache, in_order, open_cached, write_tables
from unsloth_pack.data.text_files import (
    COMPRESSED,
    PART,
    TEXT_READERS,
    FilePart,
    check_same_columns,
    is_compressed,
    is_json_lines,
    plain_name,
    refuse_unreadable,
)
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

SUFFIXES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "txt"}
_SMALL = 4 << 20  # bytes of files whose rows are held in memory
_CHUNKS_A_PART = 1_000_000  # at most
_ROWS, _BYTES = 4096, 16 << 20  # of parquet that are read at a time
_Chunk = tuple["pa.Schema", "pa.Table | Path"]  # rows of one schema: a table, or the Arrow file with them


def kind_of(path: Path) -> str:
    """The format of a file by its suffix, which a compression may follow: json, csv, parquet or txt."""
    kind = SUFFIXES.get(plain_name(path).suffix.lower())
    if kind is None:
        raise InputError(
            f"{path}: unknown suffix {path.suffix!r}; give a {', '.join(SUFFIXES)} file, which may be "
            f"compressed ({', '.join(COMPRESSED)}), a folder or a hub name"
        )
    return kind


def kind_of_all(files: Sequence[Path], name: object) -> str:
    """The one format of some ordinary files."""
    kinds = {kind_of(file): file for file in files}
    if len(kinds) > 1:
        names = ", ".join(file.name for file in kinds.values())
        raise InputError(f"{name}: files of several formats ({names}); keep one format a folder")
    for file in files:
        if not file.is_file():  # reading a device or a pipe may never end
            raise InputError(f"{file}: not an ordinary file; write its content to one")
    return next(iter(kinds))


def read_files(files: Sequence[Path], num_proc: int | None = None) -> datasets.Dataset:
    """Read files of one format and with the same columns; `num_proc` processes share out large ones."""
    import datasets

    from unsloth_pack.data.lossless_json import read_exactly

    kind = kind_of_all(files, files[0].parent)
    if sum(file.stat().st_size for file in files) <= _SMALL:
        with refuse_unreadable(files[0]):
            return read_exactly(datasets.Dataset(_read(files, kind, None, 1)))
    key = []
    for file in files:
        with refuse_unreadable(file):
            key.append([plain_name(file).suffix.lower(), is_compressed(file), digest(file)])

    def write(folder: Path) -> Notes:
        _read(files, kind, folder, num_proc)
        return {}

    with refuse_unreadable(files[0]):
        return read_exactly(open_cached(from_cache("rows", key, write)[0]))


def _read(
    files: Sequence[Path],
    kind: str,
    folder: Path | None,
    num_proc: int | None,
    schema: pa.Schema | None = None,
) -> pa.Table | None:
    """The rows of the files, or None if they were written into `folder`."""
    from unsloth_pack.data.lossless_json import joined_schema

    schema = parquet_schema(files) if kind == "parquet" else schema
    parts = [part for file in files for part in _parts_of(file, kind)]
    work = partial(_read_part, kind=kind, schema=schema, folder=folder)
    chunks_of: dict[Path, list[_Chunk]] = {file: [] for file in files}
    for part, chunks in zip(parts, in_order(work, list(enumerate(parts)), num_proc), strict=True):
        chunks_of[part.path] += chunks
    if empty := [file for file, chunks in chunks_of.items() if not chunks]:
        raise InputError(f"{empty[0]}: 0 rows; give a file with at least one")
    every = [chunk for chunks in chunks_of.values() for chunk in chunks]
    if schema is None:
        schemas = [joined_schema([of_chunk for of_chunk, _ in chunks]) for chunks in chunks_of.values()]
        check_same_columns(files, [each.names for each in schemas])
        schema = joined_schema(schemas)
        if any(of_chunk != schema for of_chunk, _ in every):  # once more, with types that hold all rows
            for path in folder.iterdir() if folder else ():
                path.unlink()
            return _read(files, kind, folder, num_proc, schema)
    return None if folder else pa.concat_tables(rows for _, rows in every)


def _parts_of(path: Path, kind: str) -> list[FilePart]:
    """The parts that can be read apart: lines of JSON can, any other file is one part."""
    if is_compressed(path) or kind == "parquet":
        return [FilePart(path, 0, sys.maxsize)]
    size = path.stat().st_size
    starts = [0]
    if kind == "json" and size > PART:
        with refuse_unreadable(path), path.open("rb") as file:
            for goal in range(PART, size, PART) if is_json_lines(path) else ():
                if goal > starts[-1]:
                    file.seek(goal)
                    file.readline()
                    starts.append(file.tell())
    ends = [*starts[1:], size]
    return [FilePart(path, start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _read_part(
    task: tuple[int, FilePart], kind: str, schema: pa.Schema | None, folder: Path | None
) -> list[_Chunk]:
    number, part = task
    if kind == "parquet":
        tables = read_parquet(part.path, cast("pa.Schema", schema))
    else:
        tables = _text_tables(part, kind, schema)
    chunks: list[_Chunk] = []
    for of_chunk, same in groupby(tables, lambda table: table.schema):
        if folder is None:
            chunks.append((of_chunk, pa.concat_tables(same)))
            continue
        path = folder / f"{number * _CHUNKS_A_PART + len(chunks)}.arrow"
        write_tables(path, same)
        chunks.append((of_chunk, path))
    return chunks


def _text_tables(part: FilePart, kind: str, schema: pa.Schema | None) -> Iterator[pa.Table]:
    from unsloth_pack.data.lossless_json import exact_table

    with refuse_unreadable(part.path):
        for rows in TEXT_READERS[kind](part):
            yield exact_table(rows, schema)


# Parquet files as Arrow tables, a few thousand rows at a time.


def parquet_schema(files: Sequence[Path]) -> pa.Schema:
    """The types of all files, which have the same columns."""
    import pyarrow.parquet as pq

    schemas = []
    for file in files:
        with refuse_unreadable(file):
            schema = pq.ParquetFile(file).schema_arrow
        if len(set(schema.names)) < len(schema.names):
            raise InputError(f"{file}: a column is repeated in {schema.names}; rename it")
        schemas.append(schema)
    check_same_columns(files, [schema.names for schema in schemas])
    if all(schema == schemas[0] for schema in schemas):
        return schemas[0]
    with refuse_unreadable(files[0].parent):
        return pa.unify_schemas(schemas).with_metadata(schemas[0].metadata)


def read_parquet(file: Path, schema: pa.Schema, first: int = 0) -> Iterator[pa.Table]:
    """The rows of a file from number `first` on, with the types of `schema`."""
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    groups = [parquet.metadata.row_group(group) for group in range(parquet.num_row_groups)]
    a_row = sum(group.total_byte_size for group in groups) // max(1, parquet.metadata.num_rows)
    rows = max(1, min(_ROWS, _BYTES // max(1, a_row)))
    with refuse_unreadable(file):
        for number, group in enumerate(groups):
            if first >= group.num_rows:
                first -= group.num_rows
                continue
            for batch in parquet.iter_batches(rows, row_groups=[number], use_threads=False):
                batch.validate(full=True)
                table = pa.Table.from_batches([batch]).select(schema.names)
                if table.schema != schema:  # a column without values
                    table = table.cast(schema)
                if first < len(table):
                    yield table.slice(first).replace_schema_metadata(schema.metadata)
                first = max(0, first - len(table))

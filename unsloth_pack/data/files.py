"""Reads local files into one `datasets.Dataset`: json, jsonl, csv, parquet, txt. Errors name file and line.

All but parquet may be compressed.

Values stay as they are in the file: no string is parsed into a number, a date or JSON, and no whole number
becomes a fraction. No object of a json file gets another order of keys, or nulls for keys of other rows.

The rows of small files are held in memory, those of large ones in the data set cache.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unsloth_pack.data.cache import Notes, arrow_file, digest, from_cache, in_order, open_cached
from unsloth_pack.data.text_files import (
    COMPRESSED,
    PART,
    TEXT_READERS,
    FilePart,
    check_ordinary,
    check_same_columns,
    is_compressed,
    is_json_lines,
    plain_name,
    refuse_broken,
)
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

SUFFIXES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "txt"}
_SMALL = 4 << 20  # bytes of files whose rows are held in memory
_CHUNKS_A_PART = 1_000_000  # at most
_ROWS, _BYTES = 4096, 16 << 20  # of parquet that are read at a time


def kind_of(path: Path) -> str:
    """The format of a file by its suffix, which a compression may follow: json, csv, parquet or txt."""
    kind = SUFFIXES.get(plain_name(path).suffix.lower())
    if kind is None:
        raise InputError(
            f"{path}: unknown suffix {path.suffix!r}; give a {', '.join(SUFFIXES)} file, which may be "
            f"compressed ({', '.join(COMPRESSED)}), a folder or a hub name"
        )
    if kind == "parquet" and is_compressed(path):
        raise InputError(f"{path}: a compressed parquet file is not read; unpack it")
    return kind


def kind_of_all(files: Sequence[Path], name: object) -> str:
    """The one format of some ordinary files."""
    kinds = {kind_of(file): file for file in files}
    if len(kinds) > 1:
        names = ", ".join(file.name for file in kinds.values())
        raise InputError(f"{name}: files of several formats ({names}); keep one format a folder")
    for file in files:
        check_ordinary(file)
    return next(iter(kinds))


def read_files(files: Sequence[Path], num_proc: int | None = None) -> datasets.Dataset:
    """Read files of one format and with the same columns, in the order given.

    Args:
        num_proc: processes that share out large files; None for as many as there are cores.
    """
    import datasets

    from unsloth_pack.data.lossless_json import read_exactly

    kind = kind_of_all(files, files[0].parent)
    if sum(file.stat().st_size for file in files) <= _SMALL:
        with refuse_types(files[0]):
            return read_exactly(datasets.Dataset(_read(files, kind, None, 1)))
    key = []
    for file in files:
        with refuse_broken(file):
            key.append([plain_name(file).suffix.lower(), is_compressed(file), digest(file)])

    def write(folder: Path) -> Notes:
        _read(files, kind, folder, num_proc)
        return {}

    with refuse_types(files[0]):
        return read_exactly(open_cached(from_cache("rows", key, write)[0]))


@contextmanager
def refuse_types(path: Path) -> Iterator[None]:
    """Inside this context, values that Arrow or `datasets` cannot hold are refused in one line."""
    import pyarrow as pa

    try:
        yield
    except InputError:
        raise
    except (pa.ArrowException, NotImplementedError, ValueError, RecursionError) as error:
        raise _unusable(path, error) from None


def _unusable(file: Path, error: Exception) -> InputError:
    return InputError(
        f"{file}: column types that cannot be used ({error}); write strings, or lists of objects"
    )


class _Chunk(NamedTuple):
    """Rows of one schema: a table, or the Arrow file that they were written to."""

    schema: pa.Schema
    n_rows: int
    rows: pa.Table | Path


def _read(files: Sequence[Path], kind: str, folder: Path | None, num_proc: int | None) -> pa.Table | None:
    """The rows of the files, or None if they were written into `folder`."""
    import pyarrow as pa

    from unsloth_pack.data.lossless_json import joined_schema, with_types

    schema = parquet_schema(files) if kind == "parquet" else None
    parts = [part for file in files for part in _parts_of(file, kind)]
    work = partial(_read_part, kind=kind, schema=schema, folder=folder)
    chunks_of: dict[Path, list[_Chunk]] = {file: [] for file in files}
    for part, chunks in zip(parts, in_order(work, list(enumerate(parts)), num_proc), strict=True):
        chunks_of[part.path] += chunks
    every = [chunk for chunks in chunks_of.values() for chunk in chunks]
    if schema is None:
        for file, chunks in chunks_of.items():
            if not sum(chunk.n_rows for chunk in chunks):
                raise InputError(f"{file}: 0 rows; give a file with at least one")
        schemas = [joined_schema([chunk.schema for chunk in chunks]) for chunks in chunks_of.values()]
        check_same_columns(files, [each.names for each in schemas])
        schema = joined_schema(schemas)
    if folder is None:
        return pa.concat_tables(with_types(chunk.rows, schema) for chunk in every)
    others = [chunk.rows for chunk in every if chunk.schema != schema]
    for _ in in_order(partial(_write_again, schema=schema), others, num_proc):
        pass
    return None


def _parts_of(path: Path, kind: str) -> list[FilePart]:
    """The parts that can be read apart: lines of JSON can, any other file is one part."""
    if is_compressed(path) or kind == "parquet":
        return [FilePart(path, 0, sys.maxsize)]
    size = path.stat().st_size
    starts = [0]
    if kind == "json" and size > PART:
        with refuse_broken(path), path.open("rb") as file:
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
    import pyarrow as pa

    number, part = task
    tables = _text_tables(part, kind)
    if schema is not None:
        tables = chain([pa.Table.from_batches([], schema)], read_parquet(part.path, schema))
    chunks: list[_Chunk] = []
    for of_chunk, same in groupby(tables, lambda table: table.schema):
        if folder is None:
            table = pa.concat_tables(same)
            chunks.append(_Chunk(of_chunk, len(table), table))
            continue
        path, n_rows = folder / f"{number * _CHUNKS_A_PART + len(chunks)}.arrow", 0
        with arrow_file(path, of_chunk) as stream:
            for table in same:
                stream.write_table(table)
                n_rows += len(table)
        chunks.append(_Chunk(of_chunk, n_rows, path))
    return chunks


def _text_tables(part: FilePart, kind: str) -> Iterator[pa.Table]:
    from unsloth_pack.data.lossless_json import exact_table

    with refuse_broken(part.path):
        for rows in TEXT_READERS[kind](part):
            with refuse_types(part.path):
                table = exact_table(rows)
            yield table


def _write_again(path: Path, schema: pa.Schema) -> None:
    """Write an Arrow file anew with other types, which hold the same values."""
    import pyarrow as pa

    from unsloth_pack.data.lossless_json import with_types

    aside = path.with_suffix(".new")
    with (
        pa.OSFile(str(path)) as file,
        pa.ipc.open_stream(file) as stream,
        arrow_file(aside, schema) as written,
    ):
        for batch in stream:
            written.write_table(with_types(pa.Table.from_batches([batch]), schema))
    os.replace(aside, path)


# Parquet files as Arrow tables, a few thousand rows at a time.


def parquet_schema(files: Sequence[Path]) -> pa.Schema:
    """The types that hold the rows of all files, which have the same columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = []
    for file in files:
        with _refuse_incomplete(file):
            schema = pq.ParquetFile(file).schema_arrow
        if len(set(schema.names)) < len(schema.names):
            raise InputError(f"{file}: a column is repeated in {schema.names}; rename it")
        schemas.append(schema)
    check_same_columns(files, [schema.names for schema in schemas])
    if all(schema == schemas[0] for schema in schemas):
        return schemas[0]
    with refuse_types(files[0]):
        joined = pa.unify_schemas(schemas, promote_options="permissive").with_metadata(schemas[0].metadata)
    for file, schema in zip(files, schemas, strict=True):
        for field in schema:
            if _makes_fractions(field.type, joined.field(field.name).type):
                raise InputError(
                    f"{file}: column {field.name!r} holds whole numbers where another file has fractions "
                    f"({field.type}); write both files with the same types"
                )
    return joined


def read_parquet(file: Path, schema: pa.Schema, first: int = 0) -> Iterator[pa.Table]:
    """The rows of a file from number `first` on, with the types of `schema`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    a_row = sum(parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups))
    rows = max(1, min(_ROWS, _BYTES * parquet.metadata.num_rows // max(1, a_row)))
    groups, passed_over = _groups_from(parquet, first)
    with _refuse_incomplete(file):
        for batch in parquet.iter_batches(rows, row_groups=groups, use_threads=False):
            batch.validate(full=True)
            table = pa.Table.from_batches([batch])
            if passed_over:
                table, passed_over = table.slice(passed_over), max(0, passed_over - len(table))
            if table.schema != schema:
                table = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
            yield table.replace_schema_metadata(schema.metadata)


def _groups_from(parquet: pq.ParquetFile, first: int) -> tuple[list[int], int]:
    """The row groups with row `first` and later ones, and how many of their rows come before it."""
    done, groups = 0, range(parquet.num_row_groups)
    for group in groups:
        rows = parquet.metadata.row_group(group).num_rows
        if first < done + rows:
            return list(groups[group:]), first - done
        done += rows
    return [], 0


@contextmanager
def _refuse_incomplete(file: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, NotImplementedError, OSError, UnicodeDecodeError) as error:
        if isinstance(error, NotImplementedError | TypeError):
            raise _unusable(file, error) from None
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(
            f"{file}: not a complete parquet file ({reason}); download or write it again"
        ) from None


def _makes_fractions(before: pa.DataType, after: pa.DataType) -> bool:
    """Whether whole numbers become fractions because another file has fractions in their place."""
    import pyarrow as pa

    if pa.types.is_struct(before) and pa.types.is_struct(after):
        return any(_makes_fractions(field.type, after.field(field.name).type) for field in before)
    if hasattr(before, "value_type") and hasattr(after, "value_type"):  # lists
        return _makes_fractions(before.value_type, after.value_type)
    return pa.types.is_integer(before) and pa.types.is_floating(after)

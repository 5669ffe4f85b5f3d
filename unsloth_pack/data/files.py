"""Reads local files into one `datasets.Dataset`: json, jsonl, csv, parquet, txt. Errors name file and line.

All but parquet may be compressed.

Values stay as they are in the file: no string is parsed into a number, a date or JSON, and no whole number
becomes a fraction. No object of a json file gets another order of keys, or nulls for keys of other rows.

The rows of small files are held in memory, those of large ones in the data set cache.
"""

from __future__ import annotations

import csv
import io
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from unsloth_pack.data.cache import Notes, arrow_file, digest, from_cache, in_order, open_cached
from unsloth_pack.data.compressed import (
    COMPRESSED,
    PART,
    FilePart,
    Row,
    check_ordinary,
    check_same_columns,
    in_parts,
    is_compressed,
    opened_text,
    plain_name,
    read_in_one_line,
)
from unsloth_pack.data.json_files import is_json_lines, read_json
from unsloth_pack.errors import InputError

# Rows of csv and txt files, a few MiB at a time, and which reader each text format has.

_MAX_CSV_FIELD = 2**31 - 1  # the csv module's own limit, 128 KiB, is too short for many documents


def parts_of(path: Path) -> list[FilePart]:
    """The parts that can be read apart: lines of JSON can, any other file is one part."""
    if is_compressed(path):
        return [FilePart(path, 0, sys.maxsize)]
    size = path.stat().st_size
    starts = [0]
    if path.suffix.lower() in (".json", ".jsonl") and size > PART:
        with read_in_one_line(path), path.open("rb") as file:
            for goal in range(PART, size, PART) if is_json_lines(path) else ():
                if goal > starts[-1]:
                    file.seek(goal)
                    file.readline()
                    starts.append(file.tell())
    ends = [*starts[1:], size]
    return [FilePart(path, start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def read_csv(part: FilePart) -> Iterator[list[Row]]:
    """Rows of a comma-separated file with a header line. Every cell is a string; an empty cell is "".

    Raises:
        InputError: a row with more or fewer cells than the header, a repeated column, broken quotes, or a
            zero byte.
    """
    with opened_text(part.path, newline="") as file:
        yield from in_parts(_without_zeros(part.path, _csv_rows(part.path, file)))


def read_txt(part: FilePart, looked_at: int | None = None) -> Iterator[list[Row]]:
    """Documents of a plain text file, as rows with the one column `text`.

    Blank lines separate documents. In a file without blank lines, every line is a document.

    Args:
        looked_at: lines among which a blank one is looked for; None for all.
    """

    def lines() -> Iterator[str]:
        with opened_text(part.path) as file:
            for line in file:
                ends = 2 if line.endswith("\r\n") else line.endswith("\n")
                yield line[: len(line) - ends]

    has_blank_lines = next((True for line in _marked(islice(lines(), looked_at)) if line is None), False)
    documents = _paragraphs(_marked(lines())) if has_blank_lines else lines()
    rows = (({"text": text}, len(text)) for text in documents if text.strip())
    yield from in_parts(_without_zeros(part.path, rows))


def _without_zeros(path: Path, rows: Iterable[tuple[Row, int]]) -> Iterator[tuple[Row, int]]:
    """The rows. A zero byte is refused: it is in UTF-16 but not in text, and the csv module takes it."""
    for number, (row, size) in enumerate(rows):
        if any("\0" in value for value in row.values()):
            raise InputError(f"{path}: row {number} has a zero byte, as in UTF-16; save the file as UTF-8")
        yield row, size


TEXT_READERS: dict[str, Callable[[FilePart], Iterator[list[Row]]]] = {
    "json": read_json,
    "csv": read_csv,
    "txt": read_txt,
}


def _csv_rows(path: Path, file: io.TextIOBase) -> Iterator[tuple[Row, int]]:
    limit = csv.field_size_limit(_MAX_CSV_FIELD)
    reader = csv.reader(file, strict=True)
    try:
        header = next((cells for cells in reader if cells), [])
        if len(set(header)) < len(header):
            raise InputError(f"{path} line {reader.line_num}: a column is repeated in {header}; rename it")
        for cells in reader:
            if not cells:  # a blank line
                continue
            if len(cells) != len(header):
                raise InputError(
                    f"{path} line {reader.line_num}: {len(cells)} cells under {len(header)} columns, "
                    f"{reprlib.repr(cells)}; quote cells that hold commas or line breaks"
                )
            yield dict(zip(header, cells, strict=True)), sum(map(len, cells))
    except csv.Error as error:
        raise InputError(
            f"{path} line {reader.line_num}: not valid CSV ({error}); check its quotes"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _marked(lines: Iterable[str]) -> Iterator[str | None]:
    """The lines, but None for each run of blank lines between others.

    Empty lines at both ends are left out. A line of spaces is not blank if it is the first or the last.
    """
    begun = False
    blank: list[str] = []
    for line in lines:
        if begun and not line.strip():
            blank.append(line)
        elif begun or line:
            if blank:
                yield None
                blank = []
            yield line
            begun = True
    while blank and not blank[-1]:
        blank.pop()
    if len(blank) > 1:
        yield None
    yield from blank[-1:]


def _paragraphs(lines: Iterable[str | None]) -> Iterator[str]:
    paragraph: list[str] = []
    for line in chain(lines, [None]):
        if line is not None:
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []


# Parquet files as Arrow tables, a few thousand rows at a time.

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

_ROWS, _BYTES = 4096, 16 << 20  # read at a time


def parquet_schema(files: Sequence[Path]) -> pa.Schema:
    """The types that hold the rows of all files, which have the same columns.

    Raises:
        InputError: a file is not complete, repeats a column, or holds whole numbers where another has
            fractions; or there are types that do not go together.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = []
    for file in files:
        check_ordinary(file)
        try:
            schema = pq.ParquetFile(file).schema_arrow
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _incomplete(file, error) from None
        if len(set(schema.names)) < len(schema.names):
            raise InputError(f"{file}: a column is repeated in {schema.names}; rename it")
        schemas.append(schema)
    check_same_columns(files, [schema.names for schema in schemas])
    if all(schema == schemas[0] for schema in schemas):
        return schemas[0]
    try:
        joined = pa.unify_schemas(schemas, promote_options="permissive").with_metadata(schemas[0].metadata)
    except (pa.ArrowException, NotImplementedError, ValueError) as error:
        raise unusable(files[0], error) from None
    for file, schema in zip(files, schemas, strict=True):
        for field in schema:
            if _makes_fractions(field.type, joined.field(field.name).type):
                raise InputError(
                    f"{file}: column {field.name!r} holds whole numbers where another file has fractions "
                    f"({field.type}); write both files with the same types"
                )
    return joined


def read_parquet(file: Path, schema: pa.Schema, first: int = 0) -> Iterator[pa.Table]:
    """The rows of a file from number `first` on, with the types of `schema`.

    Raises:
        InputError: the file is not complete, or its types cannot be used.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    a_row = sum(parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups))
    rows = max(1, min(_ROWS, _BYTES * parquet.metadata.num_rows // max(1, a_row)))
    groups, passed_over = _groups_from(parquet, first)
    try:
        for batch in parquet.iter_batches(rows, row_groups=groups, use_threads=False):
            batch.validate(full=True)
            table = pa.Table.from_batches([batch])
            if passed_over:
                table, passed_over = table.slice(passed_over), max(0, passed_over - len(table))
            if table.schema != schema:
                table = pa.concat_tables([schema.empty_table(), table], promote_options="permissive")
            yield table.replace_schema_metadata(schema.metadata)
    except (NotImplementedError, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise unusable(file, error) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _incomplete(file, error) from None


def _groups_from(parquet: pq.ParquetFile, first: int) -> tuple[list[int], int]:
    """The row groups with row `first` and later ones, and how many of their rows come before it."""
    done, groups = 0, range(parquet.num_row_groups)
    for group in groups:
        rows = parquet.metadata.row_group(group).num_rows
        if first < done + rows:
            return list(groups[group:]), first - done
        done += rows
    return [], 0


def unusable(file: Path, error: Exception) -> InputError:
    return InputError(
        f"{file}: column types that cannot be used ({error}); write strings, or lists of objects"
    )


def _incomplete(file: Path, error: Exception) -> InputError:
    reason = str(error).partition("\n")[0].rstrip(".")
    return InputError(f"{file}: not a complete parquet file ({reason}); download or write it again")


def _makes_fractions(before: pa.DataType, after: pa.DataType) -> bool:
    """Whether whole numbers become fractions because another file has fractions in their place."""
    import pyarrow as pa

    if pa.types.is_struct(before) and pa.types.is_struct(after):
        return any(_makes_fractions(field.type, after.field(field.name).type) for field in before)
    if hasattr(before, "value_type") and hasattr(after, "value_type"):  # lists
        return _makes_fractions(before.value_type, after.value_type)
    return pa.types.is_integer(before) and pa.types.is_floating(after)


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

    return exactly(lambda: open_cached(from_cache("rows", key, write)[0]), files)


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

    from unsloth_pack.data.lossless_json import read_exactly

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

    from unsloth_pack.data.lossless_json import joined_schema, with_types

    parts = [part for file in files for part in parts_of(file)]
    work = partial(_text_part, kind=kind, folder=folder)
    chunks_of: dict[Path, list[_Chunk]] = {file: [] for file in files}
    for part, chunks in zip(parts, in_order(work, list(enumerate(parts)), num_proc), strict=True):
        chunks_of[part.path] += chunks
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
    with read_in_one_line(part.path):
        for rows in TEXT_READERS[kind](part):
            table = exact_rows(rows, part.path)
            held: pa.Table | Path = table
            if folder is not None:
                held = folder / f"{number * _CHUNKS_A_PART + len(chunks)}.arrow"
                with arrow_file(held, table.schema) as stream:
                    stream.write_table(table)
            chunks.append(_Chunk(table.schema, len(rows), held))
    return chunks


def exact_rows(rows: list[Row], path: Path) -> pa.Table:
    """Rows of a file as an Arrow table that holds the same values.

    Raises:
        InputError: Arrow cannot hold them.
    """
    import pyarrow as pa

    from unsloth_pack.data.lossless_json import exact_table

    try:
        return exact_table(rows)
    except UnicodeEncodeError as error:
        raise InputError(
            f"{path}: {reprlib.repr(error.object)} is no Unicode text; correct or remove it"
        ) from None
    except (RecursionError, pa.ArrowException):
        raise _too_deep(path) from None


def _too_deep(path: Path) -> InputError:
    return InputError(
        f"{path}: lists or objects nested too deeply to be held; leave out what is not trained on"
    )


def _write_again(path: Path, schema: pa.Schema) -> None:
    """Write an Arrow file anew with other types, which hold the same values."""
    import pyarrow as pa

    from unsloth_pack.data.lossless_json import with_types

    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        table = stream.read_all()
    aside = path.with_suffix(".new")
    with arrow_file(aside, schema) as written:
        written.write_table(with_types(table, schema))
    os.replace(aside, path)

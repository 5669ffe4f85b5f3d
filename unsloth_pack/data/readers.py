"""Reads local files into one `datasets.Dataset`: json, jsonl, csv, parquet, txt. Errors name file and line.

Values stay as they are in the file: no string is parsed into a number, a date or JSON, and no whole number
becomes a fraction. No object of a json file gets another order of keys, or nulls for keys of other rows.
"""

from __future__ import annotations

import csv
import io
import json
import re
import reprlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.formats import KNOWN_COLUMNS
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

Row = dict[str, Any]

SUFFIXES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "txt"}
_MAX_CSV_FIELD = 2**31 - 1  # the csv module's own limit, 128 KiB, is too short for many documents


def read_files(files: Sequence[Path]) -> datasets.Dataset:
    """Read files of one format and with the same columns, in the order given.

    Raises:
        InputError: a suffix is unknown, formats or columns differ between files, or a file is empty or not
            what its suffix says.
    """
    kinds = {_kind(file): file for file in files}
    if len(kinds) > 1:
        names = ", ".join(file.name for file in kinds.values())
        raise InputError(f"{files[0].parent}: files of several formats ({names}); keep one format a folder")
    if "parquet" in kinds:
        return _read_parquet(files)
    (kind,) = kinds
    parts = [_READERS[kind](file) for file in files]
    for file, part in zip(files, parts, strict=True):
        if not part:
            raise InputError(f"{file}: 0 rows; give a file with at least one")
    _check_same_columns(files, [dict.fromkeys(name for row in part for name in row) for part in parts])
    return _to_dataset([row for part in parts for row in part], files)


def read_json(path: Path) -> list[Row]:
    """Rows of a `.json` or `.jsonl` file: a list of objects, one object per line, or an object around a list.

    The content decides which, because people use both suffixes for all of these. An object around a list may
    have other keys too, but only one with a list of objects. An object with a column of a known format is
    itself a row.

    Raises:
        InputError: malformed JSON, or something other than objects.
    """
    text = _read_text(path)
    if _is_json_lines(text, path):
        lines = enumerate(text.split("\n"), start=1)  # not splitlines(): U+2028 may stand inside a string
        numbered = [(number, _parse_json(line, path, number)) for number, line in lines if line.strip()]
        for number, row in numbered:
            if not isinstance(row, dict):
                raise InputError(
                    f"{path} line {number}: expected an object, got {reprlib.repr(row)}; "
                    "write one {...} a line"
                )
        return [row for _, row in numbered]

    document = _parse_json(text, path, 1)
    rows = _unwrap(document, path) if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise InputError(
            f"{path}: expected a list of objects, got {reprlib.repr(rows)}; write [{{...}}, ...]"
        )
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(
                f"{path}: expected a list of objects, got {reprlib.repr(row)} as item {index}; "
                "write [{...}, ...]"
            )
    return rows


def read_csv(path: Path) -> list[Row]:
    """Rows of a comma-separated file with a header line. Every cell is a string; an empty cell is "".

    Raises:
        InputError: a row with more or fewer cells than the header, a repeated column, or broken quotes.
    """
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    limit = csv.field_size_limit(_MAX_CSV_FIELD)
    rows = []
    try:
        header = next(cells for cells in reader if cells)
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
            rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise InputError(
            f"{path} line {reader.line_num}: not valid CSV ({error}); check its quotes"
        ) from None
    finally:
        csv.field_size_limit(limit)
    return rows


def read_txt(path: Path) -> list[Row]:
    """Documents of a plain text file, as rows with the one column `text`.

    Blank lines separate documents. In a file without blank lines, every line is a document.
    """
    text = _read_text(path).replace("\r\n", "\n").strip("\n")
    blank_lines = re.compile(r"\n(?:[^\S\n]*\n)+")
    documents = blank_lines.split(text) if blank_lines.search(text) else text.split("\n")
    return [{"text": document} for document in documents if document.strip()]


_READERS: dict[str, Callable[[Path], list[Row]]] = {"json": read_json, "csv": read_csv, "txt": read_txt}


def _read_parquet(files: Sequence[Path]) -> datasets.Dataset:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    from unsloth_pack.data.exact import read_exactly

    tables = []
    for file in files:
        _check_ordinary(file)
        try:
            table = pq.ParquetFile(file).read()
            table.validate(full=True)
            names = table.column_names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise InputError(
                f"{file}: not a complete parquet file ({reason}); download or write it again"
            ) from None
        if len(set(names)) < len(names):
            raise InputError(f"{file}: a column is repeated in {names}; rename it")
        tables.append(table)
    _check_same_columns(files, [table.column_names for table in tables])
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
        for file, part in zip(files, tables, strict=True):
            _check_numbers_stay(file, part.schema, table.schema)
        return read_exactly(datasets.Dataset(table))
    except (pa.ArrowException, NotImplementedError, ValueError) as error:
        raise InputError(
            f"{files[0]}: column types that cannot be used ({error}); write strings, or lists of objects"
        ) from None


def _check_numbers_stay(file: Path, schema: pa.Schema, joined: pa.Schema) -> None:
    """Refuse whole numbers that became fractions because another file has fractions in their place."""
    for field in schema:
        if _makes_fractions(field.type, joined.field(field.name).type):
            raise InputError(
                f"{file}: column {field.name!r} holds whole numbers where another file has fractions "
                f"({field.type}); write both files with the same types"
            )


def _makes_fractions(before: pa.DataType, after: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(before) and pa.types.is_struct(after):
        return any(_makes_fractions(field.type, after.field(field.name).type) for field in before)
    if hasattr(before, "value_type") and hasattr(after, "value_type"):  # lists
        return _makes_fractions(before.value_type, after.value_type)
    return pa.types.is_integer(before) and pa.types.is_floating(after)


def _kind(path: Path) -> str:
    kind = SUFFIXES.get(path.suffix.lower())
    if kind is None:
        raise InputError(
            f"{path}: unknown suffix {path.suffix!r}; "
            f"give a {', '.join(SUFFIXES)} file, a folder or a hub name"
        )
    return kind


def _check_same_columns(files: Sequence[Path], columns: Sequence[Collection[str]]) -> None:
    if not columns[0]:
        raise InputError(f"{files[0]}: its rows have no columns; give each row its text in a named column")
    for file, names in zip(files, columns, strict=True):
        if set(names) != set(columns[0]):
            raise InputError(
                f"{file}: columns {', '.join(names)} where {files[0].name} has {', '.join(columns[0])}; "
                "keep files of different columns in different folders"
            )


def _check_ordinary(path: Path) -> None:
    """Refuse devices and pipes, because reading them may never end."""
    if not path.is_file():
        raise InputError(f"{path}: not an ordinary file; write its content to one")


def _read_text(path: Path) -> str:
    _check_ordinary(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} line {line}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8; "
            "save the file as UTF-8"
        ) from None
    if (zero := text.find("\0")) >= 0:
        line = text.count("\n", 0, zero) + 1
        raise InputError(
            f"{path} line {line}: a zero byte, as in UTF-16 but not in text; save the file as UTF-8"
        )
    text = text.removeprefix("\ufeff")  # the byte order mark that some editors put first
    if not text.strip():
        raise InputError(f"{path}: the file is empty; give one with at least one row")
    return text


def _is_json_lines(text: str, path: Path) -> bool:
    if text.lstrip().startswith("["):
        return False
    if path.suffix.lower() == ".jsonl":
        return True
    first, _, others = text.strip().partition("\n")
    try:
        return bool(others) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _parse_json(text: str, path: Path, line: int) -> Any:
    """Parse `text`, which starts at this line of the file."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        where = f"{path} line {line + error.lineno - 1}, column {error.colno}"
        near = text[max(0, error.pos - 10) : error.pos + 20]
        raise InputError(
            f"{where}: not valid JSON ({error.msg}) near {near!r}; correct or remove it"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} line {line}: not valid JSON ({error}); correct or remove it") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return row


def _unwrap(document: Row, path: Path) -> list[Row]:
    if KNOWN_COLUMNS & document.keys():
        return [document]
    lists = [
        key
        for key, value in document.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
    ]
    if len(lists) != 1:
        raise InputError(
            f"{path}: an object in which {len(lists)} of the keys {reprlib.repr(list(document))} hold a list "
            "of objects; write a list of objects, or an object with one such list"
        )
    return document[lists[0]]


def _to_dataset(rows: list[Row], files: Sequence[Path]) -> datasets.Dataset:
    import pyarrow as pa

    from unsloth_pack.data.exact import to_dataset

    try:
        return to_dataset(rows)
    except (RecursionError, pa.ArrowException):
        raise InputError(
            f"{files[0]}: lists or objects nested too deeply to be held; leave out what is not trained on"
        ) from None
    except UnicodeEncodeError:
        index, name = next(
            (index, name)
            for index, row in enumerate(rows)
            for name in row
            if not _is_unicode((name, row[name]))
        )
        raise InputError(
            f"{files[0]}: row {index}, column {name!r}: half of a surrogate pair, which is no character, in "
            f"{reprlib.repr(rows[index][name])}; write the whole character or remove it"
        ) from None


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True

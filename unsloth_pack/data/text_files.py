"""Rows of json, csv and txt files, which may be compressed: some MiB at a time, with values as they stand."""

from __future__ import annotations

import codecs
import csv
import io
import json
import lzma
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from unsloth_pack.errors import InputError

Row = dict[str, Any]
PART = 16 << 20  # bytes of a file whose rows are in memory at a time
_BLOCK = 1 << 20  # bytes read at a time
_LINES = 10_000  # of a txt file, among which a blank one is looked for
_ROWS_AT_A_TIME = 1000  # of a JSON list, a csv or a txt file that become one table
_OF_VALUES = (EOFError, NotImplementedError, ValueError, RecursionError)
_MAX_CSV_FIELD = 2**31 - 1  # the csv module's own limit, 128 KiB, is too short for many documents


COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bz2"}  # by suffix, as Arrow calls it


@dataclass(frozen=True)
class FilePart:
    """Bytes of a file's content, from the begin of a line to the end of one, that one process reads."""

    path: Path
    start: int
    end: int


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


def plain_name(path: Path) -> Path:
    """The name without the suffix of a compression: rows.jsonl for rows.jsonl.gz."""
    return path.with_suffix("") if is_compressed(path) else path


def open_bytes(path: Path) -> IO[bytes]:
    """The content of a file, unpacked as it is read."""
    match COMPRESSED.get(path.suffix.lower()):
        case None:
            return path.open("rb")
        case "xz":  # which Arrow does not read
            return lzma.open(path)
        case compression:
            return cast("IO[bytes]", io.BufferedReader(pa.input_stream(str(path), compression), _BLOCK))


def open_text(path: Path, newline: str = "\n") -> io.TextIOWrapper:
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline=newline)


@contextmanager
def refuse_unreadable(path: Path) -> Iterator[None]:
    """Inside this context, a file that is cut, broken or no text, or has unknown types, is refused."""
    try:
        yield
    except InputError:
        raise
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise InputError(f"{path}: byte 0x{bad:02x} is not UTF-8; save the file as UTF-8") from None
    except (pa.ArrowException, lzma.LZMAError, OSError, *_OF_VALUES) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
        raise InputError(
            f"{path}: cannot be read ({reason}); check its permissions, and that it is a whole {path.suffix} "
            "file of strings, numbers, lists and objects"
        ) from None


def check_same_columns(files: Sequence[Path], columns: Sequence[Collection[str]]) -> None:
    """Refuse files of which one has other columns than the first."""
    for file, names in zip(files, columns, strict=True):
        if set(names) != set(columns[0]):
            raise InputError(
                f"{file}: columns {', '.join(names)} where {files[0].name} has {', '.join(columns[0])}; "
                "keep files of different columns in different folders"
            )


# JSON: a list of objects, or one object a line.


def read_json(part: FilePart) -> Iterator[list[Row]]:
    """Rows of a `.json` or `.jsonl` file: one object a line, or a list, which is parsed as a whole."""
    path = part.path
    if is_json_lines(path):
        for block, lines in line_blocks(part, PART):
            yield rows_of_lines(block, lines)
        return
    with open_text(path) as file:
        text = file.read()
    rows = parse_json(text, path, 1) if text.strip() else []
    if wrong := [row for row in (rows if isinstance(rows, list) else [[rows]]) if not isinstance(row, dict)]:
        shown = reprlib.repr(wrong[0])
        raise InputError(f"{path}: expected a list of objects, got {shown}; write [{{...}}, ...]")
    yield from (rows[start : start + _ROWS_AT_A_TIME] for start in range(0, len(rows), _ROWS_AT_A_TIME))


def is_json_lines(path: Path) -> bool:
    """Whether a JSON file has one object a line, as its content tells: people use both suffixes for both."""
    with open_text(path) as file:
        return not next((line for line in file if line.strip()), "").lstrip().startswith("[")


def line_blocks(part: FilePart, size: int) -> Iterator[tuple[FilePart, list[tuple[int, bytes]]]]:
    """The part in blocks of about `size` bytes; of each the lines that are not blank, with their numbers."""
    with open_bytes(part.path) as file:
        skip(file, part.path, part.start)
        at = part.start
        while at < part.end and (data := file.read(min(size, part.end - at))):
            if at + len(data) < part.end:
                data += file.readline()
            block = FilePart(part.path, at, at + len(data))
            lines = (data if at else data.removeprefix(codecs.BOM_UTF8)).split(b"\n")
            yield block, [(number, line) for number, line in enumerate(lines) if line.strip()]
            at = block.end


def rows_of_lines(block: FilePart, lines: Iterable[tuple[int, bytes]]) -> list[Row]:
    """Numbered lines of a block as rows. An error names the number of a line in the file."""
    rows = []
    for number, line in lines:
        try:
            row = _decode(line.decode())
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            _refuse_line(block, number, line)
        rows.append(row)
    return rows


def _refuse_line(block: FilePart, number: int, line: bytes) -> None:
    with open_bytes(block.path) as file:
        before, size = 0, block.start
        while size and (data := file.read(min(_BLOCK, size))):
            before, size = before + data.count(b"\n"), size - len(data)
    number += before + 1
    row = parse_json(line.decode(), block.path, number)
    raise InputError(
        f"{block.path} line {number}: expected an object, got {reprlib.repr(row)}; write one {{...}} a line"
    )


def parse_json(text: str, path: Path, line: int) -> Any:
    """Parse `text`, which starts at this line of the file."""
    try:
        return _decode(text)
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


def _refuse_repeats(pairs: list[tuple[str, object]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return row


_decode = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats).decode


def skip(file: IO[bytes], path: Path, size: int) -> None:
    """Pass over the first `size` bytes of the content, which has to have a line that ends there."""
    if not size:
        return
    last = b""
    if not is_compressed(path):
        file.seek(size - 1)
        last = file.read(1)
    else:
        while size and (last := file.read(min(_BLOCK, size))):
            size -= len(last)
    if (not last.endswith(b"\n") and file.read(1)) or not last:
        raise InputError(f"{path}: has changed since it was read last; give the same data, or start anew")


# csv and txt.


def read_csv(part: FilePart) -> Iterator[list[Row]]:
    """Rows of a comma-separated file with a header line. Every cell is a string; an empty cell is ""."""
    with open_text(part.path, newline="") as file:
        yield from _in_parts(part.path, _csv_rows(part.path, file))


def _csv_rows(path: Path, file: io.TextIOBase) -> Iterator[Row]:
    csv.field_size_limit(_MAX_CSV_FIELD)
    reader = csv.reader(file, strict=True)
    try:
        header = next((cells for cells in reader if cells), [])
        if len(set(header)) < len(header):
            raise InputError(f"{path} line {reader.line_num}: a column is repeated in {header}; rename it")
        for cells in reader:
            if cells and len(cells) != len(header):
                raise InputError(
                    f"{path} line {reader.line_num}: {len(cells)} cells under {len(header)} columns, "
                    f"{reprlib.repr(cells)}; quote cells that hold commas or line breaks"
                )
            if cells:
                yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise InputError(
            f"{path} line {reader.line_num}: not valid CSV ({error}); check its quotes"
        ) from None


def read_txt(part: FilePart) -> Iterator[list[Row]]:
    """Documents of a plain text file, as rows with the one column `text`.

    Blank lines separate documents. In a file without blank lines among the first ones, every line is one.
    """

    def lines() -> Iterator[str]:
        with open_text(part.path) as file:
            for line in file:
                ends = 2 if line.endswith("\r\n") else line.endswith("\n")
                yield line[: len(line) - ends]

    def has_text(line: str) -> bool:
        return bool(line.strip())

    paragraphs = sum(is_text for is_text, _ in groupby(islice(lines(), _LINES), has_text))
    documents: Iterator[str] = filter(has_text, lines())
    if paragraphs > 1:
        documents = ("\n".join(group) for is_text, group in groupby(lines(), has_text) if is_text)
    yield from _in_parts(part.path, ({"text": text} for text in documents))


def _in_parts(path: Path, rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Lists of some rows of strings. A zero byte is refused: it is in UTF-16 but not in text."""
    while part := list(islice(rows, _ROWS_AT_A_TIME)):
        if any("\0" in value for row in part for value in row.values()):
            raise InputError(f"{path}: a zero byte, as in UTF-16; save the file as UTF-8")
        yield part


TEXT_READERS: dict[str, Callable[[FilePart], Iterator[list[Row]]]] = {
    "json": read_json,
    "csv": read_csv,
    "txt": read_txt,
}

"""Rows of json, jsonl, csv and txt files, a few MiB at a time, so that a file of any size can be read."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from unsloth_pack.data.compressed import opened, opened_text, plain_name
from unsloth_pack.data.formats import KNOWN_COLUMNS
from unsloth_pack.errors import InputError

Row = dict[str, Any]

PART = 16 << 20  # bytes of a file whose rows are held at a time
_BLOCK = 4 << 20  # bytes read at a time
_MAX_CSV_FIELD = 2**31 - 1  # the csv module's own limit, 128 KiB, is too short for many documents


@dataclass(frozen=True)
class FilePart:
    """What one process reads at a time.

    Args:
        path: of the file.
        start, end: bytes of it, from the begin of a line to the end of one.
    """

    path: Path
    start: int
    end: int


def parts_of(path: Path) -> list[FilePart]:
    """The parts that can be read apart: lines of JSON can, any other file is one part."""
    size = path.stat().st_size
    starts = [0]
    if path.suffix.lower() in (".json", ".jsonl") and size > PART and is_json_lines(path):
        with path.open("rb") as file:
            for goal in range(PART, size, PART):
                if goal > starts[-1]:
                    file.seek(goal)
                    file.readline()
                    starts.append(file.tell())
    ends = [*starts[1:], size]
    return [FilePart(path, start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def read_json(part: FilePart) -> Iterator[list[Row]]:
    """Rows of a `.json` or `.jsonl` file: a list of objects, one object per line, or an object around a list.

    The content decides which, because people use both suffixes for all of these. An object around a list may
    have other keys too, but only one with a list of objects. An object with a column of a known format is
    itself a row. A file of this last kind is parsed as a whole.

    Raises:
        InputError: malformed JSON, or something other than objects.
    """
    path = part.path
    if is_json_lines(path):
        yield from _json_lines(part)
        return
    if _first_letter(path) == "[":
        yield from _in_parts(_checked_items(path, _list_items(path)))
        return
    document = parse_json(_whole(path), path, 1)
    rows = _unwrap(document, path) if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise InputError(
            f"{path}: expected a list of objects, got {reprlib.repr(rows)}; write [{{...}}, ...]"
        )
    yield [row for row, _ in _checked_items(path, ((row, 0) for row in rows))]


def read_csv(part: FilePart) -> Iterator[list[Row]]:
    """Rows of a comma-separated file with a header line. Every cell is a string; an empty cell is "".

    Raises:
        InputError: a row with more or fewer cells than the header, a repeated column, or broken quotes.
    """
    with opened_text(part.path, newline="") as file:
        yield from _in_parts(_csv_rows(part.path, file))


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
    yield from _in_parts(({"text": text}, len(text)) for text in documents if text.strip())


TEXT_READERS: dict[str, Callable[[FilePart], Iterator[list[Row]]]] = {
    "json": read_json,
    "csv": read_csv,
    "txt": read_txt,
}


def check_ordinary(path: Path) -> None:
    """Refuse devices and pipes, because reading them may never end."""
    if not path.is_file():
        raise InputError(f"{path}: not an ordinary file; write its content to one")


def check_same_columns(files: Sequence[Path], columns: Sequence[Collection[str]]) -> None:
    """Refuse rows without columns, and files of which one has other columns than the first."""
    if not columns[0]:
        raise InputError(f"{files[0]}: its rows have no columns; give each row its text in a named column")
    for file, names in zip(files, columns, strict=True):
        if set(names) != set(columns[0]):
            raise InputError(
                f"{file}: columns {', '.join(names)} where {files[0].name} has {', '.join(columns[0])}; "
                "keep files of different columns in different folders"
            )


def check_text(path: Path) -> None:
    """Refuse a file that cannot be read, is not UTF-8, holds zero bytes or nothing.

    Raises:
        InputError: names the line.
    """
    check_ordinary(path)
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, lines, is_blank = 0, 1, True
    try:
        with path.open("rb") as file:
            while True:
                data = file.read(_BLOCK)
                waiting = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    bad, place = error.object[error.start], offset - waiting + error.start
                    line = lines + error.object.count(b"\n", 0, error.start)
                    raise InputError(
                        f"{path} line {line}: byte 0x{bad:02x} at offset {place} is not UTF-8; "
                        "save the file as UTF-8"
                    ) from None
                if (zero := text.find("\0")) >= 0:
                    raise InputError(
                        f"{path} line {lines + text.count(chr(10), 0, zero)}: a zero byte, as in UTF-16 but "
                        "not in text; save the file as UTF-8"
                    )
                if not data:
                    break
                is_blank = is_blank and not (text if offset else text.removeprefix("\ufeff")).strip()
                offset, lines = offset + len(data), lines + text.count("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if is_blank:
        raise InputError(f"{path}: the file is empty; give one with at least one row")


def parse_json(text: str, path: Path, line: int) -> Any:
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


def _in_parts(rows: Iterable[tuple[Row, int]]) -> Iterator[list[Row]]:
    """Lists of rows, each of some MiB of text; a row comes with its size."""
    held: list[Row] = []
    size = 0
    for row, length in rows:
        held.append(row)
        size += length
        if size >= PART:
            yield held
            held, size = [], 0
    if held:
        yield held


def _json_lines(part: FilePart) -> Iterator[list[Row]]:
    with part.path.open("rb") as file:
        file.seek(part.start)
        text = file.read(part.end - part.start).decode("utf-8" if part.start else "utf-8-sig")
    # not splitlines(): U+2028 may stand inside a string
    yield rows_of_lines(enumerate(text.split("\n")), part)


def rows_of_lines(lines: Iterable[tuple[int, str]], part: FilePart) -> list[Row]:
    """Lines of JSON as rows. A line comes with its number in the part, from 0; blank ones are no rows.

    Raises:
        InputError: a line is no object; names its number in the file.
    """
    rows = []
    for number, line in lines:
        if line.strip():
            try:
                row = parse_json(line, part.path, 1)
                if not isinstance(row, dict):
                    raise InputError("expected an object")
            except InputError:
                _refuse_line(line, part, number)
            rows.append(row)
    return rows


def line_in_file(part: FilePart, number: int) -> int:
    """The number in the file, from 1, of a line of a part."""
    with opened(part.path) as file:
        return 1 + number + sum(data.count(b"\n") for data in _blocks(file, part.start))


def _refuse_line(line: str, part: FilePart, number: int) -> None:
    """Raise the error of a line, with its number in the file."""
    number = line_in_file(part, number)
    row = parse_json(line, part.path, number)
    raise InputError(
        f"{part.path} line {number}: expected an object, got {reprlib.repr(row)}; write one {{...}} a line"
    )


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    while size and (data := file.read(min(_BLOCK, size))):
        size -= len(data)
        yield data


def is_json_lines(path: Path) -> bool:
    """Whether a JSON file has one object a line, as its content tells."""
    if _first_letter(path) == "[":
        return False
    if plain_name(path).suffix.lower() == ".jsonl":
        return True
    with opened_text(path) as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines, ""), next(lines, "")
    try:
        return bool(second) and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _first_letter(path: Path) -> str:
    with opened_text(path) as file:
        while text := file.read(_BLOCK):
            if text := text.lstrip():
                return text[0]
    return ""


def _whole(path: Path) -> str:
    with opened_text(path) as file:
        return file.read()


def _list_items(path: Path) -> Iterator[tuple[Any, int]]:
    """The items of a JSON list with their lengths, parsed one by one as the file is read."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    blank = re.compile(r"[ \t\n\r]*")
    with opened_text(path, newline="") as file:
        text, size = file.read(_BLOCK), _BLOCK
        at = blank.match(text).end() + 1  # type: ignore[union-attr]
        is_first = True
        while True:
            try:
                begin = blank.match(text, at).end()  # type: ignore[union-attr]
                if not is_first and text[begin] == ",":
                    begin = blank.match(text, begin + 1).end()  # type: ignore[union-attr]
                elif is_first and text[begin] != "]":
                    pass
                elif text[begin] == "]" and not (text[begin + 1 :] + file.read()).strip(" \t\n\r"):
                    return
                else:
                    break
                item, end = decoder.raw_decode(text, begin)
                if end == len(text):  # a number may go on
                    raise IndexError
            except (ValueError, IndexError, RecursionError):
                more = file.read(size)
                if not more:
                    break
                text, at, size = text[at:] + more, 0, 2 * size
                continue
            yield item, end - begin
            at, is_first = end, False
            if at > _BLOCK:
                text, at, size = text[at:], 0, _BLOCK
    parse_json(_whole(path), path, 1)  # has the place of the error
    raise InputError(f"{path}: not valid JSON; correct it")


def _checked_items(path: Path, items: Iterable[tuple[Any, int]]) -> Iterator[tuple[Row, int]]:
    for index, (row, size) in enumerate(items):
        if not isinstance(row, dict):
            raise InputError(
                f"{path}: expected a list of objects, got {reprlib.repr(row)} as item {index}; "
                "write [{...}, ...]"
            )
        yield row, size


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

"""Rows of csv and txt files, a few MiB at a time, and which reader each text format has."""

from __future__ import annotations

import csv
import io
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from unsloth_pack.data.compressed import is_compressed, opened_text
from unsloth_pack.data.file_parts import PART, FilePart, Row, in_parts
from unsloth_pack.data.json_files import is_json_lines, read_json
from unsloth_pack.errors import InputError

_MAX_CSV_FIELD = 2**31 - 1  # the csv module's own limit, 128 KiB, is too short for many documents


def parts_of(path: Path) -> list[FilePart]:
    """The parts that can be read apart: lines of JSON can, any other file is one part."""
    if is_compressed(path):
        return [FilePart(path, 0, sys.maxsize)]
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


def read_csv(part: FilePart) -> Iterator[list[Row]]:
    """Rows of a comma-separated file with a header line. Every cell is a string; an empty cell is "".

    Raises:
        InputError: a row with more or fewer cells than the header, a repeated column, or broken quotes.
    """
    with opened_text(part.path, newline="") as file:
        yield from in_parts(_csv_rows(part.path, file))


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
    yield from in_parts(({"text": text}, len(text)) for text in documents if text.strip())


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

"""Parts of text files that are read at a time, and what is refused about a file of any format."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_pack.data.compressed import opened, read_in_one_line
from unsloth_pack.errors import InputError

Row = dict[str, Any]

PART = 16 << 20  # bytes of a file whose rows are held at a time
BLOCK = 4 << 20  # bytes read at a time


@dataclass(frozen=True)
class FilePart:
    """What one process reads at a time.

    Args:
        path: of the file.
        start, end: bytes of its content, from the begin of a line to the end of one. A compressed file is one
            part without an end.
    """

    path: Path
    start: int
    end: int


def in_parts(rows: Iterable[tuple[Row, int]]) -> Iterator[list[Row]]:
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
    with read_in_one_line(path), opened(path) as file:
        while True:
            data = file.read(BLOCK)
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
    if is_blank:
        raise InputError(f"{path}: the file is empty; give one with at least one row")

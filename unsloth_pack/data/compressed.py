"""Files that may be compressed, read from begin to end; what a cut or broken one holds is refused."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from unsloth_pack.errors import InputError

_BLOCK = 1 << 20  # bytes read at a time


def _open_zst(path: Path) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")


_OPEN: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".zst": _open_zst,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
COMPRESSED = tuple(_OPEN)


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in _OPEN


def plain_name(path: Path) -> Path:
    """The name without the suffix of a compression: rows.jsonl for rows.jsonl.gz."""
    return path.with_suffix("") if is_compressed(path) else path


def opened(path: Path) -> IO[bytes]:
    """The content of a file, unpacked as it is read."""
    open_compressed = _OPEN.get(path.suffix.lower())
    if open_compressed is None:
        return path.open("rb")
    return cast("IO[bytes]", io.BufferedReader(open_compressed(path), _BLOCK))


def opened_text(path: Path, newline: str = "\n") -> io.TextIOWrapper:
    """The text of a file, unpacked as it is read."""
    return io.TextIOWrapper(opened(path), encoding="utf-8-sig", newline=newline)


@contextmanager
def read_in_one_line(path: Path) -> Iterator[None]:
    """Inside this context, a file that is cut, broken or no text is refused in one line.

    Raises:
        InputError: names the file.
    """
    import pyarrow as pa

    try:
        yield
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise InputError(f"{path}: byte 0x{bad:02x} is not UTF-8; save the file as UTF-8") from None
    except (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, OSError) as error:
        if not is_compressed(path):
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"{path}: cannot be read ({reason}); check its permissions") from None
        raise InputError(
            f"{path}: not a whole {path.suffix} file ({' '.join(str(error).split())}); download or compress "
            "it again"
        ) from None


def skip(file: IO[bytes], path: Path, size: int) -> None:
    """Pass over the first `size` bytes of the content, up to the end of a line.

    Raises:
        InputError: the content is shorter, or no line ends there.
    """
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


# Parts of text files that are read at a time, and what is refused about a file of any format.

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

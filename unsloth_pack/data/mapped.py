"""Reads a data set from end to end, and gives back the memory of mapped files that have been read."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_HELD = 64 << 20  # bytes that may have been read since memory was given back


def scan(dataset: datasets.Dataset, columns: list[str], batch_size: int) -> Iterator[pa.Table]:
    """These columns of all rows as Arrow tables, a batch at a time; what has been read does not pile up."""
    held = 0
    for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=batch_size):
        yield table
        held += table.nbytes
        if held > _HELD:
            release(dataset)
            held = 0


def release(dataset: datasets.Dataset) -> None:
    """Give back what this process holds of the data set's files. A later read takes it from the files again.

    Elsewhere than on Linux it does nothing: the system takes the memory back when it runs short.
    """
    give_back(mappings(dataset))


def mappings(dataset: datasets.Dataset) -> list[tuple[int, int]]:
    """`(address, bytes)` at which this process has mapped the data set's files; none elsewhere than on Linux.

    They hold while the data set lives.
    """
    files = {os.path.realpath(file["filename"]) for file in dataset.cache_files}
    if not files or not sys.platform.startswith("linux"):
        return []
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, rights, *rest = line.rstrip("\n").split(maxsplit=5)
            if rest[-1] in files and "w" not in rights:  # it holds what the file holds, and nothing else
                first, end = (int(address, 16) for address in addresses.split("-"))
                found.append((first, end - first))
    return found


def give_back(mapped: list[tuple[int, int]]) -> None:
    """Give back what this process holds of mapped files.

    Args:
        mapped: as `mappings` finds them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for address, n_bytes in mapped:
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), mmap.MADV_DONTNEED)

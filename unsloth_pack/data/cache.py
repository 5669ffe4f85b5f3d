"""Prepared data in the data set cache: folders that are complete or absent, named by all that they depend on.

<HF_DATASETS_CACHE>/unsloth_pack/
  documents-1f2e3d.../         complete
    0.arrow, 1.arrow, ...        in the order of their numbers
    notes.json                 what was found out while they were made, and the size of each file
  documents-1f2e3d....lock     held by the process that prepares, which others wait for
  documents-1f2e3d....aside/   what it has made until now, or what a killed process left
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from filelock import FileLock

from unsloth_pack.errors import InputError, RunStopped
from unsloth_pack.forked import children_end_with_this_process

if TYPE_CHECKING:
    import datasets

_VERSION = 4  # raise it when what is kept changes for the same key
_NOTES = "notes.json"
Notes = dict[str, Any]


def from_cache(kind: str, key: Sequence[object] | None, make: Callable[[Path], Notes]) -> tuple[Path, Notes]:
    """A folder of the cache, which `make` fills if it is not there.

    Args:
        kind: the first word of its name.
        key: all that the content depends on, as JSON has it. If None, or if caching is switched off, the
            folder serves this process alone and is removed when it ends.
        make: writes Arrow files into an empty folder; returns notes, as JSON has them.
    """
    import datasets
    from datasets.fingerprint import get_temporary_cache_files_directory

    import unsloth_pack

    try:
        if key is None or not datasets.is_caching_enabled():
            folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=get_temporary_cache_files_directory()))
            return folder, make(folder)
        whole_key = json.dumps([unsloth_pack.__version__, _VERSION, *key])
        name = f"{kind}-{hashlib.sha256(whole_key.encode()).hexdigest()[:32]}"
        target = _cache() / name
        if (notes := _notes_of(target)) is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_name(f"{name}.lock")):
                if (notes := _notes_of(target)) is None:  # no other process has made it meanwhile
                    notes = _fill(target, make)
        return target, notes
    except OSError as error:
        raise InputError(
            f"the data set cache in {datasets.config.HF_DATASETS_CACHE} cannot be used "
            f"({error.strerror or error}); free some space, or set HF_DATASETS_CACHE to another folder"
        ) from error


def is_cached(file: Path) -> bool:
    """Whether a file lies in a folder of the cache, whose name tells all about it."""
    return file.parent.parent == _cache()


def digest(file: Path) -> str:
    """SHA-256 of a file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def open_cached(folder: Path) -> datasets.Dataset:
    """All Arrow files of a folder as one data set, memory-mapped."""
    import datasets
    from datasets.table import MemoryMappedTable, concat_tables

    paths = sorted(folder.glob("*.arrow"), key=lambda path: int(path.stem))
    tables = [MemoryMappedTable.from_file(str(path)) for path in paths]
    return datasets.Dataset(concat_tables(tables), fingerprint=folder.name)


def write_tables(path: Path, tables: Iterator[pa.Table]) -> None:
    """Write tables of one schema, at least one, into a new Arrow file, through to the disk."""
    first = next(tables)
    with path.open("wb") as file:
        with pa.ipc.new_stream(file, first.schema) as stream:
            for table in chain([first], tables):
                stream.write_table(table)
        file.flush()
        os.fsync(file.fileno())


def _fill(target: Path, make: Callable[[Path], Notes]) -> Notes:
    aside = target.with_name(f"{target.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed: nobody else holds the lock
    shutil.rmtree(target, ignore_errors=True)  # not complete, as somebody removed files from it
    aside.mkdir()
    try:
        notes = make(aside)
        sizes = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
        (aside / _NOTES).write_text(json.dumps({"notes": notes, "sizes": sizes}), encoding="utf-8")
        os.replace(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return notes


def _notes_of(folder: Path) -> Notes | None:
    """The notes of a folder, or None if it is not complete."""
    try:
        content = json.loads((folder / _NOTES).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in content["sizes"]}
    except (OSError, ValueError, LookupError):
        return None
    return content["notes"] if sizes == content["sizes"] else None


def _cache() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "unsloth_pack"


# Read a data set from end to end, and give back the memory of mapped files that have been read.

_MOST_READ = 64 << 20  # bytes that may have been read since memory was given back


def scan(dataset: datasets.Dataset, columns: list[str], batch_size: int) -> Iterator[pa.Table]:
    """These columns of all rows as Arrow tables, a batch at a time; what has been read does not pile up."""
    n_bytes = 0
    for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=batch_size):
        yield table
        n_bytes += table.nbytes
        if n_bytes > _MOST_READ:
            give_back(memory_maps(dataset))
            n_bytes = 0


def memory_maps(dataset: datasets.Dataset) -> list[tuple[int, int]]:
    """`(address, bytes)` at which this process has mapped the data set's files; none if this is not Linux."""
    files = {os.path.realpath(file["filename"]) for file in dataset.cache_files}
    if not files or not sys.platform.startswith("linux"):
        return []
    mapped = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, rights, *rest = line.rstrip("\n").split(maxsplit=5)
            if rest[-1] in files and "w" not in rights:  # it holds what the file holds, and nothing else
                first, end = (int(address, 16) for address in addresses.split("-"))
                mapped.append((first, end - first))
    return mapped


def give_back(mapped: list[tuple[int, int]]) -> None:
    """Give back the memory of mapped files, see `memory_maps`. A later read takes it from the files again."""
    libc = ctypes.CDLL(None, use_errno=True)
    for address, n_bytes in mapped:
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), mmap.MADV_DONTNEED)


# Work on the rows of a data set, cut into spans, over several processes.

Task = TypeVar("Task")
Result = TypeVar("Result")

# A span is written into one file. A data set of more spans than these has longer ones.
_ROWS, _BYTES, _SPANS = 1024, 1 << 20, 256

_work: Callable[[Any], Any] | None = None  # of this process, if it is a worker


def spans_of(n_rows: int, n_bytes: int) -> list[tuple[int, int]]:
    """`(first, one past the last)` row of every span. They do not depend on the number of processes."""
    fitting = _BYTES * n_rows // max(1, n_bytes)
    rows = max(1, min(_ROWS, fitting), math.ceil(n_rows / _SPANS))
    return [(first, min(first + rows, n_rows)) for first in range(0, n_rows, rows)]


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    work: Callable[[Task], Result], tasks: Sequence[Task], num_proc: int | None = None
) -> Iterator[Result]:
    """The result of every task, in their order, by `num_proc` processes, by default one a core.

    An error is that of the first task that fails. Forked processes inherit `work`; elsewhere it has to be
    picklable. No process starts for a single task.
    """
    processes = min(num_proc or cores(), len(tasks))
    if processes <= 1:
        yield from map(work, tasks)
        return
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if can_fork else None)
    pool = ProcessPoolExecutor(processes, context, _begin, (work,))
    try:
        with children_end_with_this_process():  # else they would wait for work for ever
            results = pool.map(_run, tasks)
        yield from results
    except BrokenProcessPool:
        raise RunStopped(
            f"one of {processes} processes that prepare the data was killed, perhaps because memory ran "
            "out; give a smaller --num_proc"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share out the cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this process
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _run(task: object) -> Any:
    assert _work is not None
    return _work(task)

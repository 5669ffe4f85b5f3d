"""Prepared data in the data set cache: folders that are complete or absent, named by all that they depend on.

<HF_DATASETS_CACHE>/unsloth_pack/
  documents-1f2e3d.../         complete
    0.arrow, 1.arrow, ...        in the order of their numbers
    notes.json                 what was found out while they were made, and the size of each file
  documents-1f2e3d....lock     held by the process that prepares, which others wait for
  documents-1f2e3d....aside/   what it has made until now, or what a killed process left
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_VERSION = 3  # raise it when what is kept changes for the same key
_NOTES = "notes.json"
Notes = dict[str, Any]


def kept(kind: str, key: Sequence[object] | None, make: Callable[[Path], Notes]) -> tuple[Path, Notes]:
    """A folder of the cache, which `make` fills if it is not there.

    Args:
        kind: the first word of its name.
        key: all that the content depends on, as JSON has it. None if that is not known: the folder then
            serves this process alone, and is removed when it ends. So it does where caching is switched off.
        make: writes Arrow files into an empty folder; returns notes, as JSON has them.

    Returns:
        The folder, and the notes.

    Raises:
        InputError: the cache cannot be written to; also what `make` raises, and then nothing is kept.
    """
    import datasets

    import unsloth_pack

    try:
        if key is None or not datasets.is_caching_enabled():
            folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=_folder_of_this_process()))
            return folder, make(folder)
        whole_key = json.dumps([unsloth_pack.__version__, _VERSION, *key])
        name = f"{kind}-{hashlib.sha256(whole_key.encode()).hexdigest()[:32]}"
        target = _cache() / name
        if (notes := _notes_of(target)) is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _alone(target.with_name(f"{name}.lock")):
                if (notes := _notes_of(target)) is None:  # no other process has made it meanwhile
                    notes = _made(target, make)
        return target, notes
    except OSError as error:
        raise InputError(
            f"the data set cache in {datasets.config.HF_DATASETS_CACHE} cannot be used "
            f"({error.strerror or error}); free some space, or set HF_DATASETS_CACHE to another folder"
        ) from error


def is_kept(file: Path) -> bool:
    """Whether a file lies in a folder of the cache, whose name tells all about it."""
    return file.parent.parent == _cache()


def digest(file: Path) -> str:
    """SHA-256 of a file's content."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def open_kept(folder: Path) -> datasets.Dataset:
    """All Arrow files of a folder as one data set, memory-mapped."""
    import datasets
    from datasets.table import MemoryMappedTable, concat_tables

    paths = sorted(folder.glob("*.arrow"), key=lambda path: int(path.stem))
    tables = [MemoryMappedTable.from_file(str(path)) for path in paths]
    return datasets.Dataset(concat_tables(tables), fingerprint=folder.name)


@contextmanager
def arrow_file(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatchStreamWriter]:
    """A new Arrow file, which is on the disk when the context ends."""
    import pyarrow as pa

    with path.open("wb") as file:
        with pa.ipc.new_stream(file, schema) as stream:
            yield stream
        file.flush()
        os.fsync(file.fileno())


def _made(target: Path, make: Callable[[Path], Notes]) -> Notes:
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
        found = json.loads((folder / _NOTES).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in found["sizes"]}
    except (OSError, ValueError, LookupError):
        return None
    return found["notes"] if sizes == found["sizes"] else None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock, which ends with this one and those that write for it."""
    with open(path, "wb") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "unsloth_pack"


@cache
def _folder_of_this_process() -> str:
    from datasets.fingerprint import get_temporary_cache_files_directory

    return get_temporary_cache_files_directory()

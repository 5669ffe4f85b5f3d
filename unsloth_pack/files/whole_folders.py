"""Folders and files that are whole or not there: written aside, flushed to the disk, then renamed.

A folder that a caller names may be a link, and is written to. A link inside of it is replaced by a file or
folder of its own: what it points to may be anybody's.
"""

import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from unsloth_pack.errors import InputError

_ASIDE = ".aside"


@contextmanager
def write_whole(target: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `target` at the end. A failure changes nothing.

    Where `target` holds something already, the files are moved into it and replace those of the same names,
    links too.

    Raises:
        InputError: `target` is a file, or cannot be written to, or the disk is full.
    """
    try:
        is_folder = stat.S_ISDIR(os.stat(target).st_mode)
    except (FileNotFoundError, NotADirectoryError):  # a file above it fails below, with a better message
        is_folder = True
    except (OSError, ValueError) as error:  # too long, or with a zero byte
        raise InputError(f"{str(target)[:80]!r} is no name for a folder ({error}); give another") from None
    if not is_folder:
        raise InputError(f"{str(target)!r} is a file; give a folder")
    try:
        with _aside(target) as aside:
            yield aside
            if target.exists() and (target.is_symlink() or any(target.iterdir())):
                _flush_all(aside)
                _move_files(aside, target)
            else:
                put_in_place(aside, target)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{str(target)!r} could not be written ({error}); free some space, or give another folder"
        ) from error


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=_ASIDE))
    try:
        aside.chmod(0o755)
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def write_file(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path` to be filled, which then takes its place; a failure changes nothing.

    Raises:
        OSError: the file cannot be written.
    """
    aside = path.with_name(f".{path.name}{_ASIDE}")
    aside.unlink(missing_ok=True)  # of a process that was killed
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder and all in it, as far as that is possible; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(target: Path) -> None:
    """Remove the folders that `write_whole` was filling when its process was killed."""
    for aside in target.parent.glob(f".{glob.escape(target.name)}.*{_ASIDE}"):
        shutil.rmtree(aside, ignore_errors=True)


def put_in_place(aside: Path, target: Path) -> None:
    """Rename a folder once all of it is on the disk: after a crash `target` is whole or not there."""
    _flush_all(aside)
    os.replace(aside, target)
    _flush(target.parent)


def _move_files(source: Path, target: Path) -> None:
    for place, folders, _ in os.walk(source):
        for folder in (target / Path(place, name).relative_to(source) for name in folders):
            if folder.is_symlink():
                folder.unlink()
            folder.mkdir(exist_ok=True)
    for place, _, names in os.walk(source, topdown=False):  # a folder's name is flushed after what it holds
        inside = target / Path(place).relative_to(source)
        for name in names:
            os.replace(Path(place, name), inside / name)
        _flush(inside)


def _flush_all(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in names), place):
            _flush(Path(path))


def _flush(path: Path) -> None:
    """Write a file's bytes, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

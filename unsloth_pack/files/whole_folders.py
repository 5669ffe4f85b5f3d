"""Folders and files that are whole or not there: written aside, flushed to the disk, then renamed.

A folder that a caller names may be a link or a mount point, and is written to. A link inside of it is
replaced by a file or folder of its own: what it points to may be anybody's.

.out.1f2e3d4c.aside/   beside a folder that is not there yet; renamed to it
out/.1f2e3d4c.aside/   inside a folder that is there; its files are moved
  new/                 what a save writes
  old/                 what it replaces, while it moves
out/.loss.png.aside    a file

Each is locked by the process that fills it. One without a lock was left by a process that was killed, and
the next save to the same place removes it.
"""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from unsloth_pack.errors import InputError
from unsloth_pack.files.locks import is_at, lock
from unsloth_pack.files.moves import Move, flush


def _nothing(name: str) -> bool:
    return False


@contextmanager
def write_whole(
    target: Path,
    *,
    last: Collection[str] = (),
    replaces: Callable[[str], bool] = _nothing,
    may_replace: bool = True,
) -> Iterator[Path]:
    """A new folder to fill, whose content is put into `target` at the end. A failure changes nothing.

    If `target` is not there, the new folder gets its name: after a crash it is whole or not there.

    If `target` is there, the files are moved into it one by one, because a mount point, or a folder whose
    parent cannot be written to, cannot be renamed. First the old files of `last` leave, then all others that
    are replaced. Then the new files come, those of `last` at the end. So after a crash `target` is old, is
    new, or lacks the files of `last`, without which nobody loads it. In the last case the files that are
    missing are in its hidden folder until the next save.

    Args:
        last: names of files without which nothing in the folder is loaded, such as config.json.
        replaces: whether a file or folder of an earlier save, by its name, has to go. Files of the names
            of new ones always go. All others stay.
        may_replace: False makes it an error that `target` holds a file of the name of a new one.

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
    real = Path(os.path.realpath(target))
    is_there = real.exists()
    place, name = (real, "") if is_there else (real.parent, real.name)
    try:
        with _locked(lambda: _make_folder(place, name)) as (aside, descriptor):
            new = aside / "new"
            new.mkdir()
            yield new
            _check_there(descriptor, aside)
            if is_there:
                _flush_all(new)
                Move(new, real, aside / "old", may_replace).run(last, replaces)
            else:
                put_in_place(new, real)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{str(target)!r} could not be written ({error}); free some space, or give another folder"
        ) from error


@contextmanager
def write_file(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path` to be filled, which then takes its place; a failure changes nothing.

    Raises:
        OSError: the file cannot be written, or another process is writing it.
    """
    aside = path.with_name(f".{path.name}.aside")
    with _locked(lambda: _make_file(aside)) as (_, descriptor):
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        _check_there(descriptor, aside)
        os.replace(aside, path)


def holds(folder: Path) -> list[str]:
    """The names in a folder, in order, without those that a killed process left of a save."""
    return sorted(
        name for name in os.listdir(folder) if not (_is_aside(name, "") and _is_left(folder / name))
    )


def remove_folder(folder: Path) -> None:
    """Remove a folder and all in it, as far as that is possible; of a link, the link alone."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def put_in_place(aside: Path, target: Path) -> None:
    """Rename a folder once all of it is on the disk: after a crash `target` is whole or not there."""
    _flush_all(aside)
    os.replace(aside, target)
    flush(target.parent)


@contextmanager
def _locked(make: Callable[[], tuple[Path, int]]) -> Iterator[tuple[Path, int]]:
    """What `make` makes and opens, a file or folder, locked inside this context and removed at its end."""
    while True:
        aside, descriptor = make()
        with suppress(BlockingIOError):
            lock(descriptor)
            if is_at(descriptor, aside):
                break
        os.close(descriptor)  # before it was locked, another process took it for a leftover
    try:
        yield aside, descriptor
    finally:
        if is_at(descriptor, aside):
            _remove(aside)
        os.close(descriptor)


def _make_folder(place: Path, name: str) -> tuple[Path, int]:
    """A new folder; those that killed processes left there for the same `name` are removed."""
    place.mkdir(parents=True, exist_ok=True)
    for entry in os.listdir(place):
        if _is_aside(entry, name):
            _remove_if_left(place / entry)
    aside = place / f"{_prefix(name)}.{secrets.token_hex(4)}.aside"
    aside.mkdir()
    return aside, os.open(aside, os.O_RDONLY)


def _make_file(aside: Path) -> tuple[Path, int]:
    """A new file in the place of one that a killed process left, or of a link."""
    if os.path.lexists(aside):
        if not aside.is_symlink():
            with aside.open("rb") as left:
                lock(left.fileno())
        aside.unlink()
    return aside, os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)


def _prefix(name: str) -> str:
    return f".{name}" if name else ""


def _is_aside(entry: str, name: str) -> bool:
    return re.fullmatch(re.escape(_prefix(name)) + r"\.[0-9a-f]{8}\.aside", entry) is not None


def _is_left(aside: Path) -> bool:
    """Whether the process that filled it has ended."""
    with _lock_of(aside) as is_ours:
        return is_ours


def _remove_if_left(aside: Path) -> None:
    with _lock_of(aside) as is_ours:
        if is_ours:
            _remove(aside)


@contextmanager
def _lock_of(aside: Path) -> Iterator[bool]:
    """Hold the lock of a file or folder, if no other process does."""
    try:
        descriptor = os.open(aside, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # it has gone, or is a link, which nobody here made
        yield False
        return
    try:
        try:
            is_ours = lock(descriptor)
        except BlockingIOError:
            is_ours = False
        yield is_ours
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _check_there(descriptor: int, aside: Path) -> None:
    if not is_at(descriptor, aside):
        raise FileNotFoundError(errno.ENOENT, "removed while it was being written", str(aside))


def _flush_all(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in names), place):
            flush(Path(path))

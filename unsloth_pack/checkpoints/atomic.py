"""Folders and files that are whole or not there: written aside, flushed to the disk, then renamed.

A folder that a caller names may be a link or a mount point, and is written to. A link inside of it is
replaced by a file or folder of its own: what it points to may be anybody's.

.out.1f2e3d4c.aside/   beside a folder that is not there yet; renamed to it
out/.1f2e3d4c.aside/   inside a folder that is there; its files are moved
  new/                 what a save writes
  old/                 what it replaces, while it moves
out/.loss.png.aside    a file

Each folder is locked by the process that fills it. One without a lock was left by a process that was killed,
and the next save to the same place removes it.
"""

import errno
import fcntl
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

# Move files into an existing folder, in an order that never leaves a loadable mixture.


class Move:
    """Moves the files of one folder into another, and back if that fails.

    Args:
        new: the folder whose files are to be in `target`.
        old: a folder for the files of `target` that have to go; not there yet.
    """

    def __init__(self, new: Path, target: Path, old: Path, may_replace: bool):
        self._new, self._target, self._old, self._may_replace = new, target, old, may_replace
        self._moved: list[tuple[Path, Path]] = []

    def run(self, last: Collection[str], replaces: Callable[[str], bool]) -> None:
        """Move in the order that `atomic_dir` gives, each step on the disk before the next."""
        files = [path.relative_to(self._new) for path in sorted(self._new.rglob("*")) if not path.is_dir()]
        try:
            for name in last:
                self._let_go(Path(name))
            flush(self._target)
            for name in os.listdir(self._target):
                if replaces(name):
                    self._let_go(Path(name), may_be_folder=True)
            for is_last in (False, True):
                for file in files:
                    if (str(file) in last) == is_last:
                        self._let_in(file)
                flush(self._target)
        except BaseException:
            self._undo()
            raise

    def _let_go(self, file: Path, may_be_folder: bool = False) -> None:
        """Move the file or folder of this name out of the target, if it is there."""
        path = self._target / file
        if not os.path.lexists(path):
            return
        if not self._may_replace:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if path.is_dir() and not path.is_symlink() and not may_be_folder:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        self._rename(path, self._old / file)

    def _let_in(self, file: Path) -> None:
        for folder in reversed(file.parents[:-1]):
            if (self._target / folder).is_symlink():
                self._let_go(folder)
            (self._target / folder).mkdir(exist_ok=True)
        self._let_go(file)
        self._rename(self._new / file, self._target / file)
        if file.parent.parts:
            flush((self._target / file).parent)

    def _rename(self, source: Path, goal: Path) -> None:
        goal.parent.mkdir(parents=True, exist_ok=True)
        self._moved.append((source, goal))
        os.rename(source, goal)

    def _undo(self) -> None:
        for source, goal in reversed(self._moved):
            with suppress(FileNotFoundError):  # interrupted before it was moved
                os.rename(goal, source)


def flush(path: Path) -> None:
    """Write a file's bytes, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Locks on files and folders. A lock ends with its process, however that ends, so none is ever stale.
#
# A child that is forked meanwhile holds it too, until it ends: it may write there. No child holds a claim,
# because only the process that claimed the folder of a run writes into it.


def lock(descriptor: int) -> bool:
    """Lock an open file or folder until `descriptor` is closed.

    Returns:
        False on a file system without such locks, such as some network file systems: nobody is kept out.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


_claims: set[int] = set()  # their descriptors


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claim the output folder of a run, which is made where it is missing, for this process alone.

    The claim ends with the context, or with the process: its forked children do not hold it. At the end of
    the context, folders that were made here and hold nothing are removed.

    Raises:
        InputError: another process has claimed it. Where the file system has no locks, nobody is refused.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]  # deepest first
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    _claims.add(descriptor)
    try:
        try:
            lock(descriptor)
        except BlockingIOError:
            raise InputError(
                f"output_dir {str(folder)!r} is in use by another run; wait for its end, or give another "
                "folder",
                about="output_dir",
            ) from None
        yield
    finally:
        for path in new:
            with suppress(OSError):  # it holds something
                path.rmdir()
        _claims.remove(descriptor)
        os.close(descriptor)


def _give_up_claims() -> None:
    while _claims:
        os.close(_claims.pop())


os.register_at_fork(after_in_child=_give_up_claims)


def _nothing(name: str) -> bool:
    return False


@contextmanager
def atomic_dir(
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
        with _locked_folder(place, name) as aside:
            new = aside / "new"
            new.mkdir()
            yield new
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
        OSError: the file cannot be written.
    """
    aside = path.with_name(f".{path.name}.aside")
    aside.unlink(missing_ok=True)  # what a killed process left, or a link
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


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
def _locked_folder(place: Path, name: str) -> Iterator[Path]:
    """A new folder, locked inside this context and removed at its end.

    Those that killed processes left there for the same `name` are removed.
    """
    place.mkdir(parents=True, exist_ok=True)
    for entry in os.listdir(place):
        if _is_aside(entry, name) and _is_left(place / entry):
            shutil.rmtree(place / entry, ignore_errors=True)
    aside = place / f"{_prefix(name)}.{secrets.token_hex(4)}.aside"
    aside.mkdir()
    descriptor = os.open(aside, os.O_RDONLY)
    try:
        lock(descriptor)
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(descriptor)


def _prefix(name: str) -> str:
    return f".{name}" if name else ""


def _is_aside(entry: str, name: str) -> bool:
    return re.fullmatch(re.escape(_prefix(name)) + r"\.[0-9a-f]{8}\.aside", entry) is not None


def _is_left(aside: Path) -> bool:
    """Whether the process that filled a folder has ended."""
    try:
        descriptor = os.open(aside, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # it has gone, or is a link, which nobody here made
        return False
    try:
        return lock(descriptor)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _flush_all(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in names), place):
            flush(Path(path))

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

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from unsloth_pack.errors import InputError


def _move_in(
    new: Path,
    target: Path,
    old: Path,
    last: Collection[str],
    replaces: Callable[[str], bool],
    may_replace: bool,
) -> None:
    """Move the files of `new` into `target` in the order of `atomic_dir`, and back if that fails.

    Each step is on the disk before the next. The files of `target` that have to go move to `old`.
    """
    moved: list[tuple[Path, Path]] = []

    def rename(source: Path, goal: Path) -> None:
        goal.parent.mkdir(parents=True, exist_ok=True)
        moved.append((source, goal))
        os.rename(source, goal)

    def let_go(file: Path, may_be_folder: bool = False) -> None:
        path = target / file
        is_there = os.path.lexists(path)
        if is_there and not may_replace:
            raise FileExistsError(f"{path} is there")
        if is_there and (may_be_folder or path.is_symlink() or not path.is_dir()):
            rename(path, old / file)

    def let_in(file: Path) -> None:
        for folder in reversed(file.parents[:-1]):
            if (target / folder).is_symlink():
                let_go(folder)
            (target / folder).mkdir(exist_ok=True)
        let_go(file)
        rename(new / file, target / file)
        if file.parent.parts:
            flush((target / file).parent)

    files = [path.relative_to(new) for path in sorted(new.rglob("*")) if not path.is_dir()]
    try:
        for name in last:
            let_go(Path(name))
        flush(target)
        for name in filter(replaces, os.listdir(target)):
            let_go(Path(name), may_be_folder=True)
        for is_last in (False, True):
            for file in files:
                if (str(file) in last) == is_last:
                    let_in(file)
            flush(target)
    except BaseException:
        for source, goal in reversed(moved):
            with suppress(FileNotFoundError):  # interrupted before it was moved
                os.rename(goal, source)
        raise


def flush(path: Path) -> None:
    """Write a file's bytes, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Lock an open folder until `descriptor` is closed, or the process ends; False if it is locked already.

    Returns None on a file system without such locks, such as some network file systems.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


_claims: set[int] = set()  # their descriptors


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claim the output folder of a run, which is made where it is missing, for this process alone.

    InputError if another process has claimed it. The claim ends with the context, or with the process: its
    forked children do not hold it. At the end, folders that were made here and hold nothing are removed.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]  # deepest first
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    _claims.add(descriptor)
    try:
        if _lock(descriptor) is False:
            said = f"output_dir {str(folder)!r} is in use by another run; wait for its end, or name another"
            raise InputError(said)
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


@contextmanager
def atomic_dir(
    target: Path,
    *,
    last: Collection[str] = (),
    replaces: Callable[[str], bool] = lambda name: False,
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
    """
    try:
        real = Path(os.path.realpath(target))
        is_there = real.exists()
        if is_there and not real.is_dir():
            raise InputError(f"{str(target)!r} is a file; give a folder")
        place, name = (real, "") if is_there else (real.parent, f".{real.name}")
        with _locked_folder(place, name) as aside:
            new = aside / "new"
            new.mkdir()
            yield new
            if is_there:
                _flush_all(new)
                _move_in(new, real, aside / "old", last, replaces, may_replace)
            else:
                put_in_place(new, real)
    except (OSError, SafetensorError) as error:
        said = f"{str(target)!r} could not be written ({error})"
        raise InputError(f"{said}; free some space, or give another folder") from error


@contextmanager
def write_file(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path` to be filled, which then takes its place; a failure changes nothing."""
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
    return sorted(set(os.listdir(folder)) - set(_left_behind(folder, "")))


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
    """A new folder, locked inside this context and removed at its end, as are those of killed processes."""
    place.mkdir(parents=True, exist_ok=True)
    for entry in _left_behind(place, name):
        shutil.rmtree(place / entry, ignore_errors=True)
    aside = place / f"{name}.{secrets.token_hex(4)}.aside"
    aside.mkdir()
    descriptor = os.open(aside, os.O_RDONLY)
    try:
        _lock(descriptor)
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        os.close(descriptor)


def _left_behind(place: Path, name: str) -> list[str]:
    """The folders of `_locked_folder` whose process has ended."""
    pattern = re.compile(re.escape(name) + r"\.[0-9a-f]{8}\.aside")
    return [entry for entry in os.listdir(place) if pattern.fullmatch(entry) and _is_left(place / entry)]


def _is_left(aside: Path) -> bool:
    try:
        descriptor = os.open(aside, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # it has gone, or is a link, which nobody here made
        return False
    try:
        return _lock(descriptor) is True
    finally:
        os.close(descriptor)


def _flush_all(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in names), place):
            flush(Path(path))

"""Moving files into a folder that is there, in an order that never leaves a mixture which loads."""

import errno
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path


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
        """Move in the order that `write_whole` gives, each step on the disk before the next."""
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

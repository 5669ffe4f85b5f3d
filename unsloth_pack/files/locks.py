"""Locks on files and folders. A lock ends with its process, however that ends, so none is ever stale.

A child that is forked meanwhile holds it too, until it ends: it may write there. No child holds a claim,
because only the process that claimed the folder of a run writes into it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unsloth_pack.errors import InputError


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


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file or folder is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


_claims: set[int] = set()  # their descriptors


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Claim the output folder of a run, which is made where it is missing, for this process alone.

    The claim ends with the context, or with the process: its forked children do not hold it. At the end of
    the context, folders that were made here and hold nothing are removed.

    Raises:
        InputError: another process has claimed it. Where the file system has no locks, nobody is refused.
    """
    made: list[Path] = []
    descriptor = _claim(folder, made)
    _claims.add(descriptor)
    try:
        yield
    finally:
        for path in made:
            with suppress(OSError):  # it holds something
                path.rmdir()
        _claims.remove(descriptor)
        os.close(descriptor)


def _claim(folder: Path, made: list[Path]) -> int:
    """A descriptor that holds the lock. Folders that had to be made are added to `made`, deepest first."""
    while True:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        made[:0] = missing
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            lock(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(
                f"output_dir {str(folder)!r} is in use by another run; wait for its end, or give another "
                "folder",
                about="output_dir",
            ) from None
        if is_at(descriptor, folder):
            return descriptor
        os.close(descriptor)  # a run that left nothing there has just removed it


def _give_up_claims() -> None:
    while _claims:
        os.close(_claims.pop())


os.register_at_fork(after_in_child=_give_up_claims)

"""Files and folders that a subcommand may write to. Nothing here writes to the disk."""

import os
import reprlib
import tempfile
from pathlib import Path

from unsloth_pack.checkpoints.atomic import holds
from unsloth_pack.errors import InputError

_LONGEST_NAME = 255  # bytes, on every file system in use
_PICTURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml", ".jpg": b"\xff\xd8"}  # how they begin


def check_new_folder(name: str, target: Path, may_replace: bool = False) -> None:
    """Refuse a folder that cannot be written to, or holds anything."""
    check_writable(name, target)
    if not may_replace and target.is_dir() and (held := holds(target)):
        raise InputError(
            f"{name} {str(target)!r} is not empty; give a new folder (it holds {held[0]})", about=name
        )


def check_picture(name: str, path: Path) -> None:
    """Refuse a file to draw into that cannot be written, or that holds something else than a picture."""
    check_writable(name, path.parent)
    if path.is_dir():
        raise InputError(f"{name} is {str(path)!r}, which is a folder; give a file")
    if path.suffix not in ("", *_PICTURES):
        raise InputError(f"{name} is {str(path)!r}; give a name that ends in one of {', '.join(_PICTURES)}")
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(8)
        if start and not start.startswith(tuple(_PICTURES.values())):
            raise InputError(f"{name} is {str(path)!r}, which is there and no picture; give another file")


def check_writable(name: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, without making it."""
    begins, remedy = f"{name} is {str(folder)!r} but", "give another folder"
    too_long = any(len(os.fsencode(part)) > _LONGEST_NAME for part in folder.parts)
    if too_long or any(letter < " " or letter == "\x7f" for letter in str(folder)):
        shown = reprlib.repr(str(folder))
        raise InputError(f"{name} is {shown}, which cannot name a folder; give another", about=name)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise InputError(f"{begins} {str(existing)!r} is a file; {remedy}", about=name)
    try:
        with tempfile.TemporaryFile(dir=existing):  # it has no name, so nobody sees it
            pass
    except OSError as error:
        why = f"{str(existing)!r} cannot be written to ({error.strerror})"
        raise InputError(f"{begins} {why}; {remedy}", about=name) from None

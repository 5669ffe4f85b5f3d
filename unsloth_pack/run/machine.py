"""The machine that a command runs on, the processes of a run, and the folders that it may write to."""

import os
import reprlib
import shutil
import tempfile
from pathlib import Path

from unsloth_pack.checkpoints.atomic import holds
from unsloth_pack.errors import InputError, RunStopped


def device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """Name the devices of all processes that train together."""
    import torch

    is_gpu, count = torch.cuda.is_available(), count_processes()
    name = torch.cuda.get_device_name() if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    return name if count == 1 else f"{count} x {name}"


def versions() -> dict[str, str]:
    """The versions of this package and of those that a run's numbers depend on."""
    import peft
    import torch
    import transformers
    import trl

    import unsloth_pack

    return {module.__name__: module.__version__ for module in (unsloth_pack, torch, transformers, trl, peft)}


def count_processes() -> int:
    """The number of processes that train together."""
    return _from_launcher("WORLD_SIZE", 1)


def is_main_process() -> bool:
    """True on rank 0."""
    return os.environ.get("RANK", "0") == "0"


def check_launcher() -> None:
    """Refuse variables that something else left in the environment: the run would save nothing, or hang."""
    processes, rank, own = count_processes(), _from_launcher("RANK", 0), _from_launcher("LOCAL_RANK", -1)
    if rank >= processes:
        raise InputError(
            f"RANK is {rank} and WORLD_SIZE is {processes} in the environment, so no process would save; "
            "unset them, or start the run with torchrun"
        )
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR") if not os.environ.get(name)]
    if missing and (processes > 1 or own >= 0):
        present = "WORLD_SIZE" if processes > 1 else "LOCAL_RANK"
        raise InputError(
            f"{present} is {os.environ[present]} in the environment and {missing[0]} is not set; "
            f"start the run with torchrun, or unset {present}"
        )


def wait_for_all() -> None:
    """Wait until no process has anything to refuse: the main one replaces files that the others read."""
    from accelerate import PartialState

    try:
        PartialState().wait_for_everyone()
    except RuntimeError as error:
        raise RunStopped("another process has ended before the training began; see its line") from error


def _from_launcher(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name} is {text!r} in the environment; unset it, or give a whole number") from None


# Files and folders that a subcommand may write to. Nothing here writes to the disk.

_PICTURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml", ".jpg": b"\xff\xd8"}  # how they begin


def check_new_folder(name: str, target: Path, may_replace: bool = False) -> None:
    """Refuse a folder that cannot be written to, or holds anything."""
    check_writable(name, target)
    if not may_replace and target.is_dir() and (files := holds(target)):
        raise InputError(f"{name} {str(target)!r} is not empty; give a new folder (it holds {files[0]})")


def check_space(target: Path, needed: int) -> None:
    """Refuse a folder on a disk with less than `needed` bytes free."""
    existing = next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(existing).free) < needed:
        said = f"{str(target)!r} needs {needed / 1e9:.1f} GB, and its disk has {free / 1e9:.1f}"
        raise InputError(f"{said}; free some space, or give --save_path on another disk")


def check_picture(name: str, path: Path) -> None:
    """Refuse a file to draw into that cannot be written, or that holds something else than a picture."""
    check_writable(name, path.parent)
    if path.suffix not in ("", *_PICTURES):
        raise InputError(f"{name} is {str(path)!r}; give a name that ends in one of {', '.join(_PICTURES)}")
    if path.is_dir() or (path.is_file() and not path.read_bytes().startswith((*_PICTURES.values(),))):
        raise InputError(f"{name} is {str(path)!r}, which is there and no picture; give another file")


def check_writable(name: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, without making it."""
    if any(len(os.fsencode(part)) > 255 for part in folder.parts) or not str(folder).isprintable():
        raise InputError(f"{name} is {reprlib.repr(str(folder))}, which cannot name a folder; give another")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=existing):  # it has no name, so nobody sees it
            pass
    except OSError as error:
        why = f"{str(existing)!r} cannot be written to ({error.strerror})"
        raise InputError(f"{name} is {str(folder)!r}, but {why}; give another folder") from None

"""The machine that a command runs on, by the names that its output uses, and the processes of a run."""

import os

from unsloth_pack.errors import InputError, RunStopped


def device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    import torch

    is_gpu = torch.cuda.is_available()
    return torch.cuda.get_device_name() if is_gpu else f"CPU, {torch.get_num_threads()} threads"


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
    """Whether this is the one process, of those that train together, that prints and writes."""
    return os.environ.get("RANK", "0") == "0"


def check_launcher() -> None:
    """Refuse variables of torchrun that were left by something else: the run would save nothing, or hang.

    Raises:
        InputError: the rank is not below the number of processes, or the processes cannot find each other.
    """
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
    """Wait until no process has anything to refuse: the main one replaces files that the others read.

    Raises:
        RunStopped: another process has ended, with a line of its own.
    """
    from accelerate import PartialState

    try:
        PartialState().wait_for_everyone()
    except RuntimeError as error:
        raise RunStopped("another process has ended before the training began; see its line") from error


def _from_launcher(name: str, default: int) -> int:
    """A number that torchrun, or a tool like it, has put into the environment."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name} is {text!r} in the environment; unset it, or give a whole number") from None

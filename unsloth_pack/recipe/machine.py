"""The machine that a command runs on, by the names that its output uses, and the processes of a run."""

import os


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
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the one process, of those that train together, that prints and writes."""
    return os.environ.get("RANK", "0") == "0"

"""The machine that a command runs on, as its output names it, and the processes that train together."""

import os


def device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    import torch

    is_gpu = torch.cuda.is_available()
    return torch.cuda.get_device_name() if is_gpu else f"CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of this package and those that a run's numbers depend on."""
    import peft
    import torch
    import transformers
    import trl

    import unsloth_pack

    return {module.__name__: module.__version__ for module in (unsloth_pack, torch, transformers, trl, peft)}


def count_processes() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this process, of those that train together, is the one that prints and writes."""
    return os.environ.get("RANK", "0") == "0"

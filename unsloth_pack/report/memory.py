"""Peak memory: of the GPU where there is one, else of the process."""

import sys

import torch


def peak_memory() -> tuple[int, str]:
    """Bytes, and what they are the peak of."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "GPU memory allocated"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process memory"


def gib(n_bytes: int) -> str:
    """Bytes for a reader."""
    return f"{n_bytes / 2**30:.2f} GiB"

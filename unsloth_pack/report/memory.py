"""Peak memory: of the GPU where there is one, else of the process."""

import re
import sys
from pathlib import Path

import torch


def peak_memory() -> tuple[int, str]:
    """Bytes, and what they are the peak of."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "GPU memory allocated"
    if sys.platform == "linux":  # getrusage includes what the parent held when it forked
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        if high_water := re.search(r"VmHWM:\s*(\d+) kB", status):
            return int(high_water[1]) * 1024, "process memory"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process memory"


def gib(n_bytes: int) -> str:
    """Bytes for a reader."""
    return f"{n_bytes / 2**30:.2f} GiB"

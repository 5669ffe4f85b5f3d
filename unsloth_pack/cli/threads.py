"""OpenMP's threads: how long one spins while it waits, and how many a tiny model has.

By default a waiting thread spins for milliseconds. On busy cores it holds the core that the other thread
needs: beside four busy processes on two cores, an update of the demo took 1,075 ms, and 415 on one thread.
The variables are read as torch is imported.
"""

import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from unsloth_pack.demo import BUNDLED_MODELS

# Turns of libgomp's loop before a waiting thread sleeps, some 0.1 ms; the default is 300,000. On free cores a
# tiny model's next operation comes within that time: with 5,000 turns an update takes a tenth longer.
SPINS = 10_000
_TINY = 2**24  # bytes of weights, of a model whose operations gain little from a second thread
_SAMPLE = 0.2  # seconds in which the cores are watched
_OF_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def choose_threads(arguments: Sequence[str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Set OpenMP's variables for this process and those that it starts, unless the user has set them."""
    if not any(name in environment for name in _OF_USER):
        environment["GOMP_SPINCOUNT"] = str(SPINS)
    if "OMP_NUM_THREADS" not in environment and _is_tiny(arguments) and _idle_cores() < 1.5:
        environment["OMP_NUM_THREADS"] = "1"


def _is_tiny(arguments: Sequence[str]) -> bool:
    """Return whether the model is small by its files. Those of the hub and of config files count as large."""
    name = "demo"
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in ("--config", "--resume"):
            return False
        if flag == "--model_name":
            name = value if equals else "".join(arguments[i + 1 : i + 2])
    folder = BUNDLED_MODELS.get(name, Path(name))
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")] if folder.is_dir() else []
    return 0 < sum(sizes) < _TINY


def _idle_cores() -> float:
    import psutil

    return (psutil.cpu_count() or 1) * (1 - psutil.cpu_percent(_SAMPLE) / 100)

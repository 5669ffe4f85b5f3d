"""`torch.compile` around a patched model: the model itself runs as it would without.

A packed row is described on the host, layers run fused kernels, and steps are captured as CUDA graphs. The
compiler cannot trace the first, and has nothing to gain from the others.
"""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

logger = logging.getLogger("unsloth_pack")


def runs_eagerly(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that `torch.compile` leaves alone. Use as a decorator."""

    @wraps(forward)
    def enter(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(_run)(forward, args, kwargs)  # only now: it imports the compiler
        return forward(*args, **kwargs)

    return enter


def _run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _say_once()
    return forward(*args, **kwargs)


@cache
def _say_once() -> None:
    logger.warning("torch.compile leaves a patched model as it is: its kernels are fused already")

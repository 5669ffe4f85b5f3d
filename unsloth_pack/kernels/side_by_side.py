"""Kernels that are compiled side by side, before anything launches them.

A kernel is compiled when it is first launched, and a first step launches a dozen, one behind the other. In
here a launch only says which kernel will be needed. Threads compile them all at once: most of that time
Triton is in its compiler, in `ptxas` or in `gcc`, where threads do not wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_here = threading.local()  # other threads go on launching


class _Wanted:
    """The kernels that would have been launched, and the threads that compile them.

    Args:
        device: on which they will run.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._asked: set[tuple[Any, ...]] = set()
        self._threads = ThreadPoolExecutor(thread_name_prefix="compiles a kernel")

    def add(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Have a kernel compiled for such arguments, once.

        Args:
            kernel: a function of Triton's jit.
            options: its further arguments, by name.
        """
        form = (id(kernel), *map(_form, args), *((name, _form(value)) for name, value in options.items()))
        if form not in self._asked:
            self._asked.add(form)
            small = tuple(map(_small, args)), {name: _small(value) for name, value in options.items()}
            self._threads.submit(self._compile, kernel, *small)

    def _compile(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A kernel's launcher, which is made when it is asked for, and loads the kernel."""
        with torch.cuda.device(self._device):
            return kernel.warmup(*args, grid=(1,), **options).run

    def await_all(self) -> None:
        """Wait for the threads. What could not be compiled fails again where it is launched."""
        self._threads.shutdown()


@contextmanager
def compiled_side_by_side(device: torch.device) -> Iterator[None]:
    """Launch nothing in this thread meanwhile: have all kernels compiled that would have been launched.

    So what they write stays as it was allocated, and nothing may be kept that was computed from it. The
    backward pass has to run in the same thread.
    """
    wanted = _here.wanted = _Wanted(device)
    try:
        yield
    finally:
        _here.wanted = None
        wanted.await_all()


def wanted_instead() -> _Wanted | None:
    """What is told of a kernel instead of launching it; None where kernels are launched."""
    return getattr(_here, "wanted", None)


def _form(value: Any) -> Any:
    """What Triton may compile a kernel anew for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return tuple(map(_form, value)) if isinstance(value, tuple | list) else value


def _small(value: Any) -> Any:
    """Of the same form, for a thread to hold: the step goes on meanwhile, and frees what it does not need."""
    if isinstance(value, Tensor):
        n_before = value.data_ptr() % 16 // value.element_size()
        return value.new_empty(n_before + 1)[n_before:]
    return type(value)(map(_small, value)) if isinstance(value, tuple | list) else value

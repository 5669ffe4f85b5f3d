"""Processes that Python forks from this one, which somebody may kill at any moment."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 0.5  # after which a process looks again whether its parent is there

_parent: int | None = None  # the process whose new children end with it


@contextmanager
def children_end_with_this_process() -> Iterator[None]:
    """Inside this context, forked processes end soon after this one, however it ends.

    Workers of pools and loaders may wait for ever otherwise. A worker that sends through a full pipe gets no
    error from it, because the worker itself has inherited the end that its parent read from.
    """
    global _parent
    before, _parent = _parent, os.getpid()
    try:
        yield
    finally:
        _parent = before


def _begin_child() -> None:
    global _parent
    if _parent is not None:
        threading.Thread(target=_end_after, args=(_parent,), daemon=True).start()
        _parent = os.getpid()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(1)


os.register_at_fork(after_in_child=_begin_child)

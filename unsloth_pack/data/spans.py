"""Work on the rows of a data set, cut into spans, over several processes."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from unsloth_pack.errors import RunStopped
from unsloth_pack.forked import children_end_with_this_process

Task = TypeVar("Task")
Result = TypeVar("Result")

# A span is written into one file. A data set of more spans than these has longer ones.
_ROWS, _BYTES, _SPANS = 1024, 1 << 20, 256

_work: Callable[[Any], Any] | None = None  # of this process, if it is a worker


def spans_of(n_rows: int, n_bytes: int) -> list[tuple[int, int]]:
    """`(first, one past the last)` row of every span. They do not depend on the number of processes."""
    fitting = _BYTES * n_rows // max(1, n_bytes)
    rows = max(1, min(_ROWS, fitting), math.ceil(n_rows / _SPANS))
    return [(first, min(first + rows, n_rows)) for first in range(0, n_rows, rows)]


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    work: Callable[[Task], Result], tasks: Sequence[Task], num_proc: int | None = None
) -> Iterator[Result]:
    """The result of every task, in their order, worked out by `num_proc` processes.

    Args:
        work: forked processes inherit it; where there is no fork, it has to be picklable.
        num_proc: None for as many as there are cores. No process starts for a single task.

    Raises:
        RunStopped: a process was killed, perhaps because memory ran out.
        Exception: what `work` raises for the first task that fails.
    """
    processes = min(num_proc or cores(), len(tasks))
    if processes <= 1:
        yield from map(work, tasks)
        return
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if can_fork else None)
    pool = ProcessPoolExecutor(processes, context, _begin, (work,))
    try:
        with children_end_with_this_process():  # else they would wait for work for ever
            results = pool.map(_run, tasks)
        yield from results
    except BrokenProcessPool:
        raise RunStopped(
            f"one of {processes} processes that prepare the data was killed, perhaps because memory ran "
            "out; give a smaller --num_proc"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share out the cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this process
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _run(task: Any) -> Any:
    assert _work is not None
    return _work(task)

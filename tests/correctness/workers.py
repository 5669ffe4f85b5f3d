"""The cases spread over processes. One that dies or loses its GPU context fails one case, not the run."""

import multiprocessing
import time
from collections import deque
from itertools import groupby
from multiprocessing.connection import wait

from .judge import holds


def spread(cases, n_workers, deadline):
    """Measure cases in `n_workers` processes; yield the rows of each as they come.

    Args:
        deadline: of `time.monotonic()`; what is not done then is not yielded.
    """
    tasks = deque(list(task) for _, task in groupby(cases, key=lambda c: (c.arch, c.window, c.variant)))
    workers = {}
    try:
        for _ in range(min(n_workers, len(tasks))):
            worker = _Worker(tasks.popleft())
            workers[worker.pipe] = worker
        while workers and time.monotonic() < deadline:
            left = min(deadline - time.monotonic(), 60)
            for pipe in wait(workers, timeout=max(0, left)):
                worker = workers[pipe]
                rows = worker.receive()
                yield rows
                if worker.is_lost(rows):
                    worker.end()
                    del workers[pipe]
                    if worker.cases or tasks:
                        worker = _Worker(worker.cases or tasks.popleft())
                        workers[worker.pipe] = worker
                elif not worker.cases:
                    if tasks:
                        worker.give(tasks.popleft())
                    else:
                        worker.end()
                        del workers[pipe]
    finally:
        for worker in workers.values():
            worker.end()


class _Worker:
    """A process, and the cases that it has still to do."""

    def __init__(self, cases):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()
        self.give(cases)

    def give(self, cases):
        self.cases = list(cases)
        self.pipe.send(self.cases)

    def receive(self):
        """The rows of the next case."""
        case = self.cases.pop(0)
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            died = {"failed": [f"the process died with exit code {self._process.exitcode}"]}
            return [{**case.__dict__, "captured": captured, **died} for captured in (False, True)]

    def is_lost(self, rows):
        """Whether the process cannot go on: it is dead, or CUDA refuses whatever comes after an error."""
        said = " ".join(text for row in rows if not holds(row) for text in row["failed"])
        return not self._process.is_alive() or "CUDA error" in said or "AcceleratorError" in said

    def end(self):
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _serve(pipe):
    import warnings

    import torch
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    from .measure import measure

    try:
        while True:
            for case in pipe.recv():
                pipe.send(measure(case))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):  # nobody listens any more
        return

"""The memory that all graphs of a decoder share.

Warm-ups and captures allocate from one pool, since what one row computes is used up before the next is
replayed. So every graph writes where another's tensors lay: whatever is read by later replays too, such as
rotary tables, has to be made outside.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch


class Token:
    """Lives as long as the autograd node of a replay may run its backward."""


class GraphMemory:
    """The pool, and whose activations it holds."""

    def __init__(self) -> None:
        self._holder: torch.cuda.CUDAGraph | None = None  # keeps the pool while forms come and go
        self._pool: Any = None
        self._stream: Any = None  # of all captures: a pool serves every stream apart
        self._captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # share the pool
        self._holds: weakref.ref[Token] | None = None

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Allocate from the pool, where the capture that follows allocates the same again.

        The pool is of the current device; where the model has moved to another, it gets a new one.
        """
        if self._pool is None or self._stream.device_index != torch.cuda.current_device():
            self._begin()
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool):
                yield
        finally:  # one that breaks may still be reading what is freed next
            torch.cuda.current_stream().wait_stream(self._stream)

    def _begin(self) -> None:
        self._pool, self._stream = None, torch.cuda.Stream()
        holder = torch.cuda.CUDAGraph()
        with self.capturing(holder):
            torch.zeros(1, device="cuda")
        # Not a `torch.cuda.MemPool`, which frees memory when collected: that aborts where a capture runs.
        self._holder, self._pool = holder, SimpleNamespace(id=holder.pool())

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Other threads go on: a loader's that pins memory, or a process group's, would else end the run."""
        pool = self._pool and self._pool.id
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                yield
            self._captured.add(graph)
        except RuntimeError:
            if pool is not None:
                with suppress(RuntimeError):  # torch before 2.12 would count it as going on and free nothing
                    torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            raise
        finally:
            torch.cuda.set_stream(stream)  # a capture that breaks leaves its own

    def give_back(self) -> None:
        """Free the pool, whose graphs nothing needs any more; a capture that broke still holds it."""
        for graph in self._captured:  # a loss of the step before may hold some: no share but the broken one's
            graph.reset()  # may be left, or releasing that takes one of theirs, and torch aborts when they go
        self._holder = None
        gc.collect()  # an error's frames hold the tensors of its capture
        if self._pool is None:
            return
        torch._C._cuda_clearCublasWorkspaces()  # that of the captures' stream lies in the pool
        torch.cuda.empty_cache()
        segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == self._pool.id]
        if any(segment["active_size"] == 0 for segment in segments):
            torch._C._cuda_releasePool(self._stream.device_index, self._pool.id)
            torch.cuda.empty_cache()

    @property
    def is_awaited(self) -> bool:
        """Whether a forward has been replayed whose backward may still come."""
        return self._holds is not None and self._holds() is not None

    def fill(self, token: Token) -> None:
        """A forward has been replayed."""
        self._holds = weakref.ref(token)

    def use_up(self, token: Token) -> None:
        """Its backward is about to be replayed, which overwrites what it has read.

        Raises:
            RuntimeError: that has happened before.
        """
        if self._holds is None or self._holds() is not token:
            raise RuntimeError(
                "a step captured in CUDA graphs goes through its backward pass once; add up the losses "
                "before it, or run a forward pass for each"
            )
        self._holds = None

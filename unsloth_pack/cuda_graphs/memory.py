"""The memory pool that all graphs of a decoder, or of a tower, share.

Warm-ups and captures allocate from one pool, and every graph overwrites the tensors of the others: the
activations of one row are consumed before the next row is replayed. So tensors that later replays read again,
such as rotary tables, are allocated outside the pool. Tensors that are read right after a replay only may be
`alias_memory`.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from unsloth_pack.errors import first_line

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class Token:
    """An object that lives while the autograd node of a replay may still run its backward pass."""


class _Pool(NamedTuple):
    """A substitute for `torch.cuda.MemPool`, of which torch reads only the id.

    A real one frees its memory on garbage collection, which aborts during a capture.
    """

    id: "_POOL_HANDLE"


def alias_memory(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the memory of `x` that lets later captures reuse it once `x` is gone.

    The graph that writes it keeps the memory alive. A tensor on the CPU is returned as it is.
    """
    if not x.is_cuda or not x.numel():
        return x
    x = x.detach()
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    length = span * x.element_size()
    array = {"data": (x.data_ptr(), False), "shape": (length,), "typestr": "|u1", "version": 3}
    bytes_of_x = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=x.device)
    return bytes_of_x.view(x.dtype).as_strided(x.shape, x.stride())


def _clear_workspaces() -> None:
    """Free cuBLAS's workspaces, one for each thread and stream: 64 MiB for a model that captured."""
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


class GraphMemory:
    """A pool of GPU memory, and the replay whose activations it holds."""

    def __init__(self) -> None:
        self._holder: torch.cuda.CUDAGraph | None = None  # keeps the pool while other graphs come and go
        self._pool: _Pool | None = None
        self._stream: torch.cuda.Stream | None = None  # of all captures: streams share no memory of a pool
        self._captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # complete ones
        self._awaited: weakref.ref[Token] | None = None
        self._shared: dict[tuple[object, ...], torch.Tensor] = {}  # by all graphs, outside the pool

    def rows(
        self, what: str, number: int, tokens: int, features: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate `[tokens, features]` for an input or gradient of a row, shared unless it has to grow."""
        key = (what, number, features, dtype, device)
        if key not in self._shared or len(self._shared[key]) < tokens:
            self._shared[key] = torch.zeros(tokens, features, dtype=dtype, device=device)
        return self._shared[key][:tokens].detach()

    def placeholder(self, number: int, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Allocate for parameter `number` of the decoder in `dtype`."""
        key = (number, parameter.shape, dtype, parameter.device)
        if key not in self._shared:
            self._shared[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return self._shared[key]

    def host_buffer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Return pinned host memory, uint8, of at least the bytes of tensor `number` of a row."""
        key = ("host", number)
        if key not in self._shared or len(self._shared[key]) < x.nbytes:
            self._shared[key] = torch.empty(x.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._shared[key]

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Allocate from the pool, as the following capture will.

        The pool is on the current device; a new one is created once the model is on another device.
        """
        if self._stream is None or self._stream.device_index != torch.cuda.current_device() or not self._pool:
            self._make_pool()
        pool, stream = self._pool, cast(torch.cuda.Stream, self._stream)
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream), torch.cuda.use_mem_pool(cast(torch.cuda.MemPool, pool)):
                yield
        finally:  # kernels of a failed warm-up may still read memory that is freed next
            torch.cuda.current_stream().wait_stream(stream)

    def _make_pool(self) -> None:
        self._pool, self._stream = None, torch.cuda.Stream()
        weakref.finalize(self, _clear_workspaces).atexit = False
        holder = torch.cuda.CUDAGraph()
        with self.capturing(holder):
            torch.zeros(1, device="cuda")
        self._holder, self._pool = holder, _Pool(holder.pool())

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture this context in the graph, in memory of the pool.

        Only this thread is restricted meanwhile: under torch's default, CUDA calls of other threads, such as
        a data loader that pins memory or a process group, would end the run.
        """
        pool = None if self._pool is None else self._pool.id
        # cuBLAS then takes new workspaces from the pool. Those of a warm-up's backward pass are outside it,
        # and the end of another model would free them while this graph is replayed.
        _clear_workspaces()
        stream_before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                yield
            self._captured.add(graph)
        except RuntimeError:
            if pool is not None:
                # torch before 2.12 would free nothing of the pool; later versions raise here
                with suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(stream_before.device_index, pool)
            raise
        finally:
            torch.cuda.set_stream(stream_before)  # a failed capture leaves its own stream current

    def give_back(self) -> None:
        """Free the pool after a capture failed. Its graphs must not be replayed any more."""
        # Even those that a loss of the last step still holds: releasing the pool ends an arbitrary share in
        # it, and without its share a graph aborts torch when it is freed
        for graph in self._captured:
            graph.reset()
        self._holder = None
        gc.collect()  # frees the tensors of the failed capture, which the frames of its error hold
        pool, stream = self._pool, self._stream
        if pool is None or stream is None:
            return
        torch._C._cuda_clearCublasWorkspaces()  # the pool holds the workspace of the captures' stream
        torch.cuda.empty_cache()
        segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == pool.id]
        if any(segment["active_size"] == 0 for segment in segments):  # of the failed capture, without a graph
            torch._C._cuda_releasePool(stream.device_index, pool.id)
            torch.cuda.empty_cache()

    def after_broken_capture(self, device: torch.device) -> "GraphMemory":
        """Free this pool and return a fresh one, after a capture failed."""
        self.give_back()
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())  # the failed capture left it capturing
        return GraphMemory()

    @property
    def is_awaited(self) -> bool:
        """True if the backward pass of the last replay may still come."""
        return self._awaited is not None and self._awaited() is not None

    def fill(self, token: Token) -> None:
        """Note that the activations of a replayed forward pass fill the pool."""
        self._awaited = weakref.ref(token)

    def use_up(self, token: Token) -> None:
        """Note that the backward pass overwrites the activations; RuntimeError if they are gone already."""
        if self._awaited is None or self._awaited() is not token:
            remedy = "add up the losses before it, or run a forward pass for each"
            raise RuntimeError(f"a step captured in CUDA graphs runs its backward pass once; {remedy}")
        self._awaited = None


def describe_cause(error: BaseException) -> str:
    """Describe the first error of a capture: torch raises another one as it ends it."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {first_line(error)}"

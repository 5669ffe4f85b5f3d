"""The memory that all graphs of a decoder share, or of a tower.

Warm-ups and captures allocate from one pool, and every graph writes where another graph's tensors lay: what
one row computes is used up before the next row is replayed. So tensors that later replays read again, such as
rotary tables, have to be made outside the pool. What is read right after a replay alone is `borrowed`.
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
    """Lives as long as the autograd node of a replay may run its backward."""


class _Pool(NamedTuple):
    """Stands for a `torch.cuda.MemPool`, of which torch reads the id alone.

    A real one frees its memory when it is garbage collected, and that aborts while a capture runs.
    """

    id: "_POOL_HANDLE"


def alias_memory(x: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of `x`, from which later captures may allocate when `x` has gone.

    The graph that writes it keeps the memory from being freed. A tensor on the CPU is returned as it is.
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
    """Free cuBLAS' workspaces, one for each thread and stream: 64 MiB for a model that has captured."""
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


class GraphMemory:
    """A pool of GPU memory, and which replay's activations lie in it."""

    def __init__(self) -> None:
        self._holder: torch.cuda.CUDAGraph | None = None  # keeps the pool while other graphs come and go
        self._pool: _Pool | None = None
        self._stream: torch.cuda.Stream | None = None  # of all captures: streams share no memory of a pool
        self._captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # whole, in the pool
        self._awaited: weakref.ref[Token] | None = None
        self._shared: dict[tuple[str, int, int, torch.dtype, torch.device], torch.Tensor] = {}
        self._stand_ins: dict[tuple[int, torch.Size, torch.dtype, torch.device], torch.Tensor] = {}
        self._on_host: dict[int, torch.Tensor] = {}

    def input(
        self, number: int, tokens: int, features: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """`[tokens, features]`, outside the pool, for what every row brings anew. Graphs of all forms share
        it, unless it has to be longer than before.

        Args:
            number: of the input, among several of one row.
        """
        return self._rows(("input", number, features, dtype, device), tokens)

    def output_gradient(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """Zeros like an output, for the gradient that every row brings anew. Shared, and outside the pool.

        Args:
            number: of the output, among several of one row.
            output: `[.., tokens, features]`.
        """
        features = output.shape[-1]
        key = ("gradient", number, features, output.dtype, output.device)
        return self._rows(key, output.numel() // features).zero_().view_as(output)

    def _rows(self, key: tuple[str, int, int, torch.dtype, torch.device], tokens: int) -> torch.Tensor:
        """`[tokens, features]` of a tensor that all graphs share."""
        if key not in self._shared or len(self._shared[key]) < tokens:
            *_, features, dtype, device = key
            self._shared[key] = torch.zeros(tokens, features, dtype=dtype, device=device)
        return self._shared[key][:tokens].detach()

    def stand_in(self, number: int, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Like the parameter, outside the pool, for its values in `dtype`. Graphs of all forms share it.

        Args:
            number: of the parameter, among all of the decoder.
        """
        key = (number, parameter.shape, dtype, parameter.device)
        if key not in self._stand_ins:
            self._stand_ins[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return self._stand_ins[key]

    def host_buffer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Pinned host memory that holds `x`, `[bytes]` uint8 or more of them. Graphs of all forms share it,
        unless it has to be longer than before.

        Args:
            number: of the tensor, among several of one row.
        """
        if number not in self._on_host or len(self._on_host[number]) < x.nbytes:
            self._on_host[number] = torch.empty(x.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._on_host[number]

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Allocate from the pool, where the capture that follows allocates the same again.

        The pool is on the current device. After the model has moved to another device, a new one is made.
        """
        pool, stream = self._pool_here()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream), torch.cuda.use_mem_pool(cast(torch.cuda.MemPool, pool)):
                yield
        finally:  # kernels of a warm-up that breaks may still be reading what is freed next
            torch.cuda.current_stream().wait_stream(stream)

    def _pool_here(self) -> tuple[_Pool, torch.cuda.Stream]:
        pool, stream = self._pool, self._stream
        if pool is None or stream is None or stream.device_index != torch.cuda.current_device():
            return self._make_pool()
        return pool, stream

    def _make_pool(self) -> tuple[_Pool, torch.cuda.Stream]:
        self._pool, self._stream = None, torch.cuda.Stream()
        weakref.finalize(self, _clear_workspaces).atexit = False
        holder = torch.cuda.CUDAGraph()
        with self.capturing(holder):
            torch.zeros(1, device="cuda")
        self._holder, self._pool = holder, _Pool(holder.pool())
        return self._pool, self._stream

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record what runs inside this context in the graph, in memory of the pool.

        Only this thread is restricted meanwhile. Under torch's default, CUDA calls of other threads would end
        the run, such as those of a data loader that pins memory or of a process group.
        """
        pool = None if self._pool is None else self._pool.id
        # cuBLAS takes new workspaces from the pool: those of a warm-up's backward pass lie outside, where
        # the end of another model frees them under the replays of this graph
        _clear_workspaces()
        stream_before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
                yield
            self._captured.add(graph)
        except RuntimeError:
            if pool is not None:
                _end_allocating_to(pool, stream_before.device_index)
            raise
        finally:
            torch.cuda.set_stream(stream_before)  # a capture that breaks leaves its own stream current

    def give_back(self) -> None:
        """Free the pool after a capture that broke. Nobody replays its graphs any more."""
        self._end_shares_of_whole_graphs()
        gc.collect()  # frees the tensors of the broken capture, which the frames of its error hold
        pool, stream = self._pool, self._stream
        if pool is None or stream is None:
            return
        torch._C._cuda_clearCublasWorkspaces()  # the workspace of the captures' stream lies in the pool
        torch.cuda.empty_cache()
        if _has_share_left(pool):  # the broken capture's, which has no graph to reset
            torch._C._cuda_releasePool(stream.device_index, pool.id)
            torch.cuda.empty_cache()

    def after_broken_capture(self, device: torch.device) -> "GraphMemory":
        """A new one in place of this, which is freed. Nobody replays its graphs any more."""
        self.give_back()
        generator = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())  # the broken capture left it capturing
        return GraphMemory()

    def _end_shares_of_whole_graphs(self) -> None:
        """Reset every graph whose capture did not break, even where a loss of the step before still holds it.

        Releasing the pool ends any one share in it. If that were the share of a whole graph, torch would
        abort when the graph goes.
        """
        for graph in self._captured:
            graph.reset()
        self._holder = None

    @property
    def is_awaited(self) -> bool:
        """Whether a forward pass has been replayed whose backward pass may still come."""
        return self._awaited is not None and self._awaited() is not None

    def fill(self, token: Token) -> None:
        """Note that a forward pass has been replayed, whose activations fill the pool from now on."""
        self._awaited = weakref.ref(token)

    def use_up(self, token: Token) -> None:
        """Note that its backward pass is about to be replayed, which overwrites the activations it reads.

        Raises:
            RuntimeError: they have been overwritten, by that backward pass or by another row.
        """
        if self._awaited is None or self._awaited() is not token:
            raise RuntimeError(
                "a step captured in CUDA graphs goes through its backward pass once; add up the losses "
                "before it, or run a forward pass for each"
            )
        self._awaited = None


def _end_allocating_to(pool: "_POOL_HANDLE", device: int) -> None:
    """For torch before 2.12, which counts a broken capture as going on and would free nothing of the pool.

    Later versions have ended it themselves, and raise here.
    """
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)


def _has_share_left(pool: _Pool) -> bool:
    """Whether a segment of the pool has outlived `empty_cache` though nothing lies in it."""
    segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == pool.id]
    return any(segment["active_size"] == 0 for segment in segments)


def what_broke(error: BaseException) -> str:
    """What went wrong first in a capture: torch raises once more as it ends it."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {first_line(error)}"

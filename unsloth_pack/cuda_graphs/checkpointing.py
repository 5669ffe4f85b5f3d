"""Gradient checkpointing: offload inputs of layers to host memory, and recompute layers in a capture."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unsloth_pack.cuda_graphs.memory import GraphMemory
from unsloth_pack.cuda_graphs.protocols import CapturableDecoder
from unsloth_pack.errors import InputError
from unsloth_pack.lora.linear import SeedTape


class ActivationOffload:
    """A stack of tensors in pinned host memory, as hooks for `torch.autograd.graph.saved_tensors_hooks`.

    Copies run on a stream of their own. `take` prefetches the next tensor of the stack, so two are on the
    device at a time. The compute stream waits for each copy before its memory is reused, usually long after
    the copy. Tensors on a CPU stay where they are. `buffer` returns pinned host memory for a tensor and its
    place in the stack; None to allocate it.
    """

    def __init__(self, buffer: Callable[[int, Tensor], Tensor] | None = None) -> None:
        self._buffer = buffer
        self._stream: torch.cuda.Stream | None = None
        self._stack: list[weakref.ref[_OnHost]] = []  # autograd owns them, and may never take them
        self._leaving: _OnHost | None = None
        self._n_blocks: dict[int, int] = {}  # pinned blocks by their size in bytes

    def __deepcopy__(self, memo: dict[int, object]) -> "ActivationOffload":
        return ActivationOffload(self._buffer)

    def put(self, x: Tensor) -> "Tensor | _OnHost":
        """Copy `x` to the host and return a handle for `take`; `x` itself on a CPU."""
        if not x.is_cuda:
            return x
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        self.settle()
        self._drop_untaken()
        if self._buffer is None:
            self._require_room(x.nbytes)
            host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        else:
            host = self._buffer(len(self._stack), x)
        self._leaving = handle = _OnHost(x, host, self._stream)
        self._stack.append(weakref.ref(handle))
        return handle

    def take(self, handle: "Tensor | _OnHost") -> Tensor:
        """Return the tensor of a handle on its device."""
        if not isinstance(handle, _OnHost):
            return handle
        self.settle()
        while self._stack and self._stack[-1]() is not handle:
            self._stack.pop()
        if self._stack:
            self._stack.pop()
        x = handle.on_device()
        if self._stack and (before := self._stack[-1]()) is not None:
            before.fetch()
        return x

    def end(self) -> None:
        """Make the current stream wait for all copies, and empty the stack.

        A layer without a gradient is never recomputed, although its input was prefetched.
        """
        self.settle()
        while self._stack:
            if (handle := self._stack.pop()()) is not None:
                handle.forget()

    def _drop_untaken(self) -> None:
        while self._stack and self._stack[-1]() is None:
            self._stack.pop()

    def _require_room(self, n_bytes: int) -> None:
        """Refuse a tensor that exceeds the host's memory: the system would end the process."""
        n = len(self._stack) + 1
        block = 1 << (n_bytes - 1).bit_length()  # torch rounds pinned memory up, and keeps the blocks
        n_new = n - self._n_blocks.get(block, 0)
        if n_new <= 0:
            return
        free = psutil.virtual_memory().available
        if n_new * block > free:
            said = f"the inputs of {n} layers take {n * block / 2**30:.1f} GiB of host memory"
            remedy = "use_gradient_checkpointing=True keeps them on the GPU"
            raise InputError(f"{said}, of which {free / 2**30:.1f} GiB are free; {remedy}")
        self._n_blocks[block] = n

    def settle(self) -> None:
        """Make the current stream wait for the copies to the host."""
        if self._leaving is not None:
            self._leaving.let_go()
            self._leaving = None


class _OnHost:
    """A tensor's copy in host memory, with its transfers."""

    def __init__(self, x: Tensor, host: Tensor, stream: torch.cuda.Stream):
        self._device, self._stream = x.device, stream
        self._host = host
        self._source: Tensor | None = x
        self._fetched: Tensor | None = None
        self._copied = self._copy(self._host, x)

    def let_go(self) -> None:
        """Release the tensor's memory on the device after the copy to the host."""
        if self._source is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._source = None

    def fetch(self) -> None:
        """Start the copy to the device."""
        if self._fetched is None:
            self._fetched = torch.empty_like(self._host, device=self._device)
            self._copied = self._copy(self._fetched, self._host)

    def on_device(self) -> Tensor:
        """Return the tensor on its device; the current stream waits for the copy."""
        self.fetch()
        x, self._fetched = self._fetched, None
        assert x is not None
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return x

    def forget(self) -> None:
        """Make the current stream wait for a pending copy."""
        if self._source is not None or self._fetched is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._source = self._fetched = None

    def __del__(self) -> None:
        self.forget()

    def _copy(self, into: Tensor, x: Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(x, non_blocking=True)
        copied: torch.cuda.Event = self._stream.record_event()
        return copied


_NEUTRAL_OPTIONS = {"use_reentrant", "preserve_rng_state", "determinism_check"}  # options of `checkpoint`


def why_not_recomputed(decoder: CapturableDecoder) -> str | None:
    """Explain why checkpointed layers prevent the capture of a step, or None."""
    # transformers can checkpoint every n-th layer, even counted from a vision tower's first
    functions = [
        getattr(layer, "_gradient_checkpointing_func", None)
        for layer in decoder.layers
        if getattr(layer, "gradient_checkpointing", False)
    ]
    plan = decoder.recompute_plan
    if functions and plan is not None:
        return "gradient checkpointing that changes with the free memory" if plan.n_recomputed else None
    if all(_offloads(function) or _is_plain(function) for function in functions):
        return None
    return "gradient checkpointing with use_reentrant=True, or with a function or options of its own"


def _offloads(function: object) -> bool:
    """True if a checkpointing function offloads the inputs of layers to host memory."""
    return getattr(function, "offloads", False)


def _is_plain(function: object) -> bool:
    if not isinstance(function, partial) or function.func is not checkpoint or function.args:
        return False
    options = function.keywords
    return options.keys() <= _NEUTRAL_OPTIONS and options.get("use_reentrant") is False


class RecomputedLayers:
    """Checkpoint layers within its context in a way that can be captured.

    `torch.utils.checkpoint` reads and sets the random generator, which a capture forbids. Here the seeds of
    LoRA dropout are recorded. Offloaded inputs have fixed host buffers, which `memory` owns.
    """

    def __init__(self, decoder: CapturableDecoder, memory: GraphMemory):
        self._replaced: list[tuple[Any, Any]] = []  # the layers and their own functions
        self._buffers: list[Tensor] = []  # of the inputs: the graphs read them while this lives
        self._memory, self._store = memory, ActivationOffload(self._buffer)
        if decoder.recompute_plan is None:
            layers: list[Any] = [x for x in decoder.layers if getattr(x, "gradient_checkpointing", False)]
            self._replaced = [(layer, layer._gradient_checkpointing_func) for layer in layers]

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def __enter__(self) -> None:
        for layer, function in self._replaced:
            layer._gradient_checkpointing_func = self._offloaded if _offloads(function) else _recomputed

    def __exit__(self, *_: object) -> None:
        self._store.settle()
        for layer, function in self._replaced:
            layer._gradient_checkpointing_func = function

    def end_backward(self) -> None:
        """End a backward pass within its capture: every copy in a graph needs something that waits for it."""
        self._store.end()

    def _offloaded(self, function: Callable[..., object], *args: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(self._store.put, self._store.take):
            return _recomputed(function, *args)

    def _buffer(self, number: int, x: Tensor) -> Tensor:
        buffer = self._memory.host_buffer(number, x)
        if not any(other is buffer for other in self._buffers):
            self._buffers.append(buffer)
        return buffer.view(x.dtype)[: x.numel()].view(x.shape)


def _recomputed(function: Callable[..., object], *args: object) -> object:
    tape = SeedTape()

    def taped(*args: object) -> object:
        with tape.play():
            return function(*args)

    return checkpoint(taped, *args, use_reentrant=False, preserve_rng_state=False)

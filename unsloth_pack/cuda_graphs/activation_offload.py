"""Activations in host memory until the backward pass asks for them, copied while the GPU computes."""

import weakref
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor

from unsloth_pack.errors import InputError


class ActivationOffload:
    """A stack of tensors in pinned host memory, as hooks for `torch.autograd.graph.saved_tensors_hooks`.

    Copies run on a stream of their own, in both directions. Taking a tensor starts the copy of the one that
    was put before it, so two are on the device at a time. The stream that computes waits for each copy before
    its memory is reused, by when the copy has long ended. So memory is reused in the order of that stream, no
    matter how far the host is ahead. Tensors that are not on a GPU stay where they are.

    Args:
        buffer: pinned host memory for a tensor, given its place in the stack, from 0, and the tensor; None to
            allocate it anew for every tensor.
    """

    def __init__(self, buffer: Callable[[int, Tensor], Tensor] | None = None) -> None:
        self._buffer = buffer
        self._stream: torch.cuda.Stream | None = None
        self._stack: list[weakref.ref[_OnHost]] = []  # autograd owns them, and may drop them untaken
        self._leaving: _OnHost | None = None
        self._had_room_for: dict[int, int] = {}  # by the size of a block in bytes, how many blocks

    def __deepcopy__(self, memo: dict[int, Any]) -> "ActivationOffload":
        return ActivationOffload(self._buffer)

    def put(self, x: Tensor) -> Any:
        """A stand-in for `x` until `take`: its copy on the host, or `x` itself where it is not on a GPU.

        Raises:
            InputError: the host has too little memory for the copy.
        """
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
        self._leaving = held = _OnHost(x, host, self._stream)
        self._stack.append(weakref.ref(held))
        return held

    def take(self, held: Any) -> Tensor:
        """The tensor that `put` has returned this stand-in for, on its device."""
        if not isinstance(held, _OnHost):
            return held
        self.settle()
        while self._stack and self._stack[-1]() is not held:
            self._stack.pop()
        if self._stack:
            self._stack.pop()
        x = held.on_device()
        if self._stack and (before := self._stack[-1]()) is not None:
            before.fetch()
        return x

    def end(self) -> None:
        """Work on the current stream waits for all copies that were started; nothing more is taken.

        A layer through which no gradient goes is never computed again, and yet its input was on its way.
        """
        self.settle()
        while self._stack:
            if (held := self._stack.pop()()) is not None:
                held.forget()

    def _drop_untaken(self) -> None:
        while self._stack and self._stack[-1]() is None:
            self._stack.pop()

    def _require_room(self, n_bytes: int) -> None:
        """Refuse a tensor for which the host lacks memory, or the system would end the process."""
        n_held = len(self._stack) + 1
        block = 1 << (n_bytes - 1).bit_length()  # torch rounds pinned memory up, and keeps the blocks
        n_new = n_held - self._had_room_for.get(block, 0)
        if n_new <= 0:
            return
        free = psutil.virtual_memory().available
        if n_new * block > free:
            raise InputError(
                f"the inputs of {n_held} layers take {n_held * block / 2**30:.1f} GiB of host memory, of "
                f"which {free / 2**30:.1f} GiB are free; use_gradient_checkpointing=True keeps them on the "
                "GPU, a smaller max_seq_length makes them smaller"
            )
        self._had_room_for[block] = n_held

    def settle(self) -> None:
        """Work on the current stream waits for the copies to the host that were started."""
        if self._leaving is not None:
            self._leaving.let_go()
            self._leaving = None


class _OnHost:
    """A tensor's copy in host memory, and on its way there and back."""

    def __init__(self, x: Tensor, host: Tensor, stream: torch.cuda.Stream):
        self._device, self._stream = x.device, stream
        self._host = host
        self._source: Tensor | None = x
        self._fetched: Tensor | None = None
        self._copied = self._copy(self._host, x)

    def let_go(self) -> None:
        """Let the tensor's memory on the device be reused, after the copy to the host."""
        if self._source is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._source = None

    def fetch(self) -> None:
        """Start the copy to the device."""
        if self._fetched is None:
            self._fetched = torch.empty_like(self._host, device=self._device)
            self._copied = self._copy(self._fetched, self._host)

    def on_device(self) -> Tensor:
        """The tensor on its device; work on the current stream waits for the copy."""
        self.fetch()
        x, self._fetched = self._fetched, None
        assert x is not None
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return x

    def forget(self) -> None:
        """Work on the current stream waits for a copy that nothing else has waited for."""
        if self._source is not None or self._fetched is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._source = self._fetched = None

    def __del__(self) -> None:
        self.forget()

    def _copy(self, into: Tensor, x: Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            into.copy_(x, non_blocking=True)
        return self._stream.record_event()

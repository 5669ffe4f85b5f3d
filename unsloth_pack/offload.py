"""Activations in host memory until the backward pass asks for them, copied while the GPU computes."""

import weakref
from typing import Any

import torch
from torch import Tensor


class HostStore:
    """A stack of tensors in pinned host memory, as hooks for `torch.autograd.graph.saved_tensors_hooks`.

    Both ways are copied on a stream of their own. When one tensor is taken, the one that was put before it is
    fetched already: two are on the device at a time. Tensors that are not on a GPU stay where they are.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._stack: list[weakref.ref[_OnHost]] = []  # the graph owns them, and may drop them untaken

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostStore":
        return HostStore()

    def put(self, x: Tensor) -> Any:
        if not x.is_cuda:
            return x
        if self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        held = _OnHost(x, self._stream)
        self._stack.append(weakref.ref(held))
        return held

    def take(self, held: Any) -> Tensor:
        if not isinstance(held, _OnHost):
            return held
        while self._stack and self._stack[-1]() is not held:
            self._stack.pop()
        if self._stack:
            self._stack.pop()
        x = held.on_device()
        if self._stack and (before := self._stack[-1]()) is not None:
            before.fetch()
        return x


class _OnHost:
    def __init__(self, x: Tensor, stream: torch.cuda.Stream):
        self._device, self._stream = x.device, stream
        self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._fetched: Tensor | None = None
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self._host.copy_(x, non_blocking=True)
        x.record_stream(stream)

    def fetch(self) -> None:
        if self._fetched is None:
            with torch.cuda.stream(self._stream):
                self._fetched = self._host.to(self._device, non_blocking=True)
                self._arrived = self._stream.record_event()

    def on_device(self) -> Tensor:
        self.fetch()
        x, self._fetched = self._fetched, None
        assert x is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._arrived)
        x.record_stream(current)
        return x

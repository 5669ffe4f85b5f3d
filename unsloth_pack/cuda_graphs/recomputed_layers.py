"""Gradient checkpointing in a capture: the backward graph recomputes layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unsloth_pack.cuda_graphs.activation_offload import ActivationOffload
from unsloth_pack.cuda_graphs.memory import GraphMemory
from unsloth_pack.cuda_graphs.protocols import CapturableDecoder
from unsloth_pack.lora.linear import SeedTape

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

    def _offloaded(self, function: Callable[..., Any], *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self._store.put, self._store.take):
            return _recomputed(function, *args)

    def _buffer(self, number: int, x: Tensor) -> Tensor:
        buffer = self._memory.host_buffer(number, x)
        if not any(other is buffer for other in self._buffers):
            self._buffers.append(buffer)
        return buffer.view(x.dtype)[: x.numel()].view(x.shape)


def _recomputed(function: Callable[..., Any], *args: Any) -> Any:
    tape = SeedTape()

    def taped(*args: Any) -> Any:
        with tape.play():
            return function(*args)

    return checkpoint(taped, *args, use_reentrant=False, preserve_rng_state=False)

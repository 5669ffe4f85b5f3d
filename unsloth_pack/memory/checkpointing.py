"""Gradient checkpointing: recompute all layers in the backward pass, or as few as memory requires.

In a plan the last layers keep their activations, which are freed before the first layers are recomputed. Two
sizes decide how many: the activations of a layer, and the rest of a step (the loss, gradients, one layer in
its backward pass). Both are estimated before the first step, and measured afterwards.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from peft import PeftModel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from unsloth_pack.cuda_graphs.capture_decision import free_bytes
from unsloth_pack.cuda_graphs.checkpointing import ActivationOffload
from unsloth_pack.errors import InputError
from unsloth_pack.layers.decoder import FastDecoder
from unsloth_pack.memory.layer_sizes import LayerSizes
from unsloth_pack.modules import base_of

USABLE = 0.95  # of the free memory: the rest is lost to fragments
# Estimates, until a step is measured:
_WORKING_LAYERS = 3  # of a backward pass, in activations of a layer
_BYTES_A_LOGIT = 10  # in 16 bits, in float32, and the gradient

T = TypeVar("T")
logger = logging.getLogger("unsloth_pack")
CheckpointingMode = bool | Literal["offload", "unsloth", "auto"]


def check_mode(mode: object) -> None:
    """Raise InputError unless `mode` is a `CheckpointingMode`."""
    if mode is not False and mode not in (True, "offload", "unsloth", "auto"):
        modes = "False, True, 'offload' (or 'unsloth') or 'auto'"
        raise InputError(f"use_gradient_checkpointing is {mode!r}; use {modes}")


def enable_checkpointing(model: PreTrainedModel | PeftModel, mode: CheckpointingMode) -> None:
    """Turn on gradient checkpointing, as in `use_gradient_checkpointing`.

    Args:
        model: a patched transformers model, or a PEFT model of one.
        mode: False for none; True to recompute every layer; "offload" (alias "unsloth") to also offload the
            layers' inputs to host memory; "auto" to recompute as few layers as the GPU's free memory allows,
            decided for every row (see `RecomputePlan`).

    Raises:
        InputError: any other mode.
    """
    check_mode(mode)
    if not mode:
        return
    base = base_of(model)
    decoder = base.get_decoder()
    if any(layer.gradient_checkpointing for layer in decoder.layers):  # perhaps in another mode
        base.gradient_checkpointing_disable()
    decoder.own_checkpointing = None
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    functions: list[Callable[..., object]] = [_Offloaded()] * len(decoder.layers)
    if mode == "auto":
        decoder.recompute_plan = RecomputePlan(decoder)
        functions = [_AsPlanned(decoder, number) for number in range(len(decoder.layers))]
        base.disable_input_require_grads()  # see `FastCausalLM.enable_input_require_grads`
    else:
        base.enable_input_require_grads()
    if mode is not True:
        decoder.own_checkpointing = functions, decoder.recompute_plan
        for layer, function in zip(decoder.layers, functions, strict=True):
            layer._gradient_checkpointing_func = function


class _Offloaded:
    """Checkpoint a layer and offload its input to host memory."""

    recomputes = True
    offloads = True

    def __init__(self) -> None:
        self._store = ActivationOffload()

    def __call__(self, function: Callable[..., T], *args: object) -> T:
        with torch.autograd.graph.saved_tensors_hooks(self._store.put, self._store.take):
            output: T = checkpoint(function, *args, use_reentrant=False)
        return output


class _AsPlanned:
    """Checkpoint a layer of a decoder if the decoder's plan recomputes it."""

    def __init__(self, decoder: FastDecoder, number: int):
        self._decoder, self._number = decoder, number
        # True while the layer runs checkpointed, for `FastMLP`: the plan may change until the recomputation.
        # `FastCausalLM` recognises our functions by this attribute.
        self.recomputes = False

    def __call__(self, function: Callable[..., T], *args: object) -> T:
        plan = self._decoder.recompute_plan
        if not plan.keeps(self._number):
            output: T = checkpoint(self._checkpointed, function, *args, use_reentrant=False)
            return output
        with plan.measure_layer():
            return function(*args)

    def _checkpointed(self, function: Callable[..., T], *args: object) -> T:
        self.recomputes = True
        try:
            return function(*args)
        finally:
            self.recomputes = False


class RecomputePlan:
    """The number of a patched decoder's first layers to recompute, decided for every step."""

    def __init__(self, decoder: FastDecoder):
        self.n_layers = len(decoder.layers)
        self.n_recomputed = 0
        width = decoder.get_input_embeddings().weight.element_size()
        # Bytes a token: of a layer's activations, and of the rest of a step
        sizes = [LayerSizes.measure(layer, decoder.config) for layer in decoder.layers]
        self._per_token: float = width * max(size.kept + size.gate_and_up for size in sizes)
        self._beside: float = _WORKING_LAYERS * self._per_token + _BYTES_A_LOGIT * decoder.config.vocab_size
        self._is_measured = False
        self._tokens = 0
        self._before: tuple[int, int] | None = None  # bytes and peak at the beginning of the step
        self._logged: int | None = None

    def __str__(self) -> str:
        return f"{self.n_recomputed} of {self.n_layers} layers are recomputed"

    def keeps(self, layer: int) -> bool:
        """True if layer number `layer`, from 0, is not recomputed."""
        return layer >= self.n_recomputed

    def decide(self, tokens: int, device: torch.device) -> None:
        """Decide for the next step, from the free memory and the last step's peak."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._learn(device)
        free = free_bytes(device)
        room = USABLE * free - self._beside * tokens
        n_kept = min(self.n_layers, max(0, int(room // (self._per_token * tokens))))
        self.n_recomputed, self._tokens = self.n_layers - n_kept, tokens
        self._before = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        if self.n_recomputed != self._logged:
            self._logged = self.n_recomputed
            logger.warning(
                "gradient checkpointing: %s at %s tokens (%.1f GiB free, %.2f GiB a layer)",
                *(self, f"{tokens:,}", free / 2**30, self._per_token * tokens / 2**30),
            )

    def leaves_room(self, device: torch.device) -> bool:
        """True if the forward pass has left enough memory for the loss and the backward pass."""
        if self._before is None or self.n_recomputed == self.n_layers:
            return True
        return free_bytes(device) >= self._beside * self._tokens

    def lower(self) -> bool:
        """Expect a fifth more per token after memory ran out; False if all layers are recomputed already."""
        self._before = None
        self._per_token *= 1.2
        self._beside *= 1.2
        return self.n_recomputed < self.n_layers

    @contextmanager
    def measure_layer(self) -> Iterator[None]:
        """Measure the activations of the first layer that is not recomputed."""
        if self._is_measured or not self._tokens:
            yield
            return
        before = torch.cuda.memory_allocated()
        yield
        self._per_token = max(1.0, (torch.cuda.memory_allocated() - before) / self._tokens)
        self._is_measured = True

    def _learn(self, device: torch.device) -> None:
        """Measure the rest of the last step, if it set a new peak."""
        if self._before is None or not (self._is_measured or self.n_recomputed == self.n_layers):
            return
        at_rest, most = self._before
        peak = torch.cuda.max_memory_allocated(device)
        if peak > most:
            activations = (self.n_layers - self.n_recomputed) * self._per_token * self._tokens
            self._beside = max(self._per_token, (peak - at_rest - activations) / self._tokens)

"""Gradient checkpointing: recompute all layers in the backward pass, or as many as memory requires."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from peft import PeftModel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from unsloth_pack.cuda_graphs.activation_offload import ActivationOffload
from unsloth_pack.errors import InputError
from unsloth_pack.memory.recompute import RecomputePlan

CheckpointingMode = bool | Literal["offload", "unsloth", "auto"]


def check_mode(mode: Any) -> None:
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
    if mode is False:
        return
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    decoder = base.get_decoder()
    if any(layer.gradient_checkpointing for layer in decoder.layers):  # perhaps in another mode
        base.gradient_checkpointing_disable()
    decoder.own_checkpointing = None
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if mode == "auto":
        decoder.recompute_plan = RecomputePlan(decoder)
        for number, layer in enumerate(decoder.layers):
            layer._gradient_checkpointing_func = _AsPlanned(decoder, number)
        base.disable_input_require_grads()  # see `FastCausalLM.enable_input_require_grads`
        return
    base.enable_input_require_grads()
    if mode is not True:
        offloaded = _Offloaded()
        for layer in decoder.layers:
            layer._gradient_checkpointing_func = offloaded


class _Offloaded:
    """Checkpoint a layer and offload its input to host memory."""

    recomputes = True
    offloads = True

    def __init__(self) -> None:
        self._store = ActivationOffload()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self._store.put, self._store.take):
            return checkpoint(function, *args, use_reentrant=False)


class _AsPlanned:
    """Checkpoint a layer of a decoder if the decoder's plan recomputes it."""

    def __init__(self, decoder: Any, number: int):
        self._decoder, self._number = decoder, number
        # True while the layer runs checkpointed. `FastMLP` reads it in the forward pass and the
        # recomputation; the plan may change in between. `FastCausalLM` recognises our functions by this
        # attribute.
        self.recomputes = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        plan = self._decoder.recompute_plan
        if not plan.keeps(self._number):
            return checkpoint(self._checkpointed, function, *args, use_reentrant=False)
        with plan.measure_layer():
            return function(*args)

    def _checkpointed(self, function: Callable[..., Any], *args: Any) -> Any:
        self.recomputes = True
        try:
            return function(*args)
        finally:
            self.recomputes = False

"""Gradient checkpointing: recompute layers in the backward pass, all or as many as memory asks for."""

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
    """Refuse anything but a `CheckpointingMode`.

    Raises:
        InputError: `mode` is something else.
    """
    if mode is not False and mode not in (True, "offload", "unsloth", "auto"):
        raise InputError(
            f"use_gradient_checkpointing is {mode!r}; use False, True, 'offload' (or 'unsloth') or 'auto'"
        )


def enable_checkpointing(model: PreTrainedModel | PeftModel, mode: CheckpointingMode) -> None:
    """Turn gradient checkpointing on, as `use_gradient_checkpointing` asks.

    Args:
        model: a patched transformers model, or a PEFT model of one.
        mode: False for none; True to recompute every layer; "offload" (alias "unsloth") to also hold the
            layers' inputs in host memory until then; "auto" to recompute as few layers as the free memory of
            the GPU allows, decided anew for every row (see `RecomputePlan`).

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
    """Checkpoints a layer and holds its input in host memory."""

    recomputes = True
    offloads = True

    def __init__(self) -> None:
        self._store = ActivationOffload()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self._store.put, self._store.take):
            return checkpoint(function, *args, use_reentrant=False)


class _AsPlanned:
    """Checkpoints a layer of a decoder if the decoder's plan recomputes it."""

    def __init__(self, decoder: Any, number: int):
        self._decoder, self._number = decoder, number
        # Whether the layer runs checkpointed now. `FastMLP` asks in the forward pass and when it is computed
        # again; the plan may change in between. `FastCausalLM` knows our functions by this attribute.
        self.recomputes = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        plan = self._decoder.recompute_plan
        if not plan.keeps(self._number):
            return checkpoint(self._checkpointed, function, *args, use_reentrant=False)
        with plan.measured():
            return function(*args)

    def _checkpointed(self, function: Callable[..., Any], *args: Any) -> Any:
        self.recomputes = True
        try:
            return function(*args)
        finally:
            self.recomputes = False

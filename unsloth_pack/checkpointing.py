"""Gradient checkpointing: recompute layers in the backward pass, their inputs kept on device or host."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsloth_pack.errors import InputError

CheckpointingMode = bool | Literal["offload", "unsloth", "auto"]


def enable_checkpointing(model: nn.Module, mode: CheckpointingMode) -> None:
    """Turn gradient checkpointing on, as `use_gradient_checkpointing` asks.

    Args:
        model: a transformers or PEFT model.
        mode: False for none; True to recompute every layer; "offload" (alias "unsloth") to hold the layers'
            inputs in host memory meanwhile.

    Raises:
        InputError: any other mode.
    """
    if mode is False:
        return
    if mode not in (True, "offload", "unsloth"):
        raise InputError(
            f"use_gradient_checkpointing is {mode!r}; use False, True or 'offload' ('auto' is not there yet)"
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    if mode is not True:
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module._gradient_checkpointing_func = _checkpoint_on_host


def _checkpoint_on_host(function: Callable[..., Any], *args: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, use_reentrant=False)

"""Passes through a model that training does not notice.

They accumulate no gradient, run no hook, and draw no random number that a step would have drawn.
"""

import inspect
import random
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.modules.dropout import _DropoutNd

from unsloth_pack.graphs.protocols import DecoderOutput, PackedDecoder
from unsloth_pack.modules.hooks import HOOKS
from unsloth_pack.modules.walk import Walkable


@contextmanager
def left_alone(model: Walkable, training: bool = True, dropout: bool = False) -> Iterator[None]:
    """The model in one mode and without its own looks; then everything is as it was.

    Args:
        dropout: whether dropout modules are in that mode, too; else they drop nothing.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    sought = {"trained_weights_sought": True, "numbers_sought": True, "boundary_labels_sought": True}
    meanwhile = {"attention_dropout": 0.0, "leak_probe": None, **sought}
    held = [(vars(m), name, vars(m)[name]) for m, _ in modes for name in meanwhile if name in vars(m)]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    cuda = {p.device.index for p, _ in gradients if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(cuda)):
        try:
            for module, _ in modes:
                module.training = training and (dropout or not isinstance(module, _DropoutNd))
            for attributes, name, _ in held:
                attributes[name] = meanwhile[name]
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for attributes, name, value in held:
                attributes[name] = value
            for parameter, gradient in gradients:
                parameter.grad = gradient
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def without_hooks(decoder: Walkable) -> Iterator[None]:
    """No hook of a module runs meanwhile, and no layer is recomputed."""
    held = [
        (vars(module), name, vars(module)[name])
        for module in decoder.modules()
        for name in (*HOOKS, "gradient_checkpointing")
        if name in vars(module)
    ]
    try:
        for attributes, name, _ in held:
            attributes[name] = OrderedDict() if name in HOOKS else False
        yield
    finally:
        for attributes, name, value in held:
            attributes[name] = value


def without_cached_casts(decoder: PackedDecoder) -> torch.autocast:
    """Autocast as it is, but what it casts meanwhile is not kept for the step that follows."""
    kind = decoder.get_input_embeddings().weight.device.type
    return torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False)


def packed_forward(decoder: PackedDecoder, *args: Any, **asked: Any) -> DecoderOutput:
    """Past transformers' recording of outputs, which would lose its hooks to `without_hooks`."""
    return inspect.unwrap(type(decoder)._packed_forward)(decoder, *args, **asked)

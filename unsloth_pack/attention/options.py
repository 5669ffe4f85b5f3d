"""What the attention of one layer needs of a backend."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention layer.

    Args:
        scale: factor on the logits, before the softcap.
        window: how many keys a query sees, its own included; None for all up to its own.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        dropout: probability of dropping an attention weight.
        sinks: whether a query also attends to its head's sink, a logit without a value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    sinks: bool = False


@dataclass(frozen=True)
class AttentionNeed:
    """What decides whether a backend can run a layer: device, dtype, head size, options."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    options: AttentionOptions

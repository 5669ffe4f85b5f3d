"""Describe what the attention of one layer needs of a backend."""

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
        sinks: a query also attends to its head's sink, a logit without a value.
        causal: a query sees no later key. Otherwise, as in vision towers, it sees its whole segment, and a
            window bounds only the keys before it.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    sinks: bool = False
    causal: bool = True


@dataclass(frozen=True)
class AttentionNeed:
    """The properties of a layer by which a backend can run it or not.

    Args:
        head_dim: the head size of q and k.
        v_head_dim: the head size of v; None where it is that of q and k.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    options: AttentionOptions
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        if self.v_head_dim == self.head_dim:  # needs that mean the same are equal
            object.__setattr__(self, "v_head_dim", None)

    @property
    def padded_head_dim(self) -> int:
        """Return the head size for a backend that takes one size for q, k and v."""
        return max(self.head_dim, self.v_head_dim or 0)

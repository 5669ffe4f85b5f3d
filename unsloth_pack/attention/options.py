"""The options of attention layers, and their needs of a backend."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one attention layer."""

    scale: float  # factor on the logits, before the softcap
    window: int | None = None  # how many keys a query sees, its own included; None for all up to its own
    softcap: float | None = None  # logits become `softcap * tanh(logits / softcap)`
    dropout: float = 0.0  # probability of dropping an attention weight
    sinks: bool = False  # a query also attends to its head's sink, a logit without a value
    # False, as in vision towers: a query sees its whole segment, and a window bounds the keys before it alone
    causal: bool = True


@dataclass(frozen=True)
class AttentionNeed:
    """The properties of a layer by which a backend can run it or not."""

    device_type: str
    dtype: torch.dtype
    head_dim: int  # of q and k
    options: AttentionOptions
    v_head_dim: int | None = None  # of v; None if it is that of q and k

    @property
    def padded_head_dim(self) -> int:
        """Return the head size for a backend that takes one size for q, k and v."""
        return max(self.head_dim, self.v_head_dim or 0)

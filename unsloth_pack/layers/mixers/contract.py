"""Define what every mixer offers. A mixer is what a decoder layer does between tokens."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from unsloth_pack.models.spec import ArchSpec


@dataclass(frozen=True)
class Request:
    """Says where a mixer is to compute, and who asks for which attention backend."""

    device_type: str
    dtype: torch.dtype
    backend: str  # "auto" or a name
    source: str  # who asks for it, for messages
    config: PreTrainedConfig | None = None  # of the decoder
    tried: dict[Hashable, str | None] = field(default_factory=dict, repr=False)  # of layers of a kind


@dataclass(frozen=True)
class Choice:
    """Says how one layer computes."""

    name: str  # of the backend, chosen for this `reason`
    reason: str
    why_not_captured: str | None  # why no CUDA graph can hold it, or None
    room_is_free: bool = False  # it takes no longer over a row with room for more and longer documents
    remedy: str | None = None  # how to make it much faster here, or None; logged as a warning


Report = dict[str, str]  # by kind of part


class Mixer(ABC):
    """One kind of mixer. No document of a packed row may reach another through its `forward`."""

    attribute: str  # the name under which a decoder layer holds it, unless `ArchSpec.names` has another
    # The class that replaces transformers'. Its forward takes the layer's `hidden_states [B, T, C]`,
    # `position_embeddings` and `packed_row` (None for an ordinary batch), and returns what transformers' does
    forward: type[nn.Module]
    takes_branches = False  # a segment may continue another: its `forward` reads nothing else of documents
    known_names: str  # parameters, submodules and attributes that `forward` accounts for

    @abstractmethod
    def choose(self, module: Any, spec: ArchSpec, request: Request) -> Choice:
        """Choose how the module of one layer computes, or raise BackendUnavailable."""

    @abstractmethod
    def attributes(self, spec: ArchSpec, backend: str, choice: Choice) -> dict[str, Any]:
        """Return the attributes that `forward` reads beside transformers'; `backend` is the requested one."""

    @abstractmethod
    def what_is_fused(
        self, module: nn.Module, spec: ArchSpec, how: str
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Report what is fused and what is not, by kind; `how` says where a kernel runs."""

    def known(self, spec: ArchSpec) -> frozenset[str]:
        """Name what transformers' module may have. A module with more is refused."""
        return frozenset(self.known_names.split())

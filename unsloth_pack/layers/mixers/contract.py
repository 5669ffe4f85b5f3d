"""What every mixer offers. A mixer is what a decoder layer does between tokens."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedConfig

from unsloth_pack.models.spec import ArchSpec


@dataclass(frozen=True)
class Request:
    """Where a mixer is to compute, and who asks for which backend of attention.

    Args:
        backend: "auto" or a name.
        source: what asks for it, for messages.
        config: of the decoder.
    """

    device_type: str
    dtype: torch.dtype
    backend: str
    source: str
    config: PreTrainedConfig | None = None
    _found: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, find: Callable[[], Any]) -> Any:
        """The result of `find`, which runs on the first call for `key`: layers of a kind are alike."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]


@dataclass(frozen=True)
class Choice:
    """How one layer computes.

    Args:
        name: of the backend.
        reason: why that one.
        why_not_captured: why no CUDA graph can hold it, or None.
        room_is_free: whether it takes as long over a row with room for more and longer documents.
        remedy: what makes it faster, where it is much slower than it could be here; logged as a warning.
    """

    name: str
    reason: str
    why_not_captured: str | None
    room_is_free: bool = False
    remedy: str | None = None


class Mixer(Protocol):
    """One kind of mixer.

    Args:
        attribute: the name under which a decoder layer holds it, unless `ArchSpec.names` has another.
        forward: the class that takes the place of transformers'. Its forward gets what the layer hands on:
            `hidden_states [B, T, C]`, `position_embeddings`, and `packed_row`, None for an ordinary batch. It
            returns what transformers' does, and no document of a packed row may reach another.
    """

    @property
    def attribute(self) -> str: ...

    @property
    def forward(self) -> type[nn.Module]: ...

    def choose(self, module: Any, spec: ArchSpec, request: Request) -> Choice:
        """How the module of one layer computes.

        Raises:
            BackendUnavailable: not as it is asked for.
        """
        ...

    def known(self, spec: ArchSpec) -> frozenset[str]:
        """The parameters, submodules and attributes of transformers' module that `forward` reads under this
        spec, or that change nothing. A module that has others is refused."""
        ...

    def attributes(self, spec: ArchSpec, backend: str, choice: Choice) -> dict[str, Any]:
        """What `forward` reads off the module, beside transformers' own attributes.

        Args:
            backend: of attention, that was asked for.
            choice: what `choose` has returned for the module.
        """
        ...

    def what_is_fused(self, module: Any, spec: ArchSpec, how: str) -> tuple[dict[str, str], dict[str, str]]:
        """For the report: what is fused and what is not, by kind of layer.

        Args:
            how: where a kernel runs, as "in one kernel".
        """
        ...

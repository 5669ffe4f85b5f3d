"""Parameters that stand in for a decoder's trained ones while its step is captured."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from unsloth_pack.graphs.memory import GraphMemory
from unsloth_pack.graphs.protocols import CapturableDecoder, CastsParameters


class StandIns:
    """Replaces the trained parameters of a decoder within its context.

    Autograd remembers the stream on which a parameter was first used, and a capture breaks where that was
    another stream. A stand-in is a new parameter over the same memory, so it was never used before.

    Parameters that layers cast at every call get a stand-in in the dtype that they compute in. `fill` copies
    all of these from the originals in one launch.

    Args:
        dtype: that the decoder computes in.
        memory: owns the copies of cast parameters.
    """

    def __init__(self, decoder: CapturableDecoder, dtype: torch.dtype, memory: GraphMemory):
        modules = list(decoder.modules())
        # By class: to ask it of every module would take a tenth of a capture
        casting = tuple(kind for kind in {*map(type, modules)} if issubclass(kind, CastsParameters))
        cast = {id(p) for m in modules if isinstance(m, casting) for p in m.cast_when_used()}
        # Each parameter's place: the dict of its module, and its name there
        self._places = [(m._parameters, name) for m in modules for name in m._parameters]
        self._stand_ins: dict[int, nn.Parameter] = {}  # by the id of the original
        self._originals: list[Tensor] = []  # of the cast ones
        self._copies: list[Tensor] = []
        for held, name in self._places:
            p = held[name]
            if p is None or not p.requires_grad or id(p) in self._stand_ins:
                continue
            if id(p) in cast and p.dtype != dtype:
                self._originals.append(p.detach())
                self._copies.append(memory.stand_in(len(self._copies), p, dtype))
                self._stand_ins[id(p)] = nn.Parameter(self._copies[-1])
            else:
                self._stand_ins[id(p)] = nn.Parameter(p.detach())
        self._replaced: list[nn.Parameter | None] = []

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What stands in for these trained parameters."""
        return [self._stand_ins[id(p)] for p in parameters]

    def fill(self) -> None:
        if self._copies:
            torch._foreach_copy_(self._copies, self._originals)

    def __enter__(self) -> None:
        self._replaced = [held[name] for held, name in self._places]
        for (held, name), p in zip(self._places, self._replaced, strict=True):
            held[name] = self._stand_ins.get(id(p), p)

    def __exit__(self, *_: object) -> None:
        for (held, name), p in zip(self._places, self._replaced, strict=True):
            held[name] = p

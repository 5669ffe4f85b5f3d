"""The gradients that a graph computes, in one tensor, from which every replay hands out copies."""

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from unsloth_pack.graphs.flat_layout import FlatLayout, joined
from unsloth_pack.graphs.memory import borrowed


class FlatGradients:
    """Gradients of many parameters in one tensor.

    Args:
        grads: of every parameter; None where none reaches it. They are copied, in a capture by the graph.
        dtype: of the copies that are handed out.
    """

    def __init__(self, grads: Sequence[Tensor | None], dtype: torch.dtype):
        self._layout = FlatLayout([None if grad is None else grad.shape for grad in grads])
        order = self._layout.order
        self._flat = joined([grad for place in order if (grad := grads[place]) is not None])
        self._dtype = dtype
        found = {place: number for number, place in enumerate(order)}
        # Behind all gradients stands a None, for parameters that have none; it is picked twice more and left
        # out, so that there are always two, of which `itemgetter` makes a tuple
        self._in_order = itemgetter(*(found.get(place, -1) for place in range(len(grads))), -1, -1)

    def lend_memory(self) -> None:
        """After a capture: other graphs may use the memory, as copies are taken right after a replay."""
        self._flat = borrowed(self._flat)

    def copies(self) -> tuple[Tensor | None, ...]:
        """A copy of every parameter's gradient: the next replay overwrites the originals."""
        flat = self._flat.to(self._dtype, copy=True)
        cut: list[Tensor | None] = [*self._layout.cut(flat), None]
        return self._in_order(cut)[:-2]

"""The gradients that a graph computes, in one tensor, from which every replay hands out copies."""

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor


class FlatGradients:
    """Gradients of many parameters in one tensor, those of one shape next to each other.

    A model has hundreds of trained parameters and a few shapes. So cutting the tensor takes one operation for
    each shape, not one for each parameter.

    Args:
        grads: of every parameter; None where none reaches it. They are copied, in a capture by the graph.
        dtype: of the copies that are handed out.
    """

    def __init__(self, grads: Sequence[Tensor | None], dtype: torch.dtype):
        places: dict[torch.Size, list[int]] = {}
        for place, grad in enumerate(grads):
            if grad is not None:
                places.setdefault(grad.shape, []).append(place)
        by_shape = [*chain.from_iterable(places.values())]
        self._flat = torch.cat([grad.reshape(-1) for place in by_shape if (grad := grads[place]) is not None])
        self._dtype = dtype
        self._blocks = [(len(alike), *shape) for shape, alike in places.items()]
        self._sizes = [len(alike) * shape.numel() for shape, alike in places.items()]
        found = {place: number for number, place in enumerate(by_shape)}
        # Behind all gradients stands a None, for parameters that have none; the last is picked and left out,
        # so that there are always two, of which `itemgetter` makes a tuple
        self._in_order = itemgetter(*(found.get(place, -1) for place in range(len(grads))), -1)

    def copies(self) -> tuple[Tensor | None, ...]:
        """A copy of every parameter's gradient: the next replay overwrites the originals."""
        flat = self._flat.to(self._dtype, copy=True)
        cut: list[Tensor | None] = []
        for block, shape in zip(flat.split(self._sizes), self._blocks, strict=True):
            cut.extend(block.view(shape).unbind())
        cut.append(None)
        return self._in_order(cut)[:-1]

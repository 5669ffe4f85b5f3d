"""Many tensors in one, those of one shape next to each other.

A model has hundreds of trained parameters and a few shapes. So cutting the tensor takes one operation for
each shape, not one for each parameter.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor


class FlatLayout:
    """Where tensors of these shapes lie in one.

    Args:
        shapes: of the tensors; None for one that is left out.

    Attributes:
        order: the places, in `shapes`, of the tensors as they lie one after the other.
    """

    def __init__(self, shapes: Sequence[torch.Size | None]):
        places: dict[torch.Size, list[int]] = {}
        for place, shape in enumerate(shapes):
            if shape is not None:
                places.setdefault(shape, []).append(place)
        self.order = [*chain.from_iterable(places.values())]
        self._blocks = [(len(alike), *shape) for shape, alike in places.items()]
        self._sizes = [len(alike) * shape.numel() for shape, alike in places.items()]

    def cut(self, flat: Tensor) -> list[Tensor]:
        """The parts of `flat`, one for each of `order`."""
        parts: list[Tensor] = []
        for block, shape in zip(flat.split(self._sizes), self._blocks, strict=True):
            parts.extend(block.view(shape).unbind())
        return parts


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A new tensor that holds these, one after the other; an empty one of none."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)

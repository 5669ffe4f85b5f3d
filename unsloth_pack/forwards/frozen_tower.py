"""A tower that keeps nothing for a backward pass where it is frozen."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn


def gradients_of(tower: nn.Module, pixels: Tensor) -> AbstractContextManager[Any]:
    """A context in which gradients are kept only if a tower's pixels or its weights have any."""
    trains = pixels.requires_grad or any(weight.requires_grad for weight in tower.parameters())
    return torch.set_grad_enabled(torch.is_grad_enabled() and trains)


class FrozenTower(nn.Module):
    """Takes the place of a tower's class, for what it does about gradients.

    Trainers that checkpoint make the output of a tower's embedding require a gradient by a hook; a frozen
    tower would then run its whole backward pass for nothing.
    """

    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The tower's own, without gradients where it is frozen."""
        with gradients_of(self, pixel_values):
            return super().forward(pixel_values, *args, **kwargs)

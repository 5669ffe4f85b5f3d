"""A tower that keeps nothing for a backward pass where it is frozen, and may be replayed from CUDA graphs."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unsloth_pack.graphs.tower_graphs import Patches, Run, TowerGraphs
from unsloth_pack.modules.eager import runs_eagerly

READ_ON_HOST = "what comes beside the pixels is read on the host"


def gradients_of(tower: nn.Module, pixels: Tensor) -> AbstractContextManager[Any]:
    """A context in which gradients are kept only if a tower's pixels or its weights have any."""
    trains = pixels.requires_grad or any(weight.requires_grad for weight in tower.parameters())
    return torch.set_grad_enabled(torch.is_grad_enabled() and trains)


class CapturedTower(nn.Module):
    """A tower with graphs of its forward pass."""

    tower_graphs: TowerGraphs

    def _replayed(self, run: Run, patches: Patches, asked: dict[str, Any]) -> Any:
        """What `run` makes of patches without gradients, from graphs where these know what is asked."""
        if any(not (value is None or isinstance(value, int)) for value in asked.values()):
            self.tower_graphs.leave_out(READ_ON_HOST)
            return run(patches)
        return self.tower_graphs.output(self, run, replace(patches, asked=asked))

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """As torch, which moves and casts modules by it. Graphs let go of weights that lie elsewhere now."""
        moved = super()._apply(fn, *args, **kwargs)
        if (graphs := vars(self).get("tower_graphs")) is not None:  # PEFT makes modules anew from this class
            graphs.let_go(self)
        return moved


class FrozenTower(CapturedTower):
    """Takes the place of the class of a tower whose images are a batch, for what it does about gradients.

    Trainers that checkpoint make the output of a tower's embedding require a gradient by a hook; a frozen
    tower would then run its whole backward pass for nothing.
    """

    @runs_eagerly
    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The tower's own, without gradients where it is frozen; then replayed from CUDA graphs where
        launching it holds the GPU up."""
        of_transformers = super().forward
        with gradients_of(self, pixel_values):
            if torch.is_grad_enabled() or args:
                return of_transformers(pixel_values, *args, **kwargs)

            def run(patches: Patches) -> Any:
                return of_transformers(patches.pixels, **kwargs)

            return self._replayed(run, Patches(pixel_values), kwargs)

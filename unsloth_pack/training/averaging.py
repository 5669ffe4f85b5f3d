"""Gradients averaged over the processes of DDP as one tensor.

DDP copies each gradient into a bucket, exchanges full buckets during the backward pass, and copies the
gradients back. Those of an adapter are hundreds of small tensors, and a captured step makes all of them at
once, so that nothing hides the copies. They lie in one tensor, which is exchanged as it is. A large adapter
stays with DDP: over a slow link its exchange takes longer than the copies, and is better hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unsloth_pack.errors import InputError
from unsloth_pack.graphs.flat_adamw import FlatAdamW
from unsloth_pack.graphs.flat_layout import FlatLayout, joined

# Of gradients. Not measured: models whose steps are captured have smaller adapters, as a rule
_MOST_BYTES = 128 * 2**20


class AveragedGradients:
    """Takes the exchange of a small adapter's gradients over from DDP, if the optimizer is a `FlatAdamW`."""

    def __init__(self) -> None:
        self._takes_over = False
        self._optimizer: FlatAdamW | None = None  # of the micro-batch before
        self._is_small = False

    def begin(self, model: Any, optimizer: Any) -> None:
        """A micro-batch comes: DDP leaves its gradients to this process, as under `no_sync`.

        Args:
            model: as the trainer calls it.
            optimizer: the trainer's, which accelerate may wrap.
        """
        flat = _flat(optimizer)
        if flat is not self._optimizer:
            self._optimizer = flat
            self._is_small = flat is not None and _bytes_of_gradients(flat) <= _MOST_BYTES
        self._takes_over = self._is_small and isinstance(model, DistributedDataParallel)
        if self._takes_over:
            model.require_backward_grad_sync = False

    def average(self, optimizer: Any) -> None:
        """Give every process the mean of all processes' gradients; before they are clipped.

        Raises:
            InputError: a weight got no gradient in this process.
        """
        if not self._takes_over:
            return
        flat: Any = _flat(optimizer)
        weights = flat.flat_weights()
        if weights:
            for weight in weights:
                _average(weight.grad)
            return
        parameters = [p for group in flat.param_groups for p in group["params"]]
        if n_missing := sum(p.grad is None for p in parameters):
            raise InputError(
                f"{n_missing} of {len(parameters)} trained weights got no gradient in this process, and the "
                "others wait for theirs; train them in one process, or freeze them"
            )
        for group in flat.param_groups:
            for dtype in dict.fromkeys(p.dtype for p in group["params"]):
                _average_apart([p.grad for p in group["params"] if p.dtype == dtype])


def _average_apart(gradients: Sequence[Tensor]) -> None:
    """Gradients that do not lie in one tensor here, in the order in which they may lie in the others'."""
    layout = FlatLayout([gradient.shape for gradient in gradients])
    ordered = [gradients[place] for place in layout.order]
    together = joined(ordered)
    _average(together)
    for gradient, part in zip(ordered, layout.cut(together), strict=True):
        gradient.copy_(part)


def _bytes_of_gradients(optimizer: FlatAdamW) -> int:
    return sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])


def _flat(optimizer: Any) -> FlatAdamW | None:
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, FlatAdamW) else None


@torch.no_grad()
def _average(gradients: Tensor) -> None:
    """Divide before the sum, as DDP does: in 16 bits the sum may be too large."""
    gradients.div_(dist.get_world_size())
    dist.all_reduce(gradients)

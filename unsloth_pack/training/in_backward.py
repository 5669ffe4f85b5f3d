"""Gradients that are applied as they come: an update is over when its backward pass is.

A backward pass makes the gradients from the last layer to the first. Each is applied and freed at once, so
that no more than those of one layer are held, where an update after the backward pass needs all together.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unsloth_pack.errors import InputError
from unsloth_pack.training.host_masters import HostMasters
from unsloth_pack.training.single_steps import leave_out, step_one


class InBackward:
    """Applies and frees every gradient in the backward pass that makes it.

    The optimizer stays an ordinary one: its state and its checkpoints are those of updates after the backward
    pass, and its own `step` finds nothing left to do. A parameter whose gradient, or one before it in the
    same backward pass, is not finite keeps its value, and after a loss that is not finite all of them do.

    Args:
        optimizer: of all that trains, not wrapped.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._hooks: list[Any] = []
        self._norms: list[Tensor] = []
        self._applied: set[Tensor] = set()
        self._is_bad = torch.zeros((), dtype=torch.bool)
        self._is_new = True

    def begin(self, loss: Tensor) -> None:
        """The next backward pass is of this loss, and makes an update."""
        self.end()
        if self._is_new:
            self._optimizer.step()  # without gradients: bitsandbytes sets itself up for all weights at once
            self._is_new = False
        self._norms.clear()
        self._applied.clear()
        self._is_bad = ~torch.isfinite(loss.detach())
        for group in self._optimizer.param_groups:
            apply = self._applied_in(group)
            self._hooks += [p.register_post_accumulate_grad_hook(apply) for p in group["params"]]

    def end(self) -> None:
        """The backward pass is over, or was broken off: gradients stay where they are made from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def norm(self) -> Tensor:
        """The norm of all gradients of the last backward pass, in float32."""
        return torch.linalg.vector_norm(torch.stack(self._norms)) if self._norms else torch.zeros(())

    def _applied_in(self, group: dict[str, Any]) -> Callable[[Tensor], None]:
        def apply(parameter: Tensor) -> None:
            if parameter in self._applied:
                raise InputError(
                    "a weight got its gradient in parts, and the first part has been applied already; leave "
                    "out --optimizer_in_backward, or --use_gradient_checkpointing"
                )
            self._applied.add(parameter)
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
            self._norms.append(norm)
            self._is_bad = self._is_bad | ~torch.isfinite(norm)
            if isinstance(self._optimizer, HostMasters):
                return self._optimizer.send(parameter, group, self._is_bad)
            leave_out(self._optimizer, [parameter], self._is_bad)
            step_one(self._optimizer, parameter, group)
            parameter.grad = None

        return apply

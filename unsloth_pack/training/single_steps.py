"""An optimizer that steps one parameter, or leaves some out, as the device decides."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def step_one(optimizer: Optimizer, parameter: Tensor, settings: Mapping[str, Any]) -> None:
    """Update a single parameter from its gradient. All others stay as they are, with their gradients.

    Args:
        optimizer: one that keeps nothing in its groups, but all in the state of each parameter.
        settings: of the parameter's group.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**settings, "params": [parameter]}]
    try:
        with _own_settings_of(optimizer, parameter):
            type(optimizer).step(optimizer)  # the instance's own is counted by schedules
    finally:
        optimizer.param_groups = groups


@contextmanager
def _own_settings_of(optimizer: Any, parameter: Tensor) -> Iterator[None]:
    """bitsandbytes keeps settings of single weights, as 32 bits for embeddings, by their place in the groups.
    While one weight is updated alone, at the first place, only its own settings are known."""
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        yield
        return
    by_place, own = manager.index2config, manager.pid2config.get(id(parameter))
    manager.index2config = {} if own is None else {(0, 0): own}
    try:
        yield
    finally:
        manager.index2config = by_place


def leave_out(optimizer: Any, parameters: Iterable[Tensor], is_bad: Tensor) -> None:
    """Let the optimizer's next step do nothing for these parameters if `is_bad`.

    With an optimizer on CUDA that is not fused their gradients become zero, while momentum and weight decay
    still act.

    Args:
        is_bad: a bool, on the device.
    """
    if is_bad.device.type == "cpu":  # there is nothing to wait for
        if is_bad:
            for parameter in parameters:
                parameter.grad = None  # an optimizer skips weights without a gradient
        return
    if getattr(optimizer, "_step_supports_amp_scaling", False) or hasattr(optimizer, "found_inf"):
        optimizer.found_inf = is_bad.float()
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.masked_fill_(is_bad, 0.0)

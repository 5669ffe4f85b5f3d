"""The backward pass of a fused operation: it can be differentiated once, and may be the last one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.errors import InputError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The `backward` of an autograd function, which refuses to run with create_graph=True.

    torch's decorator of this name refuses a second derivative only where the incoming gradient depends on
    something. Where that is a constant, as a loss's own, it returns constants, and the second derivative
    silently lacks their terms.

    Raises:
        InputError: the backward pass runs with create_graph=True.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True: a fused operation has no second derivative; undo the patch, or use "
                "torch's own operations"
            )
        return backward(ctx, *grads)

    return run


def is_last_pass() -> bool:
    """Whether the backward pass that runs now frees what its nodes have saved: it may be overwritten.

    Not so with retain_graph=True.
    """
    return not torch._C._autograd._get_current_graph_task_keep_graph()

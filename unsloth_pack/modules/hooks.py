"""Hooks on modules. Code that bypasses `module()` skips its hooks, and has to check here first."""

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(*modules: nn.Module) -> bool:
    """Whether calling one of the modules does more than its forward."""
    for m in modules:  # spelt out: this runs for every layer at every step
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
    return False

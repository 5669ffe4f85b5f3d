"""Hooks on modules. Code that bypasses `module()` skips its hooks, and has to check here first."""

from torch import nn

_OF_RECORDED_OUTPUTS = "transformers.utils.output_capturing"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_recorder(hook: object) -> bool:
    """Whether a hook is one of those by which transformers collects outputs that a caller asks for.

    It puts them on every layer at the first such call and leaves them there, where they do nothing else.
    """
    return getattr(hook, "__module__", None) == _OF_RECORDED_OUTPUTS


def has_hooks(*modules: nn.Module) -> bool:
    """Whether calling one of the modules does more than its forward."""
    for m in modules:  # spelt out: this runs for every layer at every step
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
    return False

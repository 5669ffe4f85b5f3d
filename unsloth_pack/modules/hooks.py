"""Hooks on modules. Code that bypasses `module()` skips its hooks, and has to check here first."""

import logging
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn

_RECORDER_MODULE = "transformers.utils.output_capturing"
_MARKS_INPUTS = "enable_input_require_grads.<locals>.make_inputs_require_grads"
logger = logging.getLogger("unsloth_pack")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_recorder(hook: object) -> bool:
    """True for transformers' hooks that record requested outputs.

    transformers adds them to every layer at the first request and leaves them there.
    """
    return getattr(hook, "__module__", None) == _RECORDER_MODULE


def is_harmless(hook: object) -> bool:
    """True if a hook changes no result: it records outputs, or makes embeddings require gradients."""
    return is_recorder(hook) or getattr(hook, "__qualname__", "").endswith(_MARKS_INPUTS)


def has_hooks(*modules: nn.Module) -> bool:
    """True if a module has hooks, or a forward of its own, such as accelerate's offloading."""
    for m in modules:  # unrolled: this runs for every layer at every step
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
        if "forward" in m.__dict__:
            return True
    return False


def has_peft_hooks(root: nn.Module) -> bool:
    """True if PEFT has hooks: they give each row of a batch its own adapter or task, or measure rows."""
    left: list[nn.Module] = [root]
    while left:  # a quarter of the time that `modules()` takes: this runs for every padded batch
        module = left.pop()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for hook in hooks.values():
                function = hook.func if isinstance(hook, partial) else hook
                if getattr(function, "__module__", "").startswith("peft."):
                    return True
        left += [child for child in module._modules.values() if child is not None]
    return False


def no_compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a forward to run outside `torch.compile`.

    The compiler cannot trace the host's description of a packed row, and gains nothing from fused kernels and
    captured steps.
    """

    @wraps(forward)
    def enter(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(_run)(forward, args, kwargs)  # only now: it imports the compiler
        return forward(*args, **kwargs)

    return enter


def _run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _warn_once()
    return forward(*args, **kwargs)


@cache
def _warn_once() -> None:
    logger.warning("torch.compile leaves a patched model as it is: its kernels are fused already")

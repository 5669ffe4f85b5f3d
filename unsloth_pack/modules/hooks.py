"""Hooks on modules. Code that bypasses `module()` skips its hooks, and has to check here first."""

import logging
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn

_OF_RECORDED_OUTPUTS = "transformers.utils.output_capturing"
_MARKS_INPUTS = "enable_input_require_grads.<locals>.make_inputs_require_grads"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_recorder(hook: object) -> bool:
    """Whether a hook is one of those by which transformers collects outputs that a caller asks for.

    It puts them on every layer at the first such call and leaves them there, where they do nothing else.
    """
    return getattr(hook, "__module__", None) == _OF_RECORDED_OUTPUTS


def is_harmless(hook: object) -> bool:
    """Whether a step with this hook computes what it computes without: it records outputs, or has embeddings
    carry gradients, as transformers does for checkpointed layers."""
    return is_recorder(hook) or getattr(hook, "__qualname__", "").endswith(_MARKS_INPUTS)


def has_hooks(*modules: nn.Module) -> bool:
    """Whether calling one of the modules does more than the forward of its class: hooks, or a forward that
    was set on it, as accelerate's that brings its weights from the host."""
    for m in modules:  # spelt out: this runs for every layer at every step
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return True
        if "forward" in m.__dict__:
            return True
    return False


def has_peft_hooks(root: nn.Module) -> bool:
    """Whether PEFT has hooks there now: with them it gives each row of the batch an adapter or a task of its
    own, or measures what its rows hold."""
    left: list[nn.Module] = [root]
    while left:  # a quarter of the time that `modules()` takes: this runs for every padded batch
        module = left.pop()
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for hook in hooks.values():
                made_of = hook.func if isinstance(hook, partial) else hook
                if getattr(made_of, "__module__", "").startswith("peft."):
                    return True
        left += [child for child in module._modules.values() if child is not None]
    return False


# `torch.compile` around a patched model: the model itself runs as it would without.
#
# A packed row is described on the host, layers run fused kernels, and steps are captured as CUDA graphs. The
# compiler cannot trace the first, and has nothing to gain from the others.

logger = logging.getLogger("unsloth_pack")


def no_compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that `torch.compile` leaves alone. Use as a decorator."""

    @wraps(forward)
    def enter(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(_run)(forward, args, kwargs)  # only now: it imports the compiler
        return forward(*args, **kwargs)

    return enter


def _run(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _say_once()
    return forward(*args, **kwargs)


@cache
def _say_once() -> None:
    logger.warning("torch.compile leaves a patched model as it is: its kernels are fused already")

"""The one door through which a call enters a patched causal language model.

Trainers replace `model.forward` on the instance: TRL by a forward that runs the decoder itself, accelerate
by one under autocast. The replacement would hide a method of the class. PEFT calls `model.forward(...)` and
not `model(...)`, so a hook would not be run. So `forward` is a data descriptor, which Python looks up before
the instance's attributes:

- a forward of TRL's is taken as a request, see `TrlHead`; calls still enter here;
- any other forward that is set (accelerate's, a user's wrapper) is called first, as it expects to be;
- `undo()` forgets both, so that the model that came in comes back.

Its signature names what the original's does, too: `generate` refuses arguments that it does not find there,
as those of images, and trainers drop such columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from types import MethodType
from typing import Any

from unsloth_pack.losses.trl_head import TrlHead

_WRAPPER = "unsloth_pack_wrapper"  # where a model holds the forward that was set around the door
_TRL_HEAD = "unsloth_pack_trl_head"  # and what a trainer of TRL's wants
DOOR_ATTRIBUTES = (_WRAPPER, _TRL_HEAD)


class Door:
    """`forward` of a class: a function that no attribute of the instance hides. Use as a decorator."""

    def __init__(self, enter: Callable[..., Any]):
        self._enter = enter
        self.__doc__ = enter.__doc__

    def __get__(self, model: Any, owner: type | None = None) -> Callable[..., Any]:
        if model is None:
            return self._enter
        enter = _with_parameters_of(type(model).__bases__[-1], self._enter)
        return vars(model).get(_WRAPPER) or MethodType(enter, model)

    def __set__(self, model: Any, forward: Any) -> None:
        if request := TrlHead.of(forward):
            vars(model)[_TRL_HEAD] = request
        elif _enters_by(self._enter, forward):
            vars(model).pop(_WRAPPER, None)
        else:
            vars(model)[_WRAPPER] = forward

    def __delete__(self, model: Any) -> None:
        vars(model).pop(_WRAPPER, None)


@cache
def _with_parameters_of(original: type, enter: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the parameters of the original's forward in its signature."""
    own = inspect.signature(enter)
    theirs = inspect.signature(original.forward).parameters.values()  # type: ignore[attr-defined]
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    more = [
        p.replace(kind=p.KEYWORD_ONLY) for p in theirs if p.name not in own.parameters and p.kind not in kinds
    ]
    if not more:
        return enter

    @wraps(enter)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        return enter(model, *args, **kwargs)

    *named, rest = own.parameters.values()
    forward.__signature__ = own.replace(parameters=[*named, *more, rest])  # type: ignore[attr-defined]
    return forward


def _enters_by(door: Callable[..., Any], forward: Any) -> bool:
    """Whether a bound method is the door's function, or that with more parameters."""
    function = getattr(forward, "__func__", None)
    return door in (function, getattr(function, "__wrapped__", None))


def set_forwards(model: Any) -> dict[str, Any]:
    """What trainers and libraries have set on a patched model, to outlive a patch that is laid anew."""
    return {name: vars(model)[name] for name in DOOR_ATTRIBUTES if name in vars(model)}


def let_in(model: Any, earlier: dict[str, Any]) -> None:
    """Take over what an instance had before its class got this door.

    Args:
        earlier: what `set_forwards` found under the patch before, if there was one.
    """
    if "forward" in vars(model):  # it stays there, for `undo()`
        model.forward = vars(model)["forward"]
    vars(model).update(earlier)


def forget(model: Any, door: Callable[..., Any]) -> None:
    """Remove what accelerate keeps beside a wrapper, the forward that it has wrapped, where that is the door.

    Args:
        door: the function that `Door` has decorated.
    """
    if _enters_by(door, vars(model).get("_original_forward")):
        del model._original_forward


def trl_head_of(model: Any) -> TrlHead | None:
    """What a trainer of TRL's wants of a model, or None."""
    return vars(model).get(_TRL_HEAD)

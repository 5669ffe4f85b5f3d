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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from types import MethodType
from typing import Any

from unsloth_pack.layers.deferred_checks import DeferredCheck
from unsloth_pack.losses.trl_head import TrlHead
from unsloth_pack.packed_row.labels import PaddedBatch
from unsloth_pack.packed_row.row import PackedRow

_WRAPPER = "unsloth_pack_wrapper"  # where a model holds the forward that was set around the door
_TRL_HEAD = "unsloth_pack_trl_head"  # and what a trainer of TRL's wants
DOOR_ATTRIBUTES = (_WRAPPER, _TRL_HEAD)


class ForwardSlot:
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
        door: the function that `ForwardSlot` has decorated.
    """
    if _enters_by(door, vars(model).get("_original_forward")):
        del model._original_forward


def trl_head_of(model: Any) -> TrlHead | None:
    """What a trainer of TRL's wants of a model, or None."""
    return vars(model).get(_TRL_HEAD)


# A call of a causal language model that has come in.

_OF_IMAGES = (
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "mm_encoder_outputs",
    "image_hidden_states",  # of transformers below 5.20
)


@dataclass
class ForwardCall:
    """A call that has come in.

    Args:
        described: its packed row, or the padded batch that becomes one inside the decoder; None for a batch
            that keeps its padding.
        inputs: the decoder's named arguments.
        rest: the others; neither the row's nor the loss's.
        images: pixels and grids that have been taken out of them.
        lost: what it may have lost, to refuse when the decoder has run.
    """

    described: PackedRow | PaddedBatch | None
    inputs: dict[str, Any]
    rest: dict[str, Any]
    images: Any = None
    lost: list[DeferredCheck] = field(default_factory=list)

    @property
    def row(self) -> PackedRow | None:
        """The packed row that the caller has given."""
        return self.described if isinstance(self.described, PackedRow) else None

    @property
    def packed_row(self) -> PackedRow:
        """The row that the decoder runs; only where there is one."""
        assert self.described is not None
        return self.described.row if isinstance(self.described, PaddedBatch) else self.described

    def describe(self, row: PackedRow) -> None:
        """Put this row, of which more is known, in the place of that one."""
        batch = self.described if isinstance(self.described, PaddedBatch) else None
        self.described = row if batch is None else replace(batch, row=row)


def images_in(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments of a call that hold images or the like."""
    return [name for name in _OF_IMAGES if arguments.get(name) is not None]

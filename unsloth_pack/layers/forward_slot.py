"""Let every call enter a patched causal language model at one place.

Trainers replace `model.forward` on the instance, which would hide a method of the class. So `forward` is a
data descriptor, which Python looks up before the instance's attributes:

- a forward of TRL's is taken as a request, see `TrlHead`; calls still enter here;
- any other forward (accelerate's, a user's wrapper) is called first, as it expects to be;
- `undo()` forgets both, so that the original model comes back.

Its signature has the parameters of the original's too: `generate` refuses arguments that it does not find
there, such as images, and trainers drop such columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from types import MethodType
from typing import Any

from torch import nn

from unsloth_pack.losses.head import TrlHead
from unsloth_pack.packed_row.labels import DeferredCheck, PaddedBatch
from unsloth_pack.packed_row.row import PackedRow

# Where a model stores the forward set around this one, and the request of a trainer of TRL's
_WRAPPER, _TRL_HEAD = "unsloth_pack_wrapper", "unsloth_pack_trl_head"
SLOT_ATTRIBUTES = (_WRAPPER, _TRL_HEAD)
_IMAGE_KEYWORDS = (
    *("pixel_values", "pixel_values_videos", "input_features", "mm_encoder_outputs"),
    "image_hidden_states",  # of transformers below 5.20
)


class ForwardSlot:
    """A `forward` that no attribute of the instance hides. Use it as a decorator."""

    def __init__(self, enter: Callable[..., object]):
        self._enter = enter
        self.__doc__ = enter.__doc__

    def __get__(self, model: nn.Module | None, owner: type | None = None) -> Callable[..., Any]:
        if model is None:
            return self._enter
        enter = _add_parameters(type(model).__bases__[-1], self._enter)
        return vars(model).get(_WRAPPER) or MethodType(enter, model)

    def __set__(self, model: nn.Module, forward: Callable[..., object]) -> None:
        if request := TrlHead.from_forward(forward):
            vars(model)[_TRL_HEAD] = request
        elif _is_bound_to(self._enter, forward):
            vars(model).pop(_WRAPPER, None)
        else:
            vars(model)[_WRAPPER] = forward

    def __delete__(self, model: nn.Module) -> None:
        vars(model).pop(_WRAPPER, None)


@cache
def _add_parameters(original: type, enter: Callable[..., object]) -> Callable[..., object]:
    """Add the parameters of the original's forward to the function's signature."""
    own = inspect.signature(enter)
    theirs = inspect.signature(original.forward).parameters.values()  # type: ignore[attr-defined]
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    more = [
        p.replace(kind=p.KEYWORD_ONLY) for p in theirs if p.name not in own.parameters and p.kind not in kinds
    ]
    if not more:
        return enter

    @wraps(enter)
    def forward(model: nn.Module, *args: object, **kwargs: object) -> object:
        return enter(model, *args, **kwargs)

    *named, rest = own.parameters.values()
    forward.__signature__ = own.replace(parameters=[*named, *more, rest])  # type: ignore[attr-defined]
    return forward


def _is_bound_to(enter: Callable[..., object], forward: object) -> bool:
    """Return whether a bound method is this function, perhaps with more parameters."""
    function = getattr(forward, "__func__", None)
    return enter in (function, getattr(function, "__wrapped__", None))


def read_forwards(model: nn.Module) -> dict[str, object]:
    """Return the forwards that trainers and libraries set on a patched model, to outlive a new patch."""
    return {name: vars(model)[name] for name in SLOT_ATTRIBUTES if name in vars(model)}


def adopt_forwards(model: nn.Module, earlier: dict[str, object]) -> None:
    """Adopt the forwards set before the class got this slot; `earlier` are those under the patch before."""
    if "forward" in vars(model):  # it stays there, for `undo()`
        model.forward = vars(model)["forward"]
    vars(model).update(earlier)


def drop_wrapped_forward(model: nn.Module, enter: Callable[..., object]) -> None:
    """Remove the forward that accelerate keeps beside a wrapper, if it is `enter` itself."""
    if _is_bound_to(enter, vars(model).get("_original_forward")):
        del model._original_forward


def read_trl_head(model: nn.Module) -> TrlHead | None:
    """Return the request of a trainer of TRL's, or None."""
    return vars(model).get(_TRL_HEAD)


@dataclass
class ForwardCall:
    """A call that has come in."""

    # its packed row, or the padded batch that becomes one inside the decoder; None for a batch that keeps its
    # padding
    described: PackedRow | PaddedBatch | None
    inputs: dict[str, Any]  # the decoder's named arguments
    rest: dict[str, Any]  # the others; neither the row's nor the loss's
    images: Any = None  # pixels and grids that were taken out of `rest`
    checks: list[DeferredCheck] = field(default_factory=list)  # to run after the decoder

    @property
    def row(self) -> PackedRow | None:
        """Return the caller's packed row, if there is one."""
        return self.described if isinstance(self.described, PackedRow) else None

    @property
    def packed_row(self) -> PackedRow:
        """Return the row that the decoder runs; only where there is one."""
        assert self.described is not None
        return self.described.row if isinstance(self.described, PaddedBatch) else self.described

    def describe(self, row: PackedRow) -> None:
        """Replace the row by one with more details."""
        batch = self.described if isinstance(self.described, PaddedBatch) else None
        self.described = row if batch is None else replace(batch, row=row)


def name_images(arguments: Mapping[str, object]) -> list[str]:
    """Name the arguments of a call that hold images or the like."""
    return [name for name in _IMAGE_KEYWORDS if arguments.get(name) is not None]

"""Let every call enter a patched causal language model at one place; take its row, check and mask its labels.

Trainers replace `model.forward` on the instance, which would hide a method of the class. So `forward` is a
data descriptor, which Python looks up before the instance's attributes:

- a forward of TRL's is taken as a request, see `TrlHead`; calls still enter here;
- any other forward (accelerate's, a user's wrapper) is called first, as it expects to be;
- `undo()` forgets both, so that the original model comes back.

Its signature has the parameters of the original's too: `generate` refuses arguments that it does not find
there, such as images, and trainers drop such columns.

No label at the first token of a document or on padding may carry loss. A trainer counts labels before the
model sees them and divides the loss by that number. So labels that it counted but that carry no loss are
refused, or cause a warning where the model cannot know whether they were counted.

Shapes: B rows of T tokens, V outputs of the head.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.errors import InputError
from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.losses.head import TrlHead, count_head_outputs, has_own_loss
from unsloth_pack.packed_row.describe import ROW_KEYWORDS, describe_call
from unsloth_pack.packed_row.padded_batch import PaddedBatch
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow

if TYPE_CHECKING:
    from unsloth_pack.layers.causal_lm import FastCausalLM

logger = logging.getLogger("unsloth_pack")
_REMEDY = f"set them to {IGNORE_INDEX} in the collator, as DataCollatorWithFlattening does"
_MAY_BE_COUNTED = (
    "%d labels at document starts or on padding carry no loss; if the trainer has counted them, "
    "it divides by too many; %s"
)
# Where a model stores the forward set around this one, and the request of a trainer of TRL's
_WRAPPER, _TRL_HEAD = "unsloth_pack_wrapper", "unsloth_pack_trl_head"
SLOT_ATTRIBUTES = (_WRAPPER, _TRL_HEAD)
_SYNONYMS = dict.fromkeys(("segment_ids", "document_ids", "doc_ids", "sequence_ids"), "seq_idx")
_SIMILARITY = 0.75  # of difflib, from 0 to 1
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


@cache
def find_closest_keyword(name: str) -> str | None:
    """Return the row keyword that `name` seems to stand for, or None.

    transformers ignores unknown keywords, so a misspelt one would turn the row into one document.
    """
    if name in ROW_KEYWORDS:
        return None
    return _SYNONYMS.get(name) or next(iter(get_close_matches(name, ROW_KEYWORDS, 1, _SIMILARITY)), None)


def take_row(
    inputs: Mapping[str, Any],
    kwargs: dict[str, Any],
    unpad: Callable[[PaddedBatch | None], PaddedBatch | None],
) -> PackedRow | PaddedBatch | None:
    """Take the packed row out of a model call; None for an ordinary batch that keeps its padding.

    A trainer that knows the row or the padded batch beforehand passes it as `packed_row`.

    Args:
        inputs: the decoder's named arguments.
        kwargs: the call's others, of which `packed_row` and `ROW_KEYWORDS` are taken.
        unpad: returns the `PaddedBatch` of an ordinary batch that is to lose its padding, perhaps known.

    Raises:
        InputError: as `describe_call`; input ids that are not `[B, T]`; a keyword that is nearly one of
            `ROW_KEYWORDS`.
    """
    for name in kwargs:
        if (keyword := find_closest_keyword(name)) is not None:
            raise InputError(f"{name} is no argument of the model; do you mean {keyword}?")
    known = kwargs.pop("packed_row", None)
    descriptions = {name: x for name in ROW_KEYWORDS if (x := kwargs.pop(name, None)) is not None}
    ids = inputs["input_ids"]
    if ids is not None and getattr(ids, "ndim", 0) != 2:
        actual = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"input_ids is {actual}; give a tensor [B, T], of a packed row [1, T]")
    tokens = inputs["inputs_embeds"] if ids is None else ids
    if tokens is None:
        return None
    if known is not None and known.shape != tokens.shape[:2]:
        problem = (
            f"packed_row describes {list(known.shape)} tokens, the input ids are {list(tokens.shape[:2])}"
        )
        raise InputError(f"{problem}; give their own")
    if isinstance(known, PackedRow):
        return known.on(tokens.device)
    batch = None if descriptions else unpad(known)
    return describe_call(inputs, descriptions, tokens) if batch is None else batch


@dataclass
class ForwardCall:
    """A call that has come in."""

    # its packed row, or the padded batch that becomes one inside the decoder; None for a batch that keeps its
    # padding
    described: PackedRow | PaddedBatch | None
    inputs: dict[str, Any]  # the decoder's named arguments
    rest: dict[str, Any]  # the others; neither the row's nor the loss's
    images: Any = None  # pixels and grids that were taken out of `rest`
    features: Any = None  # the tower's output for them, if it is there before the decoder runs
    # counts that are 0 in a right call, on their way from the device, each with the message of its error
    counts: list[tuple[HostCopy, str]] = field(default_factory=list)

    @property
    def row(self) -> PackedRow | None:
        """Return the caller's packed row, if there is one."""
        return self.described if isinstance(self.described, PackedRow) else None

    @property
    def packed_row(self) -> PackedRow:
        """Return the row that the decoder runs; only where there is one."""
        assert self.described is not None
        return self.described.row if isinstance(self.described, PaddedBatch) else self.described

    @property
    def has_branches(self) -> bool:
        """Return whether segments of the caller's packed row continue others."""
        return self.row is not None and self.row.parent is not None

    def refuse_branches(self, why_no_head: str) -> None:
        """Refuse a call with such a row whose loss cannot be computed with the head."""
        if self.has_branches:
            raise InputError(f"labels of a row with parents need the head: {why_no_head}; leave parents out")

    def before_next_token(self, hidden_BTC: Tensor) -> Tensor:
        """Return the hidden states that predict the token behind each, for a loss of shifted labels."""
        return hidden_BTC if self.row is None else self.row.before_next_token(hidden_BTC)

    def require_zero(self, count: Tensor, message: str) -> None:
        """Raise InputError unless `count` is 0: at once on the host, else in `check_counts`.

        In the message `{}` stands for the count.
        """
        self.counts.append((HostCopy(count), message))
        if count.device.type == "cpu":
            self.check_counts()

    def check_counts(self) -> None:
        """Raise InputError if a count is not 0. Waits for the device, so call it after the decoder."""
        for copied, message in self.counts:
            if count := int(copied.read()):
                raise InputError(message.format(count))
        self.counts.clear()

    def describe(self, row: PackedRow) -> None:
        """Replace the row by one with more details."""
        batch = self.described if isinstance(self.described, PaddedBatch) else None
        self.described = row if batch is None else replace(batch, row=row)


def name_images(arguments: Mapping[str, object]) -> list[str]:
    """Name the arguments of a call that hold images or the like."""
    return [name for name in _IMAGE_KEYWORDS if arguments.get(name) is not None]


class StepLabels:
    """The labels `[B, T]` of a call, checked, and masked where no loss may see them.

    Build it before the decoder runs: it takes arguments from the call's `rest`, and adds checks to the call.
    `from_trl`: TRL calls, which counts labels without telling the model.
    """

    def __init__(self, model: FastCausalLM, call: ForwardCall, labels: Tensor | None, from_trl: bool):
        self.ignore_index: int = call.rest.pop("ignore_index", IGNORE_INDEX)
        self.num_items: Tensor | float | None = call.rest.pop("num_items_in_batch", None)
        self._model, self._row = model, call.row
        shape = None if call.row is None else call.row.shape
        n_outputs = None if has_own_loss(model) else count_head_outputs(model)

        def check(name: str, x: Tensor | None) -> Tensor | None:
            return None if x is None else check_labels(name, x, shape, n_outputs, self.ignore_index)

        self.labels = check("labels", labels)
        self.shift_labels = check("shift_labels", call.rest.pop("shift_labels", None))
        if call.row is not None:
            self._mask(call, call.row, from_trl)

    def shift(self) -> Tensor:
        """Return `[B, T]`: of every token, the label that it predicts."""
        if self.shift_labels is not None:
            return self.shift_labels
        if self.labels is None:
            raise InputError("fused_lm_head=True scores labels, but there are none; give labels")
        return F.pad(self.labels, (0, 1), value=self.ignore_index)[..., 1:]

    def as_arguments(self) -> dict[str, object]:
        """Return the labels and options that another forward needs for its loss."""
        arguments: dict[str, object] = {"labels": self.labels, "shift_labels": self.shift_labels}
        arguments["num_items_in_batch"] = self.num_items
        if self.ignore_index != IGNORE_INDEX:
            arguments["ignore_index"] = self.ignore_index
        return {name: value for name, value in arguments.items() if value is not None}

    def watch(self, logits: Tensor) -> None:
        """Detect labels at document starts that a loss outside the model trains on `[B, T, V]`.

        Logits without a label get no gradient, so one at the last token of a document shows that the next
        document's first token is trained. It is refused where the caller says how many labels it has, as
        `Trainer` does even when it keeps the labels. Else it causes a warning: a loss without labels may have
        it.
        """
        row = self._row
        if row is None or not (logits.requires_grad and self._model.training):
            return
        is_counted = self.num_items is not None and self.labels is None
        has_others = logits.shape[:-1] == row.shape and len(row.places_before_others) > 0
        if not (has_others and (is_counted or self._is_first_check())):
            return
        places = row.upload(row.places_before_others)

        def look(grad: Tensor) -> None:
            if not bool(grad.reshape(-1, grad.shape[-1]).index_select(0, places.to(grad.device)).any()):
                return
            if is_counted:
                raise InputError(f"a loss outside of the model trains labels at document starts; {_REMEDY}")
            logger.warning("a loss outside of the model trains labels at document starts; %s", _REMEDY)

        logits.register_hook(look)

    def _is_first_check(self) -> bool:
        """Return whether uncounted labels were never checked: on a device each check waits."""
        is_first = not self._model.has_checked_boundary_labels
        self._model.has_checked_boundary_labels = True
        return is_first

    def _mask(self, call: ForwardCall, row: PackedRow, from_trl: bool) -> None:
        ignore_index, is_shifted = self.ignore_index, self.shift_labels is not None
        counted = self.shift_labels if is_shifted else self.labels  # by a trainer
        if counted is not None and self.num_items is not None:
            refuse_counted_labels(call, row, counted, is_shifted, ignore_index)
        elif from_trl and self.labels is not None and self._model.training and self._is_first_check():
            count = int(_count_unscored(row, self.labels, False, ignore_index))  # waits for the device
            if count:
                logger.warning(_MAY_BE_COUNTED, count, _REMEDY)
        if self.labels is not None:
            self.labels = row.mask_labels(self.labels, self.ignore_index)
        if self.shift_labels is not None:
            self.shift_labels = row.mask_labels(self.shift_labels, self.ignore_index, is_shifted=True)


def check_labels(
    name: str,
    labels: object,
    shape: tuple[int, ...] | None,
    n_outputs: int | None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return labels as int64 after checking them; only values on a CPU are read.

    Args:
        shape: (B, T) of a packed row; None for an ordinary batch, which may have other labels.
        n_outputs: of the head; None where it is unknown, or where labels may be something else than ids.

    Raises:
        InputError: no tensor, another shape, no whole numbers, or ids that the head does not have.
    """
    if not isinstance(labels, Tensor):
        raise InputError(f"{name} are {type(labels).__name__}; give a tensor [B, T]")
    if shape is not None and labels.shape != shape:
        raise InputError(
            f"{name} have shape {list(labels.shape)}, the input ids {list(shape)}; give one label a token"
        )
    if n_outputs is None:
        return labels
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise InputError(f"{name} are {labels.dtype}; give token ids, as whole numbers")
    labels = labels.long()
    if labels.device.type == "cpu" and labels.numel():
        low, high = labels.masked_fill(labels == ignore_index, 0).aminmax()
        if low < 0 or high >= n_outputs:
            raise InputError(
                f"{name} reach from {low} to {high}, the head has {n_outputs} outputs; give smaller ids, or "
                f"{ignore_index} for none"
            )
    return labels


def refuse_counted_labels(
    call: ForwardCall, row: PackedRow, labels: Tensor, is_shifted: bool, ignore_index: int
) -> None:
    """Refuse unmasked labels `[B, T]` that a trainer counted, although they carry no loss."""
    message = "labels at document starts are counted in num_items_in_batch but carry no loss; "
    call.require_zero(_count_unscored(row, labels, is_shifted, ignore_index), message + _REMEDY)


def _count_unscored(row: PackedRow, labels: Tensor, is_shifted: bool, ignore_index: int) -> Tensor:
    places = row.places_before_unscored if is_shifted else row.predicted_unscored
    on_device = row.once(("countable", is_shifted), lambda: row.upload(places))
    return (labels.to(row.device).reshape(-1).index_select(0, on_device) != ignore_index).sum()

"""Columns that change the training in the tools they were made for, but cannot act here. They are refused.

A row without such a value (null, an empty list of images, a reply that is labelled good) is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.columns import holds_turns
from unsloth_pack.data.rows import MEDIA, Column, ColumnsRefused, Offer, Piece, fail, role_of

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_PREFERENCE = "are preferences, not trained here;"
# Columns that together make another kind of data, and what they mean
_OTHER_DATA = {
    ("chosen", "rejected"): _PREFERENCE,
    ("chosen_messages", "rejected_messages"): _PREFERENCE,
    ("preferred_output", "non_preferred_output"): _PREFERENCE,
    ("completions", "labels"): "judge steps, not trained here; write good ones as completion, and",
}


@dataclass(frozen=True)
class _Acting:
    """A column that acts in another tool.

    Args:
        is_harmless: whether this value would change nothing.
        problem, remedy: of any other value. It may always be left out.
        to: the name under which the column could act.
    """

    is_harmless: Callable[[Any], bool]
    problem: str
    remedy: str = ""
    to: str | None = None


def _is_none(value: Any) -> bool:
    return value is None


def _is_empty(value: Any) -> bool:
    return value is None or value in ([], {}) or (isinstance(value, str) and value.strip() in ("", "[]"))


def _is_one(value: Any) -> bool:
    return value is None or value == 1


def _is_not_bad(value: Any) -> bool:
    return str(value).strip().lower() not in ("false", "0", "0.0")


def _marks_nothing(value: Any) -> bool:
    is_other = isinstance(value, Mapping) and not (value.get("ref") or value.get("bbox"))
    return is_other or _is_empty(value)


def _is_no_role(value: Any) -> bool:
    return not isinstance(value, str) or role_of(value.lower()) is None


_MEDIA = _Acting(_is_empty, "images, video or sound, not supported", "remove the row")
_STORED = _Acting(
    _is_empty,
    "images, which only some models take",
    to="image",
)
_TOKENS = _Acting(_is_none, "tokens or a mask of them made elsewhere")
_WEIGHT = _Acting(_is_one, "a weight, but every token weighs the same")
_ANSWER = _Acting(_is_empty, "part of a preference, not trained here")
_LABEL = _Acting(_is_not_bad, "a reply that is labelled bad", "remove the row")
_CHOICE = _Acting(_is_none, "what --train_on_responses_only says here")
_PREFERRED = ("chosen", "chosen_messages", "preferred_output")
_REFUSED = ("rejected", "rejected_messages", "rejected_response", "non_preferred_output")
_ACTING = {
    **dict.fromkeys(("input_ids", "labels", "assistant_masks", "completion_mask", "loss_mask"), _TOKENS),
    **dict.fromkeys(("weight", "loss_weight", "sample_weight"), _WEIGHT),
    **dict.fromkeys((*_PREFERRED, *_REFUSED), _ANSWER),
    **dict.fromkeys(("label", "kto_tag"), _LABEL),
    **dict.fromkeys(("train_on_input", "train_on_inputs"), _CHOICE),
    "mask": _Acting(_is_no_role, _CHOICE.problem),  # of NeMo
    "enable_thinking": _Acting(_is_none, "a variable for chat_template_kwargs"),
    "objects": _Acting(_marks_nothing, "boxes not put into the text", "put them in"),
    "history": _Acting(_is_empty, "earlier turns", "write the row as messages"),
    "functions": _Acting(_is_empty, "an older form of tools", to="tools"),
    "parallel_tool_calls": _Acting(_is_one, "an option no chat template takes"),
}
_OF_CONVERSATIONS = _Acting(_is_empty, "not used by rows of strings", "write the row as messages")


def refuse_other_data(column_names: Collection[str], first: Mapping[str, Any]) -> None:
    """Refuse data for another kind of training, such as preferences.

    Raises:
        InputError: it names the columns, and what the first row has in them.
    """
    for columns, meaning in _OTHER_DATA.items():
        if set(columns) <= set(column_names):
            better, worse = map(Column, columns)
            offered = _way_to_keep(columns[0], columns[1], column_names, first)
            way: list[Piece] = ["give ", Offer(offered)] if offered else ["leave out ", worse]
            raise ColumnsRefused("columns ", better, ", ", worse, f" {meaning} ", *way)


def _way_to_keep(
    better: str, worse: str, names: Collection[str], first: Mapping[str, Any]
) -> dict[str, str | None]:
    """The mapping that keeps the better answer; empty where none does."""
    if better == "completions" or "conversations" in names or "messages" in names:
        return {}
    if "prompt" in names:
        return {better: "completion", worse: None}
    if "instruction" in names:
        return {better: "output", worse: None}
    turns = first.get(better) or []
    is_whole = holds_turns(turns, with_answer=True) and not holds_turns(turns[:1], with_answer=True)
    return {better: "messages", worse: None} if is_whole else {}


def refuse_media(dataset: datasets.Dataset, numbers: range | None = None) -> None:
    """Refuse the first row with images, video or sound, whatever their column is called.

    Args:
        numbers: of the rows, to name them; None for 0, 1, 2, ...

    Raises:
        InputError: it names row and column.
    """
    from datasets import Audio, Image, Video

    media = {name: _MEDIA for name, kind in dataset.features.items() if _holds(kind, Audio | Video)}
    images = {name: _STORED for name, kind in dataset.features.items() if _holds(kind, Image)}
    rules = media | images | dict.fromkeys(MEDIA, _MEDIA)
    _refuse(dataset, rules, numbers or range(len(dataset)))


def refuse_acting_columns(
    dataset: datasets.Dataset, numbers: range, *, are_text: bool, unused: Collection[str] = ()
) -> None:
    """Refuse the first value that would change the training in the tool it was made for.

    Args:
        numbers: of the rows, to name them.
        are_text: whether the rows are plain text.
        unused: columns that act beside conversations, but not beside these rows.

    Raises:
        InputError: it names row, column and value.
    """
    rules = dict(_ACTING)
    if are_text:
        del rules["label"]  # a class
    _refuse(dataset, rules, numbers)
    _refuse(dataset, dict.fromkeys(unused, _OF_CONVERSATIONS), numbers)


def refuse_acting_values(index: int, row: Mapping[str, Any]) -> None:
    """As `refuse_acting_columns`, for one row of conversations outside a data set.

    Raises:
        InputError: it names row, column and value.
    """
    for name, value in row.items():
        rule = _ACTING.get(name)
        if rule is not None and not rule.is_harmless(value):
            fail(index, name, rule.problem, value, rule.remedy or "remove the column")


def _refuse(dataset: datasets.Dataset, rules: dict[str, _Acting], numbers: range) -> None:
    for name in dataset.column_names:
        if rule := rules.get(name):
            for index, value in zip(numbers, _values(dataset, name), strict=True):
                if not rule.is_harmless(value):
                    ways: list[Piece] = [f"{rule.remedy}, or " if rule.remedy else "", "give "]
                    ways += [Offer({name: rule.to}), " or "] if rule.to else []
                    fail(index, name, rule.problem, value, *ways, Offer({name: None}))


def _values(dataset: datasets.Dataset, name: str) -> Iterator[Any]:
    """The values of a column, without decoding images."""
    for table in dataset.select_columns(name).with_format("arrow").iter(batch_size=1000):
        yield from map(_value, table[name])


def _value(scalar: pa.Scalar) -> Any:
    import pyarrow as pa

    value = scalar.as_py()
    return json.loads(value) if isinstance(scalar.type, pa.JsonType) and value is not None else value


def _holds(feature: Any, kind: Any) -> bool:
    """Whether a column has values of a kind, or objects of bytes and path, which the kinds are without their
    names."""
    if isinstance(feature, dict):
        return {*feature} == {"bytes", "path"} or any(_holds(inner, kind) for inner in feature.values())
    inner = getattr(feature, "feature", None)  # of a list
    return isinstance(feature, kind) or (inner is not None and _holds(inner, kind))

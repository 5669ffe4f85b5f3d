"""Columns: those of the formats, others that are mapped to them, and those that act only in other tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from unsloth_pack.data.rows import MEDIA, ColumnMapping, Row, fail, offer, role_of
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

# The columns that the formats have, to which others may be mapped
KNOWN_COLUMNS = {
    *("messages", "conversations", "tools", "chat_template_kwargs"),
    *("instruction", "input", "output", "system"),
    *("prompt", "completion", "response", "text"),
    *("chosen", "rejected", "label"),  # of preferences
}
IMAGE_COLUMNS = ("images", "image")  # and so to these, for a model that takes images


def check_mapping(columns: ColumnMapping, names: Sequence[str], data_set: str) -> None:
    """Refuse a mapping of a column that is not among these names of a data set, or to one that is."""
    if missing := [name for name in columns if name not in names]:
        raise InputError(
            f"{data_set}: columns maps {', '.join(map(repr, missing))}, and there is no such column among "
            f"{', '.join(names)}; correct it"
        )
    for name, to in columns.items():
        if to is not None and to != name and to in names and to not in columns:
            raise InputError(
                f"{data_set}: columns maps {name!r} to {to!r}, and there is a column {to!r} already; leave "
                f"it out with {offer({**columns, to: None})}"
            )


def renamed(rows: datasets.Dataset, columns: ColumnMapping) -> datasets.Dataset:
    """The rows with their columns called as `columns` says, without those that it maps to None."""
    there = {name: to for name, to in columns.items() if name in rows.column_names and to != name}
    rows = rows.remove_columns([name for name, to in there.items() if to is None])
    return rows.rename_columns({name: to for name, to in there.items() if to is not None})


def check_used(columns: ColumnMapping, unused: Sequence[str]) -> None:
    """Refuse a column that was mapped for nothing, as its new name is `unused` in the format of the rows."""
    for name, to in columns.items():
        if to is not None and to in unused:
            raise InputError(
                f"columns maps {name!r} to {to!r}, which the rows are not made of; map what goes with it "
                f"too, or leave it out as {name}="
            )


def check_shared(columns: ColumnMapping, names: Mapping[str, Sequence[str]]) -> None:
    """Refuse a mapping of a column that none of the data sets has; `names` are the columns of each."""
    for name in columns:
        if names and not any(name in of_set for of_set in names.values()):
            have = ", ".join(f"{data_set} ({', '.join(of_set)})" for data_set, of_set in names.items())
            raise InputError(f"columns maps {name!r}, and no data set has such a column: {have}; correct it")


def refuse_text_of_turns(names: Iterable[str], first_rows: Sequence[Row]) -> None:
    """Refuse a column whose first rows hold the JSON text of turns."""
    for name in names:
        if any(_holds_text_of_turns(row.get(name)) for row in first_rows):
            problem = "holds turns as JSON text; write them as a list of objects, as .jsonl has it"
            raise InputError(f"column {name!r} {problem}")


def _holds_text_of_turns(value: object) -> bool:
    """Whether a value is the JSON text of a list of turns."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return False
    with suppress(ValueError, RecursionError):
        turns = json.loads(value)
        return bool(turns) and isinstance(turns[0], dict) and bool(turns[0].keys() & {"role", "from"})
    return False


# Columns that change the training in the tools they were made for, but cannot act here, are refused. A row
# without such a value (null, an empty list of images, a reply that is labelled good) is trained on.

_PREFERENCES = {
    "chosen": "rejected",
    "chosen_messages": "rejected_messages",
    "preferred_output": "non_preferred_output",
}


class _Acting(NamedTuple):
    """A column that acts in another tool."""

    is_harmless: Callable[[Any], bool]  # whether a value would change nothing
    problem: str  # of any other value
    remedy: str = ""  # the column may always be left out
    to: str | None = None  # the name under which it could act


def _is_none(value: object) -> bool:
    return value is None


def _is_empty(value: object) -> bool:
    return value is None or value in ([], {}) or (isinstance(value, str) and value.strip() in ("", "[]"))


def _is_one(value: object) -> bool:
    return value is None or value == 1


def _is_no_bad_label(value: object) -> bool:
    return str(value).strip().lower() not in ("false", "0", "0.0")


def _is_no_role(value: object) -> bool:
    return role_of(value.lower() if isinstance(value, str) else value) is None


def _marks_nothing(value: object) -> bool:
    is_other = isinstance(value, Mapping) and not (value.get("ref") or value.get("bbox"))
    return is_other or _is_empty(value)


_TOKENS = _Acting(_is_none, "tokens or a mask of them made elsewhere")
_WEIGHT = _Acting(_is_one, "a weight, but every token weighs the same")
_PREFERRED = _Acting(_is_empty, "part of a preference")
_LABEL = _Acting(_is_no_bad_label, "a reply that is labelled bad", "remove the row")
_CHOICE = _Acting(_is_none, "what --train_on_responses_only says here")
_ACTING = {
    **dict.fromkeys(("input_ids", "labels", "assistant_masks", "completion_mask", "loss_mask"), _TOKENS),
    **dict.fromkeys(("weight", "loss_weight", "sample_weight"), _WEIGHT),
    **dict.fromkeys((*_PREFERENCES, *_PREFERENCES.values(), "rejected_response"), _PREFERRED),
    **dict.fromkeys(("label", "kto_tag"), _LABEL),
    **dict.fromkeys(("train_on_input", "train_on_inputs"), _CHOICE),
    "mask": _Acting(_is_no_role, _CHOICE.problem),  # of NeMo: the role whose turns carry no loss
    "enable_thinking": _Acting(_is_none, "a variable for chat_template_kwargs"),
    "objects": _Acting(_marks_nothing, "boxes not put into the text", "put them in"),
    "history": _Acting(_is_empty, "earlier turns", "write the row as messages"),
    "functions": _Acting(_is_empty, "an older form of tools", to="tools"),
    "parallel_tool_calls": _Acting(_is_one, "an option no chat template takes"),
}
_MEDIA = _Acting(_is_empty, "images, video or sound, not supported", "remove the row")
_OF_CONVERSATIONS = _Acting(_is_empty, "not used by rows of strings", "write the row as messages")


def refuse_preferences(column_names: Collection[str]) -> None:
    """Refuse rows of two answers, and say how to keep the better one."""
    for better, worse in _PREFERENCES.items():
        if {better, worse} <= {*column_names}:
            answers = {"prompt": "completion", "instruction": "output"}
            to = next((answers[name] for name in answers if name in column_names), "messages")
            raise InputError(
                f"columns {better}, {worse} are preferences; train with --objective dpo, or on the better "
                f"answers with {offer({better: to, worse: None})}"
            )


Rules = Mapping[str, _Acting]


def rules_of(column_names: Collection[str], *, are_text: bool, unused: Collection[str] = ()) -> Rules:
    """The rules for the columns of a data set without images.

    Args:
        are_text: whether the rows are plain text, whose `label` is a class.
        unused: columns that act beside conversations, but not beside these rows.
    """
    rules = {**_ACTING, **dict.fromkeys(MEDIA, _MEDIA), **dict.fromkeys(unused, _OF_CONVERSATIONS)}
    return {name: rules[name] for name in column_names if name in rules and (name != "label" or not are_text)}


def refuse_acting_values(index: int, row: Row, rules: Rules = _ACTING) -> None:
    """Refuse a value that would change the training in the tool it was made for."""
    for name, rule in rules.items():
        if not rule.is_harmless(row.get(name)):
            ways = [offer({name: rule.to})] if rule.to else []
            remedy = f"{rule.remedy}, or " if rule.remedy else ""
            remedy += f"give {' or '.join([*ways, offer({name: None})])}"
            fail(index, name, rule.problem, row[name], remedy)


def refuse_media(dataset: datasets.Dataset, number: int) -> None:
    """Refuse columns of images, video or sound, whatever they are called; the first row has this number."""
    for name, kind in dataset.features.items():
        if _holds_media(kind) and dataset.data[name].null_count < dataset.data.num_rows:
            remedy = f"give {offer({name: 'image'})} or {offer({name: None})}"
            fail(number, name, "images, video or sound, which only some models take", kind, remedy)


def _holds_media(feature: Any) -> bool:
    """Whether a column has images, video or sound, or objects of bytes and path, as which they are stored."""
    from datasets import Audio, Image, Video

    if isinstance(feature, dict):
        return {*feature} == {"bytes", "path"} or any(map(_holds_media, feature.values()))
    inner = getattr(feature, "feature", None)  # of a list
    return isinstance(feature, Audio | Image | Video) or (inner is not None and _holds_media(inner))

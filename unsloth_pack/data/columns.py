"""Columns: those of the formats, others that are mapped to them, and those that act only in other tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.rows import (
    MEDIA,
    ColumnMapping,
    Row,
    fail,
    offer,
    own_name,
    role_of,
    telling_names,
    write_mapping,
)
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

# The columns that the formats have, to which others may be mapped
KNOWN_COLUMNS = {
    *("messages", "conversations", "tools", "chat_template_kwargs"),
    *("instruction", "input", "output", "system"),
    *("prompt", "completion", "response", "text"),
}
IMAGE_COLUMNS = ("images", "image")  # and so to these, for a model that takes images

# What other data sets call a question, a passage beside it, an answer, and text alone
_QUESTION = (
    *("prompt", "question", "query", "instruction", "problem", "task", "request", "human", "user", "q"),
    *("input", "source", "title"),
)
_PASSAGE = ("context", "passage", "input", "background")
_ANSWER = (
    *("completion", "answer", "response", "output", "solution", "reply", "assistant", "bot", "gpt"),
    *("chosen", "target", "summary", "a"),
)
_TEXT = ("text", "content", "document", "body", "article", "passage", "story", "code", "sentence")


def renamed(rows: datasets.Dataset, columns: ColumnMapping, *, may_lack: bool = False) -> datasets.Dataset:
    """The rows with their columns called as `columns` says, without those that it maps to None.

    Args:
        may_lack: whether a column may be missing, as in a part of a stream whose rows do not have it.
    """
    names = rows.column_names
    missing = [name for name in columns if name not in names]
    if missing and not may_lack:
        raise InputError(
            f"columns maps {', '.join(map(repr, missing))}, and there is no such column among "
            f"{', '.join(names)}; correct it"
        )
    if not may_lack and names and all(columns.get(name, name) is None for name in names):
        raise InputError(
            f"columns leaves out every column ({', '.join(names)}), so that nothing is left; keep one"
        )
    new = {name: to for name, to in columns.items() if name in names and to is not None and to != name}
    for name, to in new.items():
        if to in names and to not in columns:
            raise InputError(
                f"columns maps {name!r} to {to!r}, and there is a column {to!r} already; leave that out with "
                f"{write_mapping({to: None, **columns})}"
            )
    rows = rows.remove_columns([name for name, to in columns.items() if name in names and to is None])
    return rows.rename_columns(new)


def check_used(columns: ColumnMapping, unused: Sequence[str], *, are_shared: bool = False) -> None:
    """Refuse a column that was mapped for nothing, since the rows have another format than was meant.

    Args:
        unused: the columns that nothing is made of, by their new names.
        are_shared: whether other data sets have the same mapping.
    """
    for name, to in columns.items():
        if to is not None and to in unused:
            with telling_names(columns, are_shared=are_shared):
                way = write_mapping({name: None})
            raise InputError(
                f"columns maps {name!r} to {to!r}, which the rows are not made of; map what goes with it "
                f"too, or give {way}"
            )


def check_shared(columns: ColumnMapping, names: Mapping[str, Sequence[str]]) -> None:
    """Refuse a mapping of a column that none of the data sets has; `names` are the columns of each."""
    for name in columns:
        if not any(name in of_set for of_set in names.values()):
            have = ", ".join(f"{data_set} ({', '.join(of_set)})" for data_set, of_set in names.items())
            raise InputError(f"columns maps {name!r}, and no data set has such a column: {have}; correct it")


def suggested(names: Sequence[str], first: Row) -> dict[str, str]:
    """A mapping to a format that the names and the first row speak for; empty where nothing does."""
    strings = [name for name in names if isinstance(first.get(name), str)]
    system = _named(strings, ("system",))
    beside_turns = {system: "system"} if system not in (None, "system") else {}
    if turns := next((name for name in names if holds_turns(first.get(name), with_answer=True)), None):
        return {**beside_turns, turns: "messages" if "role" in first[turns][0] else "conversations"}
    strings = [name for name in strings if name != system]
    answer = _named(strings, _ANSWER)
    question = _named([name for name in strings if name != answer], _QUESTION)
    if answer and question:
        beside = _named([name for name in strings if name not in (answer, question)], _PASSAGE)
        if beside or system:
            passage = {beside: "input"} if beside else {}
            return {**beside_turns, question: "instruction", **passage, answer: "output"}
        return {question: "prompt", answer: "completion"}
    if any(first.get(name) for name in IMAGE_COLUMNS):
        return {}
    if text := _named(strings, _TEXT):
        return {text: "text"}
    return {strings[0]: "text"} if len(strings) == 1 and not answer else {}


def _named(names: Sequence[str], words: Sequence[str]) -> str | None:
    """The name that is one of the words, or holds it as a word of its own; the first word wins."""

    def has_word(name: str, word: str) -> bool:
        spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
        return len(word) > 1 and word in re.split(r"[^a-z]+", spaced)

    same = (name for word in words for name in names if name.lower().removesuffix("s") == word)
    alike = (name for word in words for name in names if has_word(name, word))
    return next(same, None) or next(alike, None)


def holds_turns(value: Any, *, with_answer: bool = False) -> bool:
    """Whether a value is a list of turns; if `with_answer`, of which one answers."""
    are_turns = isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)
    if not are_turns or not value[0].keys() & {"role", "from"}:
        return False
    return not with_answer or any(
        role_of(turn.get("role", turn.get("from"))) == "assistant" for turn in value
    )


def holds_text_of_turns(value: object) -> bool:
    """Whether a value is the JSON text of a list of turns."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return False
    try:
        return holds_turns(json.loads(value))
    except (ValueError, RecursionError):
        return False


# Columns that change the training in the tools they were made for, but cannot act here, are refused. A row
# without such a value (null, an empty list of images, a reply that is labelled good) is trained on.

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


def _marks_nothing(value: object) -> bool:
    is_other = isinstance(value, Mapping) and not (value.get("ref") or value.get("bbox"))
    return is_other or _is_empty(value)


_MEDIA = _Acting(_is_empty, "images, video or sound, not supported", "remove the row")
_STORED = _Acting(_is_empty, "images, which only some models take", to="image")
_TOKENS = _Acting(_is_none, "tokens or a mask of them made elsewhere")
_WEIGHT = _Acting(_is_one, "a weight, but every token weighs the same")
_PREFERRED = _Acting(_is_empty, "part of a preference, not trained here")
_LABEL = _Acting(
    lambda value: str(value).strip().lower() not in ("false", "0", "0.0"),
    "a reply that is labelled bad",
    "remove the row",
)
_CHOICE = _Acting(_is_none, "what --train_on_responses_only says here")
_ACTING = {
    **dict.fromkeys(("input_ids", "labels", "assistant_masks", "completion_mask", "loss_mask"), _TOKENS),
    **dict.fromkeys(("weight", "loss_weight", "sample_weight"), _WEIGHT),
    **dict.fromkeys(("chosen", "chosen_messages", "preferred_output", "rejected"), _PREFERRED),
    **dict.fromkeys(("rejected_messages", "rejected_response", "non_preferred_output"), _PREFERRED),
    **dict.fromkeys(("label", "kto_tag"), _LABEL),
    **dict.fromkeys(("train_on_input", "train_on_inputs"), _CHOICE),
    # of NeMo: the role whose turns carry no loss
    "mask": _Acting(
        lambda value: role_of(value.lower() if isinstance(value, str) else value) is None, _CHOICE.problem
    ),
    "enable_thinking": _Acting(_is_none, "a variable for chat_template_kwargs"),
    "objects": _Acting(_marks_nothing, "boxes not put into the text", "put them in"),
    "history": _Acting(_is_empty, "earlier turns", "write the row as messages"),
    "functions": _Acting(_is_empty, "an older form of tools", to="tools"),
    "parallel_tool_calls": _Acting(_is_one, "an option no chat template takes"),
}
_OF_CONVERSATIONS = _Acting(_is_empty, "not used by rows of strings", "write the row as messages")


def refuse_other_data(column_names: Collection[str], first: Row) -> None:
    """Refuse data for another kind of training, such as preferences."""
    for (better, worse), meaning in _OTHER_DATA.items():
        if {better, worse} <= set(column_names):
            way = _way_to_keep(better, worse, column_names, first)
            remedy = f"give {offer(way)}" if way else f"leave out {own_name(worse)}"
            raise InputError(f"columns {own_name(better)}, {own_name(worse)} {meaning} {remedy}")


def _way_to_keep(better: str, worse: str, names: Collection[str], first: Row) -> dict[str, str | None]:
    """The mapping that keeps the better answer; empty where none does."""
    if better == "completions" or "conversations" in names or "messages" in names:
        return {}
    for question, answer in (("prompt", "completion"), ("instruction", "output")):
        if question in names:
            return {better: answer, worse: None}
    turns = first.get(better) or []
    is_whole = holds_turns(turns, with_answer=True) and not holds_turns(turns[:1], with_answer=True)
    return {better: "messages", worse: None} if is_whole else {}


def refuse_media(dataset: datasets.Dataset, numbers: range) -> None:
    """Refuse the first row with images, video or sound, whatever their column is called."""
    from datasets import Audio, Image, Video

    media = {name: _MEDIA for name, kind in dataset.features.items() if _holds(kind, Audio | Video)}
    images = {name: _STORED for name, kind in dataset.features.items() if _holds(kind, Image)}
    _refuse(dataset, media | images | dict.fromkeys(MEDIA, _MEDIA), numbers)


def refuse_acting_columns(
    dataset: datasets.Dataset, numbers: range, *, are_text: bool, unused: Collection[str] = ()
) -> None:
    """Refuse the first value that would change the training in the tool it was made for.

    Args:
        numbers: of the rows, to name them.
        are_text: whether the rows are plain text, whose `label` is a class.
        unused: columns that act beside conversations, but not beside these rows.
    """
    rules = {**_ACTING, **dict.fromkeys(unused, _OF_CONVERSATIONS)}
    _refuse(dataset, {name: rules[name] for name in rules if name != "label" or not are_text}, numbers)


def refuse_acting_values(index: int, row: Row) -> None:
    """As `refuse_acting_columns`, for one row of conversations outside a data set."""
    for name, value in row.items():
        rule = _ACTING.get(name)
        if rule is not None and not rule.is_harmless(value):
            fail(index, name, rule.problem, value, rule.remedy or "remove the column")


def _refuse(dataset: datasets.Dataset, rules: Mapping[str, _Acting], numbers: range) -> None:
    for name in dataset.column_names:
        if rule := rules.get(name):
            for index, value in zip(numbers, _values(dataset, name), strict=True):
                if not rule.is_harmless(value):
                    ways = [offer({name: rule.to})] if rule.to else []
                    remedy = f"{rule.remedy}, or " if rule.remedy else ""
                    remedy += f"give {' or '.join([*ways, offer({name: None})])}"
                    fail(index, name, rule.problem, value, remedy)


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

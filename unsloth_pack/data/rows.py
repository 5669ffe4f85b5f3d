"""Checks of one field of one row. If it cannot be trained on, InputError names row, column and value."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from unsloth_pack.data.columns import as_flag, as_given
from unsloth_pack.errors import InputError

# Refuse data: the InputError names row, column, value and remedy.

Columns = Mapping[str, "str | None"]


@dataclass(frozen=True)
class Names:
    """How the data names its columns.

    Args:
        columns: the mapping by which they were renamed.
        are_shared: whether other data sets have the same mapping.
    """

    columns: Columns = field(default_factory=dict)
    are_shared: bool = False

    def of(self, column: str) -> str:
        return next((name for name, to in self.columns.items() if to == column), column)

    def way_to_give(self, offered: Columns) -> str:
        """A mapping as it is given, beside what the present one says of other columns."""
        if not self.columns:
            return as_flag(offered)
        new = {self.of(name): to for name, to in offered.items()}
        kept = {name: to for name, to in self.columns.items() if to is None or to not in new.values()}
        return as_given({**kept, **new}, self.are_shared)


@dataclass(frozen=True)
class Column:
    """In a message, a column by the name that the formats have for it."""

    name: str
    is_quoted: bool = False

    def said(self, names: Names) -> str:
        name = names.of(self.name)
        return repr(name) if self.is_quoted else name


@dataclass(frozen=True)
class Offer:
    """In a message, a mapping of columns that would help."""

    columns: Columns

    def said(self, names: Names) -> str:
        return names.way_to_give(self.columns)


Piece = str | Column | Offer


class ColumnsRefused(InputError):
    """What is wrong with columns, in the names that the data has for them.

    Args:
        pieces: of the message.

    Attributes:
        names: those of the data; `telling_names` sets them.
    """

    names = Names()

    def __init__(self, *pieces: Piece):
        super().__init__(_said(pieces, self.names))
        self.pieces = pieces

    def __str__(self) -> str:
        return _said(self.pieces, self.names) if self.names.columns else super().__str__()


def _said(pieces: Iterable[Piece], names: Names) -> str:
    return "".join(each if isinstance(each, str) else each.said(names) for each in pieces)


@contextmanager
def telling_names(columns: Columns, *, are_shared: bool = False) -> Iterator[None]:
    """Errors inside this context name columns as the data did before `columns` renamed them."""
    try:
        yield
    except ColumnsRefused as error:
        error.names = Names(columns, are_shared)
        raise


def fail(index: int, column: str, problem: str, value: Any, *remedy: Piece) -> NoReturn:
    """Raise the InputError for row `index`, with the value shortened."""
    shown = reprlib.repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    said = f": {problem}, got {shown}; "
    raise ColumnsRefused(f"row {index}, column ", Column(column, is_quoted=True), said, *remedy)


def joined(pieces: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Some of them, with commas between."""
    return [piece for number, each in enumerate(pieces) for piece in ([", "] if number else []) + [*each]]


# Keys of a turn that choose what is learned, or hold more than text. They fit the run, or are refused.

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

OF_TURNS = ("messages", "conversations", "prompt", "completion", "response")  # columns that may hold turns
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# of axolotl, OpenAI and Mistral, ms-swift, others, LLaMA-Factory
_MARKS = ("train", "weight", "loss", "loss_mask", "loss_weight", "loss_scale")
_REFUSED_KEYS = {
    **dict.fromkeys(MEDIA, ("holds more than text", "remove the row, or the key to train on its text alone")),
    "function_call": ("has an older form of tool_calls", "write it as tool_calls"),
    "train_detail": (
        "has parts that are excluded from training",
        "remove the row, or the key to train on it",
    ),
}
_READ = {"role", "content", "from", "value", "tool_calls", *_MARKS, *_REFUSED_KEYS}  # by us, or checked
_LOOKED_AT = 1000  # rows


def unread_keys(rows: datasets.Dataset, columns: Iterable[str], template: str) -> tuple[str, ...]:
    """Keys of the turns of the first rows that a chat template does not read, such as `reasoning_content`.

    Args:
        columns: that hold turns, or texts.
        template: its source.
    """
    first, found = rows.select(range(min(_LOOKED_AT, len(rows)))), set[str]()
    for conversation in (value for name in columns for value in first[name] if isinstance(value, list)):
        for turn in (turn for turn in conversation if isinstance(turn, dict)):
            found |= {key for key, value in turn.items() if value} - _READ
    return tuple(
        f"{key} of the turns" for key in sorted(found) if not re.search(rf"\b{re.escape(key)}\b", template)
    )


def check_keys(
    index: int, column: str, name: str, turn: Mapping[str, Any], role: str, learned: Mapping[str, bool]
) -> None:
    """Refuse a key that would change the training in the tool it was made for.

    Args:
        index, column: of the row and its conversation.
        name: of the turn, for the message.
        role: of the turn.
        learned: whether the turns of a role carry loss; a role that it lacks may be marked in either way.

    Raises:
        InputError: a mark contradicts the loss or is neither yes nor no, or there is an image, a sound,
            marks within the text, or a `function_call`.
    """
    for key, (problem, remedy) in _REFUSED_KEYS.items():
        if turn.get(key):
            fail(index, column, f"{name} {problem}", {key: turn[key]}, remedy)
    for key in _MARKS:
        mark = turn.get(key)
        if mark is None:
            continue
        if isinstance(mark, str) or mark not in (0, 1):
            remedy = "remove the turn, or remove the key to train on it"
            fail(index, column, f"{name} has a mark that is neither yes nor no", {key: mark}, remedy)
        if bool(mark) is learned.get(role, bool(mark)):
            continue
        if mark:
            problem, remedy = "is marked to be trained on, but carries no loss here", "remove the key"
        elif role == "assistant":
            problem, remedy = "is excluded from training", "remove the turn, or remove the key to train on it"
        else:
            problem = "is excluded from training"
            remedy = "give --train_on_responses_only, or remove the key to train on it"
        fail(index, column, f"{name} {problem}", {key: mark}, remedy)


Row = Mapping[str, Any]
Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
PLAIN_TURNS = (["role", "content"], ["from", "value"])  # the keys of turns that are two strings
ROLES = frozenset(_ROLES.values())
# Arguments of `apply_chat_template` that say what is done with the text, not what a template reads
_NO_VARIABLES = {
    *("conversation", "chat_template", "tools", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"),
}
KEYS_OF_AN_IMAGE = ("bytes", "image", "path", "url", "base64")  # one of which holds it
KEYS_OF_IMAGES = (*KEYS_OF_AN_IMAGE, "image_url", "images")  # in a part of a message


def role_of(given: Any) -> str | None:
    """The role that a turn names in any format; None for a name that stands for none."""
    return _ROLES.get(given) if isinstance(given, str) else None


def string(index: int, row: Row, column: str, *, may_be_blank: bool = False) -> str:
    """`row[column]`, which must be a string and, unless `may_be_blank`, more than white space."""
    value = row[column]
    if not isinstance(value, str):
        fail(index, column, "expected a string", value, "write it as one or remove the row")
    if not may_be_blank and not value.strip():
        fail(index, column, "expected some text", value, "fill it in or remove the row")
    return value


def optional_string(index: int, row: Row, column: str) -> str:
    """`row[column]`, or "" where it is absent, null or blank."""
    if row.get(column) is None:
        return ""
    value = string(index, row, column, may_be_blank=True)
    return value if value.strip() else ""


def messages(index: int, row: Row, column: str, learned: Mapping[str, bool]) -> list[Message]:
    """The turns of `row[column]` as {role, content}, with their other keys.

    Only an assistant turn with `tool_calls` may lack content.

    Args:
        learned: whether the turns of a role carry loss, as `check_keys` takes it.
    """
    turns = row[column]
    if not isinstance(turns, list):
        fail(index, column, "expected a list of turns", turns, "write it as one or remove the row")
    if not turns:
        fail(index, column, "expected at least one turn", turns, "add the turns or remove the row")
    return [_message(index, column, number, turn, learned) for number, turn in enumerate(turns)]


def _message(index: int, column: str, number: int, turn: Any, learned: Mapping[str, bool]) -> Message:
    if not isinstance(turn, dict) or not turn.keys() & {"role", "from"}:
        remedy = "write turns as {role, content} or {from, value}"
        fail(index, column, f"turn {number} has no role", turn, remedy)
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    given = turn[role_key]
    role = role_of(given)
    if role is None:
        fail(index, column, f"turn {number} has an unknown role", given, f"use one of {', '.join(_ROLES)}")
    name = f"turn {number} ({given})"
    check_keys(index, column, name, turn, role, learned)
    tool_calls = turn.get("tool_calls")
    calls = [] if tool_calls is None else tool_calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        remedy = "write one JSON object a call, or leave tool_calls out"
        fail(index, column, f"{name}: expected a list of tool_calls", tool_calls, remedy)
    content = turn.get(content_key)
    if isinstance(content, list):
        content = _text_of(content)
    if not isinstance(content, str) and not (content is None and calls):
        remedy = "write its text as one string or remove the row"
        remedy += " (images need FastVisionModel)" if isinstance(content, list) else ""
        fail(index, column, f"{name} needs a string as {content_key!r}", content, remedy)
    if role == "assistant" and not calls and not (content or "").strip():
        remedy = "fill in the response or remove the row"
        fail(index, column, f"{name} is an empty response", content, remedy)
    message: Message = {"role": role}
    if content_key in turn:
        message["content"] = content
    if role_key == "role":
        return turn | message
    return message | {key: value for key, value in turn.items() if key not in ("from", "value", "content")}


def _text_of(parts: list[Any]) -> Any:
    """The joined text of content in parts {type: text, text: ...}, or value: ... as LLaMA-Factory writes it.

    The parts themselves come back if one is not text, or holds an image beside it.
    """
    are_texts = all(
        isinstance(p, dict) and p.get("type") == "text" and not any(map(p.get, KEYS_OF_IMAGES)) for p in parts
    )
    texts = [
        p["value"] if p.get("text") is None and "value" in p else p.get("text") for p in parts if are_texts
    ]
    return "".join(texts) if texts and all(isinstance(text, str) for text in texts) else parts


def with_system(system: str, conversation: list[Message]) -> list[Message]:
    """The conversation with a system turn before it, or unchanged if `system` is empty."""
    return [{"role": "system", "content": system}, *conversation] if system else conversation


def check_order(index: int, column: str, conversation: list[Message]) -> None:
    """Refuse turns in an order that chat templates reject or render wrongly."""
    roles = [message["role"] for message in conversation]
    previous = None
    for role in roles:
        if role == "system" and previous is not None:
            fail(index, column, "a system turn that is not the first", roles, "keep one, as the first turn")
        if role == "tool" and previous not in ("assistant", "tool"):
            fail(index, column, "a tool turn that answers no assistant turn", roles, "add the call before it")
        if role == previous != "tool":
            fail(index, column, f"two {role} turns in a row", roles, "merge them or add the turn between")
        previous = role


def check_answered(index: int, column: str, conversation: list[Message]) -> None:
    """Refuse a conversation without an assistant turn, because it has nothing to learn."""
    roles = [message["role"] for message in conversation]
    if "assistant" not in roles:
        fail(index, column, "no assistant turn", roles, "add the response or remove the row")


def tools(index: int, row: Row) -> dict[str, str | None]:
    """`{"tools": JSON text}`, null if the row has no tools; `{}` if the dataset has no such column.

    Each tool has the form that chat templates expect, {"type": "function", "function": {...}}.
    """
    if "tools" not in row:
        return {}
    value = row["tools"]
    try:
        value = json.loads(value or "null") if isinstance(value, str) else value
    except ValueError:
        fail(index, "tools", "not valid JSON", value, "correct it or remove the row")
    if not value:
        return {"tools": None}
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        fail(index, "tools", "expected a list of objects", value, "write one JSON object a tool")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    for function in (tool["function"] for tool in wrapped):
        if isinstance(function, dict) and isinstance(function.get("parameters"), str):
            fail(index, "tools", "parameters that are text", function, "write them as an object")
    return {"tools": json_text(index, "tools", wrapped)}


def template_kwargs(index: int, row: Row) -> dict[str, dict[str, Any]]:
    """`{"chat_template_kwargs": variables of the template}`; `{}` if the dataset has no such column."""
    column = "chat_template_kwargs"
    if column not in row:
        return {}
    value = {} if row[column] is None else row[column]
    if not isinstance(value, dict):
        fail(index, column, "expected an object", value, "write it as one or remove the column")
    for name in value:
        if name in _NO_VARIABLES:
            remedy = "remove it; only what the template reads may differ between rows"
            fail(index, column, f"{name!r} is no variable of a template", value, remedy)
    return {column: value}


def json_text(index: int, column: str, value: Any) -> str:
    """The value as JSON."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:  # times, bytes, decimals
        fail(index, column, f"a value that JSON does not have ({error})", value, "write it as a string")


# The column of documents and of packed rows that holds their images, as Arrow has it.


IMAGES = "images"  # a list of objects, one for each image
DOCUMENT = "document"  # of an image in a packed row: the number of its document in the row
# A hash stands for the bytes, a copy of a file is the same image, and the last two are for errors
_NOT_HASHED = {"bytes", "path", "size", "mtime_ns", "row", "column"}


def image_type(is_packed: bool = False) -> pa.DataType:
    """The Arrow type of an image.

    path: of its file, below the image folder where there is one. size, mtime_ns: of that file.
    bytes: the encoded image, where it is no file. sha256: of the encoded image.
    height, width: in pixels, as it is seen. tokens: that it takes. most_pixels: to which it is shrunk.
    row, column: in the data, for errors.

    Args:
        is_packed: whether it is in a packed row, and so in one of several documents.
    """
    import pyarrow as pa

    fields: dict[str, pa.DataType] = {DOCUMENT: pa.int32()} if is_packed else {}
    fields |= {"path": pa.string(), "size": pa.int64(), "mtime_ns": pa.int64()}
    fields |= {"bytes": pa.large_binary(), "sha256": pa.string()}
    fields |= {"height": pa.int32(), "width": pa.int32(), "tokens": pa.int32(), "most_pixels": pa.int64()}
    return pa.struct(fields | {"row": pa.int64(), "column": pa.string()})


def image_field(is_packed: bool = False) -> pa.Field:
    """The column of images."""
    import pyarrow as pa

    return pa.field(IMAGES, pa.list_(image_type(is_packed)))


def update_with_images(digest: Any, column: pa.Array | pa.ChunkedArray) -> None:
    """Feed a column of images to a hash: how many each row has, and all that their pixels depend on."""
    array = column.combine_chunks() if hasattr(column, "chunks") else column
    digest.update(array.value_lengths().to_numpy())
    images = array.flatten()
    for name, values in zip(images.type.names, images.flatten(), strict=True):
        if name not in _NOT_HASHED:
            digest.update(json.dumps([name, *values.to_pylist()]).encode())

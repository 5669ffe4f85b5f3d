"""Fields of one row, checked. Errors name row, column, value and remedy."""

from __future__ import annotations

import json
import re
import reprlib
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa

from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

ColumnMapping = Mapping[str, "str | None"]
Row = Mapping[str, Any]
Message = dict[str, Any]
CHANNEL = "channel"  # of documents in a mixture: a list of one number, that of their data set

_PLAIN_NAME = re.compile(r"[^\s,={][^,=]*")  # of a column, in the short form of the flag


def offer(columns: ColumnMapping) -> str:
    """The flag that maps columns so."""
    text = ",".join(f"{name}={to or ''}" for name, to in columns.items())
    if not all(map(_PLAIN_NAME.fullmatch, columns)):
        text = json.dumps(columns, ensure_ascii=False)
    return f"--columns {shlex.quote(text)}"


def fail(
    index: int, column: str, problem: str, value: object, remedy: str, kind: type[InputError] = InputError
) -> NoReturn:
    """Raise the InputError for row `index`, with the value shortened."""
    shown = reprlib.repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    raise kind(f"row {index}, column {column!r}: {problem}, got {shown}; {remedy}")


# Keys of a turn that choose what is learned, or hold more than text. They fit the run, or are refused.

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
_FIRST_ROWS = 1000


def unread_keys(rows: datasets.Dataset, columns: Iterable[str], template: str) -> tuple[str, ...]:
    """Keys of the turns in the first rows that a chat template does not read, such as `reasoning_content`."""
    first, found = rows.select(range(min(_FIRST_ROWS, len(rows)))), set[str]()
    for conversation in (value for name in columns for value in first[name] if isinstance(value, list)):
        for turn in (turn for turn in conversation if isinstance(turn, dict)):
            found |= {key for key, value in turn.items() if value} - _READ
    return tuple(
        f"{key} of the turns" for key in sorted(found) if not re.search(rf"\b{re.escape(key)}\b", template)
    )


def _check_keys(
    index: int, column: str, name: str, turn: Row, role: str, learned: Mapping[str, bool]
) -> None:
    """Refuse a key that would change the training in the tool it was made for; `name` is of the turn."""
    for key, (problem, remedy) in _REFUSED_KEYS.items():
        if turn.get(key):
            fail(index, column, f"{name} {problem}", {key: turn[key]}, remedy)
    for key in _MARKS:
        mark = turn.get(key)
        if mark is None or (mark in (0, 1) and bool(mark) is learned.get(role, bool(mark))):
            continue
        problem = "has a mark that contradicts the loss of this run"
        remedy = "remove the key or the turn, or see --train_on_responses_only"
        fail(index, column, f"{name} {problem}", {key: mark}, remedy)


_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
}
ROLES = frozenset(_ROLES.values())
KEYS_OF_AN_IMAGE = ("bytes", "image", "path", "url", "base64")  # one of which holds it
KEYS_OF_IMAGES = (*KEYS_OF_AN_IMAGE, "image_url", "images")  # in a part of a message


def role_of(name: object) -> str | None:
    """The role that a turn names in any format, or None."""
    return _ROLES.get(name) if isinstance(name, str) else None


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
        learned: whether the turns of a role carry loss; one that it lacks may be marked in either way.
    """
    turns = row[column]
    if not isinstance(turns, list):
        fail(index, column, "expected a list of turns", turns, "write it as one or remove the row")
    if not turns:
        fail(index, column, "expected at least one turn", turns, "add the turns or remove the row")
    return [_message(index, column, number, turn, learned) for number, turn in enumerate(turns)]


def _message(index: int, column: str, number: int, turn: object, learned: Mapping[str, bool]) -> Message:
    if not isinstance(turn, dict) or not turn.keys() & {"role", "from"}:
        remedy = "write turns as {role, content} or {from, value}"
        fail(index, column, f"turn {number} has no role", turn, remedy)
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    role = role_of(turn[role_key])
    if role is None:
        problem, remedy = f"turn {number} has an unknown role", f"use one of {', '.join(_ROLES)}"
        fail(index, column, problem, turn[role_key], remedy)
    name = f"turn {number} ({turn[role_key]})"
    _check_keys(index, column, name, turn, role, learned)
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        remedy = "write one JSON object a call, or leave tool_calls out"
        fail(index, column, f"{name}: expected a list of tool_calls", calls, remedy)
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
    message = {"role": role, **({"content": content} if content_key in turn else {})}
    if role_key == "role":
        return turn | message
    return message | {key: value for key, value in turn.items() if key not in ("from", "value", "content")}


def _text_of(parts: list[Any]) -> Any:
    """The joined text of content in parts {type: text, text: ...}, or value: ... as LLaMA-Factory writes it.

    The parts themselves come back if one is not text, or holds an image beside it.
    """
    texts: list[Any] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or any(map(part.get, KEYS_OF_IMAGES)):
            return parts
        texts.append(part["value"] if part.get("text") is None and "value" in part else part.get("text"))
    return "".join(texts) if texts and all(isinstance(text, str) for text in texts) else parts


def with_system(system: str, conversation: list[Message]) -> list[Message]:
    """The conversation with a system turn before it, or unchanged if `system` is empty."""
    return [{"role": "system", "content": system}, *conversation] if system else conversation


def check_turns(index: int, column: str, conversation: list[Message], n_prompt: int = 0) -> None:
    """Refuse turns in an order that chat templates reject, and no answer after the first `n_prompt` turns."""
    roles = [message["role"] for message in conversation]
    for previous, role in zip([None, *roles], roles, strict=False):
        if role == "system" and previous is not None:
            fail(index, column, "a system turn that is not the first", roles, "keep one, as the first turn")
        if role == "tool" and previous not in ("assistant", "tool"):
            fail(index, column, "a tool turn that answers no assistant turn", roles, "add the call before it")
        if role == previous != "tool":
            fail(index, column, f"two {role} turns in a row", roles, "merge them or add the turn between")
    if "assistant" not in roles[n_prompt:]:
        fail(index, column, "no assistant turn", roles[n_prompt:], "add the response or remove the row")


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
    return {column: value}


def json_text(index: int, column: str, value: object) -> str:
    """The value as JSON."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:  # times, bytes, decimals
        fail(index, column, f"a value that JSON does not have ({error})", value, "write it as a string")


# The column of documents and of packed rows that says to which part of a preference each token belongs.

ANSWERS_OF = {"dpo": "pairs", "orpo": "pairs", "kto": "labelled"}  # by objective, their documents
PREFERENCES = (*ANSWERS_OF,)
PARTS = "parts"
PROMPT, CHOSEN, REJECTED, MISMATCHED = range(4)  # the last is an answer to another prompt, for KTO

# The column of documents and of packed rows that holds their images, as Arrow has it.

IMAGES = "images"  # a list of objects, one for each image
DOCUMENT = "document"  # of an image in a packed row: the number of its document in the row
# A hash stands for the bytes, a copy of a file is the same image, and the last two are for errors
_NOT_HASHED = {"bytes", "path", "size", "mtime_ns", "row", "column"}


def image_field(is_packed: bool = False) -> pa.Field:
    """The column of images, each a record; if `is_packed`, with the number of its document in the row.

    path: of its file, below the image folder where there is one. size, mtime_ns: of that file.
    bytes: the encoded image, where it is no file. sha256: of the encoded image.
    height, width: in pixels, as it is seen. tokens: that it takes. most_pixels: to which it is shrunk.
    row, column: in the data, for errors.
    """
    fields: dict[str, pa.DataType] = {DOCUMENT: pa.int32()} if is_packed else {}
    fields |= {"path": pa.string(), "size": pa.int64(), "mtime_ns": pa.int64()}
    fields |= {"bytes": pa.large_binary(), "sha256": pa.string()}
    fields |= {"height": pa.int32(), "width": pa.int32(), "tokens": pa.int32(), "most_pixels": pa.int64()}
    fields |= {"row": pa.int64(), "column": pa.string()}
    return pa.field(IMAGES, pa.list_(pa.struct(fields)))


def update_with_images(digest: Any, column: pa.ChunkedArray) -> None:
    """Feed a column of images to a hash: how many each row has, and all that their pixels depend on."""
    array = column.combine_chunks()
    digest.update(array.value_lengths().to_numpy())
    images = array.flatten()
    for name, values in zip(images.type.names, images.flatten(), strict=True):
        if name not in _NOT_HASHED:
            digest.update(json.dumps([name, *values.to_pylist()]).encode())

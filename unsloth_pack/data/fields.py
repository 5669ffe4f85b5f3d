"""Checks of one field of one row. If it cannot be trained on, InputError names row, column and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from unsloth_pack.data.refusals import fail
from unsloth_pack.data.turn_keys import check_keys

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

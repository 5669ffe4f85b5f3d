"""Arguments of tool calls in the form that a chat template reads: an object, or its JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from unsloth_pack.data.rows import fail

Conversation = list[dict[str, Any]]
_TRIED = {"tried_name": "tried_value"}


class ArgumentForm:
    """Which form of arguments a chat template reads, tried with the first conversation that has calls.

    Args:
        render: the text that the template makes of a conversation; None where it refuses it.
    """

    def __init__(self, conversation: Conversation, render: Callable[[Conversation], str | None]):
        text, of_object = json.dumps(_TRIED), str(_TRIED)
        of_text = render(_with_arguments(conversation, lambda _: text)) or ""
        shown = render(_with_arguments(conversation, lambda _: _TRIED))
        self.reads_text = text in of_text
        self.reads_objects = shown is not None and of_object not in shown

    def of(self, number: int, conversation: Conversation) -> Conversation:
        """The conversation of row `number` with its arguments in this form.

        Raises:
            InputError: arguments are text that holds no JSON object, where the template reads objects.
        """

        def changed(arguments: Any) -> Any:
            if isinstance(arguments, str) and self.reads_objects and not self.reads_text:
                return _decoded(number, arguments)
            if isinstance(arguments, dict) and self.reads_text and not self.reads_objects:
                return json.dumps(arguments, ensure_ascii=False)
            return arguments

        return _with_arguments(conversation, changed)


def calls_in(conversation: Conversation) -> list[Any]:
    """The `tool_calls` of the turns that have some."""
    return [turn["tool_calls"] for turn in conversation if turn.get("tool_calls")]


def without_calls(conversation: Conversation) -> Conversation:
    return [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in conversation]


def _with_arguments(conversation: Conversation, change: Callable[[Any], Any]) -> Conversation:
    def changed(call: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": changed(call["function"])}
        return {**call, "arguments": change(call["arguments"])} if "arguments" in call else {**call}

    return [
        turn | {"tool_calls": [*map(changed, turn["tool_calls"])]} if turn.get("tool_calls") else turn
        for turn in conversation
    ]


def _decoded(number: int, arguments: str) -> dict[str, Any]:
    try:
        decoded = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        decoded = None
    if not isinstance(decoded, dict):
        fail(
            number, "tool_calls", "arguments that are no JSON object", arguments, "correct or remove the row"
        )
    return decoded

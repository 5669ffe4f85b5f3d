"""Keys of a turn that choose what is learned, or hold more than text. They fit the run, or are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.refusals import fail

if TYPE_CHECKING:
    import datasets

OF_TURNS = ("messages", "conversations", "prompt", "completion", "response")  # columns that may hold turns
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# of axolotl, OpenAI and Mistral, ms-swift, others, LLaMA-Factory
_MARKS = ("train", "weight", "loss", "loss_mask", "loss_weight", "loss_scale")
_REFUSED = {
    **dict.fromkeys(MEDIA, ("holds more than text", "remove the row, or the key to train on its text alone")),
    "function_call": ("has an older form of tool_calls", "write it as tool_calls"),
    "train_detail": (
        "has parts that are excluded from training",
        "remove the row, or the key to train on it",
    ),
}
_READ = {"role", "content", "from", "value", "tool_calls", *_MARKS, *_REFUSED}  # by us, or checked
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
    for key, (problem, remedy) in _REFUSED.items():
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

"""Conversations in any of the usual forms, as lists of {role, content}."""

import reprlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unsloth_pack.errors import InputError

_COLUMNS = ("conversations", "messages")
_OF_SYSTEM = ("system", "developer")
_OF_USER = ("user", "human", "input")
_OF_ASSISTANT = ("assistant", "gpt", "chatgpt", "bot", "model", "output")
_UNCHANGED = {"tool": "tool", "observation": "tool"}


def standardize_data_formats(
    dataset: Any,
    tokenizer: Any = None,
    aliases_for_system: Sequence[str] = _OF_SYSTEM,
    aliases_for_user: Sequence[str] = _OF_USER,
    aliases_for_assistant: Sequence[str] = _OF_ASSISTANT,
    batch_size: int = 1000,
    num_proc: int | None = None,
) -> Any:
    """The data set with its conversations as lists of `{"role": ..., "content": ...}`.

    The column `conversations` or `messages` keeps its name, and the other columns stay. Turns of
    `{from, value}` are renamed, and so are roles such as "human" and "gpt". A data set without such a column
    is returned as it is.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`.
        tokenizer: not needed; taken as other tools do.
        aliases_for_system, aliases_for_user, aliases_for_assistant: names of the roles in the data.
        batch_size, num_proc: as in `Dataset.map`; a stream takes no `num_proc`.

    Raises:
        InputError: a turn has no role or no text, or a role that no alias names. The error names the row,
            from 0. A stream raises it when the row is read.
    """
    if not hasattr(dataset, "map"):
        raise InputError(f"dataset is a {type(dataset).__name__}; give a datasets.Dataset, such as one split")
    first: dict[str, Any] = {}
    columns = dataset.column_names or list(next(iter(dataset), first))
    column = next((name for name in _COLUMNS if name in columns), None)
    if column is None:
        return dataset
    roles = dict(_UNCHANGED)
    for role, aliases in (
        ("system", aliases_for_system),
        ("user", aliases_for_user),
        ("assistant", aliases_for_assistant),
    ):
        roles |= dict.fromkeys(aliases, role)
    renamed: Callable[..., Any] = partial(_renamed, column=column, roles=roles)
    options: dict[str, Any] = {"with_indices": True, "batched": True, "batch_size": batch_size}
    options["remove_columns"] = [column]  # so that the turns get a new type
    if num_proc is not None and hasattr(dataset, "__len__"):
        options["num_proc"] = num_proc
    return dataset.map(renamed, **options)


standardize_sharegpt = standardize_data_formats


def _renamed(
    batch: dict[str, list[Any]], numbers: list[int], column: str, roles: dict[str, str]
) -> dict[str, list[Any]]:
    rows = zip(numbers, batch[column], strict=True)
    return {column: [_conversation(number, column, turns, roles) for number, turns in rows]}


def _conversation(number: int, column: str, turns: Any, roles: dict[str, str]) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        raise InputError(f"row {number}, column {column!r}: {reprlib.repr(turns)} is no list; write turns")
    return [_turn(number, column, place, turn, roles) for place, turn in enumerate(turns)]


def _turn(number: int, column: str, place: int, turn: Any, roles: dict[str, str]) -> dict[str, Any]:
    where = f"row {number}, column {column!r}: turn {place}"
    if not isinstance(turn, dict):
        raise InputError(
            f"{where} is {reprlib.repr(turn)}; write turns as {{role, content}} or {{from, value}}"
        )
    given = turn.get("role") if turn.get("role") is not None else turn.get("from")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if given not in roles:
        raise InputError(
            f"{where} has the role {reprlib.repr(given)}; name it in aliases_for_system, aliases_for_user or "
            f"aliases_for_assistant, or use one of {', '.join(roles)}"
        )
    if content is None:
        raise InputError(f"{where} has no content: {reprlib.repr(turn)}; fill it in or remove the row")
    others = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value")}
    return {"role": roles[given], "content": content, **others}

"""Columns of files that follow no format: their names are mapped to those that a format has."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.cache import scan
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

# The columns that the formats have, to which others may be mapped
KNOWN_COLUMNS = {
    *("messages", "conversations", "tools", "chat_template_kwargs"),
    *("instruction", "input", "output", "system"),
    *("prompt", "completion", "response", "text"),
}

IMAGE_COLUMNS = ("images", "image")  # and so to these, for a model that takes images

# What other data sets call a question, a passage beside it, an answer, and text alone
_ASKING = (
    *("prompt", "question", "query", "instruction", "problem", "task", "request", "human", "user", "q"),
    *("input", "source", "title"),
)
_BESIDE = ("context", "passage", "input", "background")
_ANSWERING = (
    *("completion", "answer", "response", "output", "solution", "reply", "assistant", "bot", "gpt"),
    *("chosen", "target", "summary", "a"),
)
_TELLING = ("text", "content", "document", "body", "article", "passage", "story", "code", "sentence")
_PLAIN_NAME = re.compile(r"[^\s,={][^,=]*")  # of a column, in the short form of the flag


def renamed(
    rows: datasets.Dataset,
    columns: Mapping[str, str | None],
    *,
    may_lack: bool = False,
    are_shared: bool = False,
) -> datasets.Dataset:
    """The rows with their columns called as `columns` says, without those that it maps to None.

    Args:
        may_lack: whether a column may be missing, as in a part of a stream whose rows do not have it.
        are_shared: whether other data sets have the same mapping.

    Raises:
        InputError: a mapped column does not exist, or another one has the new name already.
    """
    names = rows.column_names
    check_renaming(names, columns, may_lack=may_lack, are_shared=are_shared)
    new = _new_names(names, columns)
    left_out = [name for name, to in columns.items() if name in names and to is None]
    rows = rows.remove_columns(left_out) if left_out else rows
    return rows.rename_columns(new) if new else rows


def check_renaming(
    names: Sequence[str],
    columns: Mapping[str, str | None],
    *,
    may_lack: bool = False,
    are_shared: bool = False,
) -> None:
    """Refuse a mapping that does not fit the columns of these names; the rest as for `renamed`."""
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
    for name, to in _new_names(names, columns).items():
        if to in names and to not in columns:
            raise InputError(
                f"columns maps {name!r} to {to!r}, and there is a column {to!r} already; leave that out with "
                f"{as_given({to: None, **columns}, are_shared)}"
            )


def _new_names(names: Sequence[str], columns: Mapping[str, str | None]) -> dict[str, str]:
    """Of columns that get another name, what it is."""
    return {name: to for name, to in columns.items() if name in names and to is not None and to != name}


def check_used(columns: Mapping[str, str | None], unused: Sequence[str], *, are_shared: bool = False) -> None:
    """Refuse a column that was mapped for nothing, since the rows have another format than was meant.

    Args:
        unused: the columns that nothing is made of, by their new names.
        are_shared: whether other data sets have the same mapping.

    Raises:
        InputError: names it.
    """
    for name, to in columns.items():
        if to is not None and to in unused:
            raise InputError(
                f"columns maps {name!r} to {to!r}, which the rows are not made of; map what goes with it "
                f"too, or give {as_given({name: None}, are_shared)}",
                about="columns",
            )


def check_shared(columns: Mapping[str, str | None], names: Mapping[str, Sequence[str]]) -> None:
    """Refuse a mapping that several data sets share, if none of them has such a column.

    Args:
        names: the columns of each data set, by its name.

    Raises:
        InputError: names the column, and those that the data sets have.
    """
    for name in columns:
        if not any(name in of_set for of_set in names.values()):
            have = ", ".join(f"{data_set} ({', '.join(of_set)})" for data_set, of_set in names.items())
            raise InputError(
                f"columns maps {name!r}, and no data set has such a column: {have}; correct it",
                about="columns",
            )


def as_given(columns: Mapping[str, str | None], are_shared: bool) -> str:
    """The mapping as `--columns` takes it, or if that holds for other data sets too, as an item takes it."""
    if not are_shared:
        return as_flag(columns)
    return f"columns of its own: {json.dumps(columns, ensure_ascii=False)} in its item of dataset"


def as_flag(columns: Mapping[str, str | None]) -> str:
    """The mapping as `--columns` takes it."""
    text = ",".join(f"{name}={to or ''}" for name, to in columns.items())
    if not all(_PLAIN_NAME.fullmatch(name) for name in columns):
        text = json.dumps(columns, ensure_ascii=False)
    return f"--columns {shlex.quote(text)}"


def suggested(names: Sequence[str], first: Mapping[str, Any]) -> dict[str, str]:
    """A mapping to a format that the names and the first row speak for; empty where nothing does."""
    strings = [name for name in names if isinstance(first.get(name), str)]
    system = _named(strings, ("system",))
    beside_turns = {system: "system"} if system not in (None, "system") else {}
    if turns := next((name for name in names if holds_turns(first.get(name), with_answer=True)), None):
        return {**beside_turns, turns: "messages" if "role" in first[turns][0] else "conversations"}
    strings = [name for name in strings if name != system]
    answer = _named(strings, _ANSWERING)
    question = _named([name for name in strings if name != answer], _ASKING)
    if answer and question:
        beside = _named([name for name in strings if name not in (answer, question)], _BESIDE)
        if beside or system:
            return {
                **beside_turns,
                question: "instruction",
                **({beside: "input"} if beside else {}),
                answer: "output",
            }
        return {question: "prompt", answer: "completion"}
    if any(first.get(name) for name in IMAGE_COLUMNS):
        return {}
    if text := _named(strings, _TELLING):
        return {text: "text"}
    return {strings[0]: "text"} if len(strings) == 1 and not answer else {}


def holds_turns(value: Any, *, with_answer: bool = False) -> bool:
    """Whether a value is a list of turns, one of which answers if that is asked for."""
    from unsloth_pack.data.rows import role_of

    are_turns = isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)
    if not are_turns or not value[0].keys() & {"role", "from"}:
        return False
    return not with_answer or any(
        role_of(turn.get("role", turn.get("from"))) == "assistant" for turn in value
    )


def holds_text_of_turns(value: Any) -> bool:
    """Whether a value is the JSON text of a list of turns."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return False
    try:
        return holds_turns(json.loads(value))
    except (ValueError, RecursionError):
        return False


def _named(names: Sequence[str], words: Sequence[str]) -> str | None:
    """The name that is one of the words, or holds it as a word of its own; the first word wins."""
    for is_alike in (_is_word, _has_word):
        for word in words:
            if found := next((name for name in names if is_alike(name, word)), None):
                return found
    return None


def _is_word(name: str, word: str) -> bool:
    return name.lower().removesuffix("s") == word


def _has_word(name: str, word: str) -> bool:
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
    return len(word) > 1 and word in re.split(r"[^a-z]+", spaced)


# Checks of tokenised rows, made on the Arrow buffers before training begins.


def check_token_ids(dataset: datasets.Dataset, vocab_size: int) -> None:
    """Refuse token ids without an embedding; on a GPU they would fail an assertion that names no row.

    Args:
        dataset: holds `input_ids`, one list of integers a row.
        vocab_size: rows of the embedding; valid ids are 0 to vocab_size - 1.

    Raises:
        InputError: there is no such column, it does not hold lists of integers, or an id is outside the
            vocabulary; the error names the first such row and id.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if "input_ids" not in dataset.column_names:
        raise InputError(
            f"no column 'input_ids' among {', '.join(dataset.column_names)}; tokenise the dataset first"
        )
    start = 0
    for table in scan(dataset, ["input_ids"], batch_size=256):
        column = table["input_ids"].combine_chunks()
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        if not is_list or not pa.types.is_integer(column.type.value_type):
            raise InputError(
                f"column 'input_ids' holds {column.type}, not lists of integers; tokenise the dataset first"
            )
        ids, row_of_id = column.flatten(), pc.list_parent_indices(column)
        valid = pc.and_(pc.greater_equal(ids, 0), pc.less(ids, vocab_size)).fill_null(False)
        first = pc.index(valid, False).as_py()
        if first >= 0:
            raise InputError(
                f"row {start + row_of_id[first].as_py()}, column 'input_ids': token id {ids[first]} is "
                f"outside the vocabulary, 0 to {vocab_size - 1} ({vocab_size} ids); tokenise with the "
                "tokenizer of this model, or resize its embeddings"
            )
        start += len(column)

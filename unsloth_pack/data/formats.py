"""Converts chat and instruction formats to the columns that TRL's SFTTrainer takes, and checks every row.

The result has one of these sets of columns:
- `prompt` and `completion`, two strings or two message lists: the loss can be on the completion only;
- `messages`, and `tools` where the data has that column: the loss can be on assistant turns only;
- `text`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from unsloth_pack.data import fields
from unsloth_pack.data.fields import Row
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

KNOWN_COLUMNS = {
    *("messages", "conversations", "tools"),
    *("instruction", "input", "output", "system", "history"),
    *("prompt", "completion", "response", "text"),
}
# Names that other tools give to the boundaries in packed rows
_BOUNDARIES = {"seq_lengths", "packed_seq_lengths", "cu_lengths", "cu_seqlens", "position_ids", "seq_idx"}
_BOUNDARIES |= {"cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "sequence_lengths", "sample_lens"}
_PLAIN_TURNS = ({"role", "content"}, {"from", "value"})
_WANTED = (
    "messages (list of {role, content}), conversations (list of {from, value}), instruction + output (and "
    "input), prompt + completion (or response), or text"
)

# Taori et al. 2023, "Stanford Alpaca", with the line break after "Response:" that its many users settled on
_ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


class DataFormat(StrEnum):
    """The format of the rows of a data set."""

    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    ALPACA = "alpaca"
    PROMPT_COMPLETION = "prompt+completion"
    TEXT = "text"


def detect_format(column_names: Sequence[str], first_rows: Sequence[Row]) -> DataFormat:
    """The format of rows with these columns.

    If several fit, the most structured wins: messages, ShareGPT, alpaca, prompt+completion, text. (For
    example, the original alpaca data has a rendered `text` beside its `instruction`.)

    Args:
        column_names: all columns of the dataset.
        first_rows: a few rows, to tell a `messages` or `conversations` list from a string of that name.

    Raises:
        InputError: no format has these columns; the error names them and the columns of the formats. Packed
            rows are refused too, because only a manifest can show that their boundaries are complete.
    """
    columns = set(column_names)
    first = first_rows[0] if first_rows else {}
    if "input_ids" in columns:
        _refuse_packed([name for name in column_names if name in _BOUNDARIES], first)

    def holds_lists(column: str) -> bool:
        values = [row[column] for row in first_rows if row.get(column) is not None]
        return column in columns and (not values or isinstance(values[0], list))

    if holds_lists("messages"):
        return DataFormat.MESSAGES
    if holds_lists("conversations"):
        return DataFormat.SHAREGPT
    if {"instruction", "output"} <= columns:
        return DataFormat.ALPACA
    if "prompt" in columns and columns & {"completion", "response"}:
        return DataFormat.PROMPT_COMPLETION
    if "text" in columns:
        return DataFormat.TEXT
    if "input_ids" in columns:
        raise InputError(
            "column 'input_ids' holds token ids of an unknown tokenizer, perhaps packed without boundaries; "
            "give the text they were made of, or packs of it from `unsloth-pack pack`"
        )
    seen = ", ".join(f"{name} ({type(first.get(name)).__name__})" for name in column_names)
    raise InputError(f"no known data format has the columns {seen}; rename them to {_WANTED}")


def _refuse_packed(boundaries: Sequence[str], first: Row) -> None:
    if boundaries:
        shown = ", ".join(f"{name} {reprlib.repr(first.get(name))}" for name in boundaries)
        raise InputError(
            f"columns input_ids, {', '.join(boundaries)}: packed rows without a manifest that vouches for "
            f"their boundaries and tokenizer (row 0: {len(first['input_ids'] or ())} tokens, {shown}); "
            "give the text they were made of, or packs of it from `unsloth-pack pack`"
        )


def to_trl(dataset: datasets.Dataset, *, chat_template: bool) -> datasets.Dataset:
    """Check every row and convert it to the columns that TRL's SFTTrainer takes; other columns are dropped.

    - alpaca: `prompt` (instruction and input, after `system` where given) and `completion`, as messages where
      there is a chat template, else as strings in the Alpaca template.
    - ShareGPT and messages: `messages`, with `system` as its first turn, and `tools` as JSON text. A
      `function_call` turn becomes an assistant turn with its text as content, so that templates without tool
      calls can render it too. An `observation` becomes a `tool` turn.
    - prompt+completion and text stay as they are; `response` is renamed to `completion`.

    Args:
        dataset: rows as `load_rows` gives them.
        chat_template: whether the tokenizer has a chat template.

    Raises:
        InputError: the format is unknown, conversations come without a chat template, or a row cannot be
            trained on. The error names the first such row (from 0), the column and the value. These rows are
            refused: null and non-string fields, empty responses and texts, conversations without an assistant
            turn, unknown roles, a system turn that is not the first, a tool turn that answers no assistant
            turn, and the same role twice in a row (but tool results may follow each other).
    """
    from datasets import Features, Value

    if not len(dataset):
        raise InputError("the dataset has 0 rows; give one with at least one")
    first_rows = [dataset[i] for i in range(min(8, len(dataset)))]
    data_format = detect_format(dataset.column_names, first_rows)
    rows = dataset.select_columns([name for name in dataset.column_names if name in KNOWN_COLUMNS])

    convert: Callable[[int, Row], Row]
    features: dict[str, Any] = {"prompt": Value("string"), "completion": Value("string")}
    match data_format:
        case DataFormat.TEXT:
            for _ in _converted(rows, _text):
                pass
            return rows.select_columns("text")
        case DataFormat.ALPACA if chat_template:
            convert, features = _alpaca_messages, dict.fromkeys(features, _messages_type())
        case DataFormat.ALPACA:
            convert = _alpaca_strings
        case DataFormat.PROMPT_COMPLETION if not isinstance(first_rows[0]["prompt"], list):
            convert = _prompt_strings
        case DataFormat.PROMPT_COMPLETION:
            convert = _prompt_messages
            sources = {"prompt": "prompt", "completion": _answer_column(rows.column_names)}
            features = _conversation_features(rows, sources, chat_template)
        case DataFormat.MESSAGES | DataFormat.SHAREGPT:
            column = "messages" if data_format is DataFormat.MESSAGES else "conversations"
            convert = partial(_messages, column=column)
            features = _conversation_features(rows, {"messages": column}, chat_template)
    return _build(_converted(rows, convert), Features(features))


def _converted(rows: datasets.Dataset, convert: Callable[[int, Row], Row]) -> Iterator[list[Row]]:
    """Batches of converted rows."""
    filled = {name for name in rows.column_names if _may_have_filler(rows, name)}
    start = 0
    for batch in rows.iter(batch_size=1000):
        columns = [_without_nulls(values) if name in filled else values for name, values in batch.items()]
        cells = zip(*columns, strict=True)
        yield [convert(index, dict(zip(batch, row, strict=True))) for index, row in enumerate(cells, start)]
        start += len(columns[0])


def _build(batches: Iterator[list[Row]], features: datasets.Features) -> datasets.Dataset:
    import datasets
    import pyarrow as pa

    from unsloth_pack.data.exact import to_array

    tables = [
        pa.table({name: to_array([row[name] for row in batch], kind) for name, kind in features.items()})
        for batch in batches
    ]
    return datasets.Dataset(pa.concat_tables(tables), info=datasets.DatasetInfo(features=features))


def _text(index: int, row: Row) -> Row:
    return {"text": fields.string(index, row, "text")}


def _alpaca_messages(index: int, row: Row) -> Row:
    system, instruction, extra, output = _alpaca_fields(index, row)
    request = "\n".join(part for part in (instruction, extra) if part)
    return {
        "prompt": fields.with_system(system, [{"role": "user", "content": request}]),
        "completion": [{"role": "assistant", "content": output}],
    }


def _alpaca_strings(index: int, row: Row) -> Row:
    system, instruction, extra, output = _alpaca_fields(index, row)
    template = _ALPACA_WITH_INPUT if extra else _ALPACA
    preamble = f"{system}\n\n" if system else ""
    return {"prompt": preamble + template.format(instruction=instruction, input=extra), "completion": output}


def _alpaca_fields(index: int, row: Row) -> tuple[str, str, str, str]:
    """system, instruction, input and output; system and input are "" where absent."""
    if row.get("history"):
        fields.fail(
            index, "history", "earlier turns", row["history"], "write the row as conversations or messages"
        )
    extra = fields.optional_string(index, row, "input")
    instruction = fields.string(index, row, "instruction", may_be_blank=bool(extra))
    system = fields.optional_string(index, row, "system")
    return system, instruction, extra, fields.string(index, row, "output")


def _prompt_strings(index: int, row: Row) -> Row:
    prompt = fields.string(index, row, "prompt", may_be_blank=True)
    return {"prompt": prompt, "completion": fields.string(index, row, _answer_column(row))}


def _prompt_messages(index: int, row: Row) -> Row:
    answer = _answer_column(row)
    prompt = fields.messages(index, row, "prompt")
    completion = fields.messages(index, row, answer)
    fields.check_order(index, answer, prompt + completion)
    fields.check_answered(index, answer, completion)
    return {"prompt": prompt, "completion": completion} | fields.tools(index, row)


def _messages(index: int, row: Row, column: str) -> Row:
    system = fields.optional_string(index, row, "system")
    messages = fields.with_system(system, fields.messages(index, row, column))
    fields.check_order(index, column, messages)
    fields.check_answered(index, column, messages)
    return {"messages": messages} | fields.tools(index, row)


def _answer_column(columns: Collection[str]) -> str:
    return "completion" if "completion" in columns else "response"


def _conversation_features(
    rows: datasets.Dataset, sources: dict[str, str], chat_template: bool
) -> dict[str, Any]:
    """The types of TRL's columns. `sources` names the column that each message list comes from."""
    from datasets import Value

    from unsloth_pack.data.exact import ExactJson

    if not chat_template:
        raise InputError(
            f"column {next(iter(sources.values()))!r} holds conversations, but the tokenizer has no chat "
            "template; use an instruct model, or set tokenizer.chat_template"
        )
    features = {
        name: _messages_type() if _object_keys(rows, column) in _PLAIN_TURNS else ExactJson()
        for name, column in sources.items()
    }
    return features | ({"tools": Value("string")} if "tools" in rows.column_names else {})


def _messages_type() -> Any:
    from datasets import List, Value

    return List({"role": Value("string"), "content": Value("string")})


def _object_keys(rows: datasets.Dataset, column: str) -> set[str]:
    """The keys of the objects in an Arrow list column; empty for any other type."""
    import pyarrow as pa

    kind = rows.features.arrow_schema.field(column).type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(
        kind.value_type
    ):
        return set()
    return {field.name for field in kind.value_type}


def _may_have_filler(rows: datasets.Dataset, column: str) -> bool:
    """Whether Arrow's struct type may have put null where an object lacked a key that others have."""
    keys = _object_keys(rows, column)
    return bool(keys) and keys not in _PLAIN_TURNS


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value

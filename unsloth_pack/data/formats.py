"""Converts chat and instruction formats to the columns that TRL's SFTTrainer takes, and checks every row.

The result has one of these sets of columns:
- `prompt` and `completion`, two strings or two message lists: the loss can be on the completion only;
- `messages`: the loss can be on assistant turns only;
- `text`.

Conversations keep the columns `tools` and `chat_template_kwargs`, which the chat template reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from unsloth_pack.data import rows as fields
from unsloth_pack.data.columns import (
    KNOWN_COLUMNS,
    refuse_acting_values,
    refuse_media,
    refuse_preferences,
    refuse_text_of_turns,
    rules_of,
)
from unsloth_pack.data.rows import OF_TURNS, Row, fail, unread_keys
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets

_OF_CONVERSATIONS = {"tools", "chat_template_kwargs", "system"}  # columns that act beside a conversation

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
    """Detect the format of rows with these columns.

    If several fit, the most structured wins: messages, ShareGPT, alpaca, prompt+completion, text. (For
    example, the original alpaca data has a rendered `text` beside its `instruction`.) A few rows tell a list
    of messages from a string of that name. Preferences and packed rows are refused.
    """
    columns = set(column_names)
    first = first_rows[0] if first_rows else {}
    refuse_preferences(columns)

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
        refuse_text_of_turns(("prompt", _answer_column(columns)), first_rows)
        return DataFormat.PROMPT_COMPLETION
    if "text" in columns:
        return DataFormat.TEXT
    if "input_ids" in columns:
        raise InputError(
            "column 'input_ids' holds token ids of an unknown tokenizer; give their text, or packs from "
            "`unsloth-pack pack`"
        )
    refuse_text_of_turns(column_names, first_rows)
    types = ", ".join(f"{name} ({type(first.get(name)).__name__})" for name in column_names)
    way = "map them with --columns to messages, prompt, completion or text"
    raise InputError(f"no known data format has the columns {types}; {way}")


class Conversion:
    """How the rows of one data set become the columns that TRL's SFTTrainer takes; it holds none of them.

    - alpaca: `prompt` (instruction and input, after `system` where given) and `completion`, as messages where
      there is a chat template, else as strings in the Alpaca template.
    - ShareGPT and messages: `messages`, with `system` as its first turn. A `function_call` turn becomes an
      assistant turn with its text as content, so that templates without tool calls can render it too. An
      `observation` becomes a `tool` turn.
    - prompt+completion and text stay as they are; `response` is renamed to `completion`.
    - beside conversations: `tools` as JSON text, and `chat_template_kwargs`.

    Other columns are dropped, or refused if they train something in the tool they were made for. The marks of
    turns (`train`, `weight`) are compared with `responses_only`, which is None if nothing is trained. Errors
    name rows by `numbers`, else 0, 1, 2, ...
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        *,
        chat_template: bool,
        responses_only: bool | None = None,
        numbers: range | None = None,
    ):
        if not len(dataset):  # as without any column
            raise InputError("the dataset has 0 rows; give one with at least one")
        self._dataset, self.numbers = dataset, numbers or range(len(dataset))
        names = dataset.column_names
        refuse_media(dataset, self.numbers[0])
        first_rows = [dataset[i] for i in range(min(8, len(dataset)))]
        self.data_format = detect_format(names, first_rows)
        self.key = ["to_trl", chat_template, responses_only]  # all that it depends on beside the data set
        learned, answer = learned_roles(responses_only), _answer_column(names)
        self.columns, self.holds_turns = ["prompt", "completion"], True
        used = set(_OF_CONVERSATIONS)
        self._convert: Callable[[int, Row], Row]
        match self.data_format:
            case DataFormat.TEXT:
                self._convert, self.columns, used, self.holds_turns = _text, ["text"], {"text"}, False
            case DataFormat.ALPACA if chat_template:
                self._convert, used = _alpaca_messages, used | {"instruction", "input", "output"}
            case DataFormat.ALPACA:
                self._convert, self.holds_turns = _alpaca_strings, False
                used = {"instruction", "input", "output", "system"}
            case DataFormat.PROMPT_COMPLETION if not isinstance(first_rows[0]["prompt"], list):
                self._convert, used, self.holds_turns = _prompt_strings, {"prompt", answer}, False
            case DataFormat.PROMPT_COMPLETION:
                self._convert, used = partial(_prompt_messages, learned=learned), used | {"prompt", answer}
            case DataFormat.MESSAGES | DataFormat.SHAREGPT:
                column = "messages" if self.data_format is DataFormat.MESSAGES else "conversations"
                self._convert, used = partial(_messages, column=column, learned=learned), used | {column}
                self.columns = ["messages"]
        if self.holds_turns and not chat_template:
            raise InputError(
                f"column {min(used - _OF_CONVERSATIONS - {answer})!r} holds conversations, but the tokenizer "
                "has no chat template; use an instruct model, or set tokenizer.chat_template"
            )
        if self.holds_turns:
            self.columns += [name for name in ("tools", "chat_template_kwargs") if name in names]
        are_text = self.data_format is DataFormat.TEXT
        self._rules = rules_of(names, are_text=are_text, unused=_OF_CONVERSATIONS - used)
        self._used = used

    def unused_columns(self, template: str) -> tuple[str, ...]:
        """The columns that nothing is made of, and the keys of turns that a chat template does not read."""
        names = self._dataset.column_names
        turns = [name for name in OF_TURNS if name in self._used and name in names]
        unread = unread_keys(self._dataset, turns, template) if template else ()
        return (*(name for name in names if name not in self._used), *unread)

    def rows(self, first: int, end: int, batch_size: int) -> Iterator[Row]:
        """Convert the rows `first` to `end - 1`; refuse one that cannot be trained on, by its column."""
        names = [name for name in self._dataset.column_names if name in {*KNOWN_COLUMNS, *self._rules}]
        rows = self._dataset.select(range(first, end)).select_columns(names)
        filled = [field.name for field in rows.features.arrow_schema if "struct<" in str(field.type)]
        batches = (zip(*batch.values(), strict=True) for batch in rows.iter(batch_size=batch_size))
        for index, cells in zip(self.numbers[first:end], chain.from_iterable(batches), strict=True):
            row = dict(zip(names, cells, strict=True))
            refuse_acting_values(index, row, self._rules)
            row |= {name: _without_absent_keys(index, row[name], (name,)) for name in filled}
            converted = self._convert(index, row)
            for name in converted if filled else ():  # Arrow has values that JSON has not
                fields.json_text(index, name, converted[name])
            yield converted


def learned_roles(responses_only: bool | None) -> dict[str, bool]:
    """Whether the turns of a role carry loss; a role for which that is not known is left out."""
    if responses_only is None:
        return {"assistant": True}
    return {role: role == "assistant" or not responses_only for role in fields.ROLES}


def _text(index: int, row: Row) -> Row:
    return {"text": fields.string(index, row, "text", may_be_blank=True)}


def _alpaca_messages(index: int, row: Row) -> Row:
    system, instruction, extra, output = _alpaca_fields(index, row)
    request = "\n".join(part for part in (instruction, extra) if part)
    return {
        "prompt": fields.with_system(system, [{"role": "user", "content": request}]),
        "completion": [{"role": "assistant", "content": output}],
    } | _for_template(index, row)


def _alpaca_strings(index: int, row: Row) -> Row:
    system, instruction, extra, output = _alpaca_fields(index, row)
    template = _ALPACA_WITH_INPUT if extra else _ALPACA
    preamble = f"{system}\n\n" if system else ""
    return {"prompt": preamble + template.format(instruction=instruction, input=extra), "completion": output}


def _alpaca_fields(index: int, row: Row) -> tuple[str, str, str, str]:
    """system, instruction, input and output; system and input are "" where absent."""
    extra = fields.optional_string(index, row, "input")
    instruction = fields.string(index, row, "instruction", may_be_blank=bool(extra))
    system = fields.optional_string(index, row, "system")
    return system, instruction, extra, fields.string(index, row, "output")


def _prompt_strings(index: int, row: Row) -> Row:
    prompt = fields.string(index, row, "prompt", may_be_blank=True)
    return {"prompt": prompt, "completion": fields.string(index, row, _answer_column(row))}


def _prompt_messages(index: int, row: Row, learned: Mapping[str, bool]) -> Row:
    answer = _answer_column(row)
    masked = dict.fromkeys(fields.ROLES, False)  # the loss is on the completion
    system = fields.optional_string(index, row, "system")
    prompt = fields.with_system(system, fields.messages(index, row, "prompt", masked))
    completion = fields.messages(index, row, answer, learned)
    fields.check_turns(index, answer, prompt + completion, len(prompt))
    return {"prompt": prompt, "completion": completion} | _for_template(index, row)


def _messages(index: int, row: Row, column: str, learned: Mapping[str, bool]) -> Row:
    system = fields.optional_string(index, row, "system")
    messages = fields.with_system(system, fields.messages(index, row, column, learned))
    fields.check_turns(index, column, messages)
    return {"messages": messages} | _for_template(index, row)


def _for_template(index: int, row: Row) -> dict[str, Any]:
    """The columns of the dataset that the chat template reads beside the turns."""
    return fields.tools(index, row) | fields.template_kwargs(index, row)


def _answer_column(columns: Collection[str]) -> str:
    return "completion" if "completion" in columns else "response"


_CHOSEN_KEYS = {"arguments", "parameters", "chat_template_kwargs"}  # the objects whose keys users choose


def _without_absent_keys(index: int, value: Any, path: tuple[str, ...]) -> Any:
    """A value of Arrow's struct type without keys that are null, as it has one for every key of other rows.

    Where users choose the keys, the null may have been meant, and is refused.
    """
    if isinstance(value, list):
        return [_without_absent_keys(index, item, path) for item in value]
    if not isinstance(value, dict):
        return value
    nulls = [key for key, item in value.items() if item is None]
    if nulls and _CHOSEN_KEYS.intersection(path):
        problem = (
            f"{'.'.join((*path[1:], nulls[0]))} is null, as a struct column also holds keys that are absent"
        )
        remedy = "give the rows as a .jsonl file, which tells them apart"
        fail(index, path[0], problem, value, remedy)
    return {
        key: _without_absent_keys(index, item, (*path, key))
        for key, item in value.items()
        if item is not None
    }

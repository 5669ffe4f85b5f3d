"""Converts chat and instruction formats to the columns that TRL's SFTTrainer takes, and checks every row.

The result has one of these sets of columns:
- `prompt` and `completion`, two strings or two message lists: the loss can be on the completion only;
- `messages`: the loss can be on assistant turns only;
- `text`.

Conversations keep the columns `tools` and `chat_template_kwargs`, which the chat template reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from unsloth_pack.data import rows as fields
from unsloth_pack.data.columns import (
    KNOWN_COLUMNS,
    holds_text_of_turns,
    refuse_acting_columns,
    refuse_media,
    refuse_other_data,
    suggested,
)
from unsloth_pack.data.rows import OF_TURNS, Row, fail, offer, own_name, unread_keys
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

# Names that other tools give to the boundaries in packed rows
_BOUNDARIES = {"seq_lengths", "packed_seq_lengths", "cu_lengths", "cu_seqlens", "position_ids", "seq_idx"}
_BOUNDARIES |= {"cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "sequence_lengths", "sample_lens"}
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
    example, the original alpaca data has a rendered `text` beside its `instruction`.)

    Args:
        column_names: all columns of the dataset.
        first_rows: a few rows, to tell a `messages` or `conversations` list from a string of that name.

    Raises:
        InputError: no format has these columns; the error names them and the columns of the formats. Refused
            too are preferences, judged steps, and packed rows, because only a manifest can show that their
            boundaries are complete.
    """
    columns = set(column_names)
    first = first_rows[0] if first_rows else {}
    refuse_other_data(columns, first)
    boundaries = [name for name in column_names if name in _BOUNDARIES]
    if "input_ids" in columns and boundaries:
        raise InputError(
            f"columns input_ids, {', '.join(boundaries)}: packed rows without a manifest; give their text, "
            "or packs from `unsloth-pack pack`"
        )

    def refuse_text_of_turns(names: Iterable[str]) -> None:
        for name in names:
            if any(holds_text_of_turns(row.get(name)) for row in first_rows):
                problem = "holds turns as JSON text; write them as a list of objects, as .jsonl has it"
                raise InputError(f"column {own_name(name)!r} {problem}")

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
        refuse_text_of_turns(("prompt", _answer_column(columns)))
        return DataFormat.PROMPT_COMPLETION
    if "text" in columns:
        return DataFormat.TEXT
    if "input_ids" in columns:
        raise InputError(
            "column 'input_ids' holds token ids of an unknown tokenizer; give their text, or packs from "
            "`unsloth-pack pack`"
        )
    refuse_text_of_turns(column_names)
    types = ", ".join(f"{own_name(name)} ({type(first.get(name)).__name__})" for name in column_names)
    mapping = suggested(column_names, first)
    way = "map them with --columns to messages, prompt, completion or text"
    raise InputError(
        f"no known data format has the columns {types}; {f'try {offer(mapping)}' if mapping else way}"
    )


def to_trl(
    dataset: datasets.Dataset, *, chat_template: bool, responses_only: bool | None = None
) -> datasets.Dataset:
    """Check every row and convert it to the columns that TRL's SFTTrainer takes.

    - alpaca: `prompt` (instruction and input, after `system` where given) and `completion`, as messages where
      there is a chat template, else as strings in the Alpaca template.
    - ShareGPT and messages: `messages`, with `system` as its first turn. A `function_call` turn becomes an
      assistant turn with its text as content, so that templates without tool calls can render it too. An
      `observation` becomes a `tool` turn.
    - prompt+completion and text stay as they are; `response` is renamed to `completion`.
    - beside conversations: `tools` as JSON text, and `chat_template_kwargs`.

    Other columns are dropped, or refused if they train something in the tool they were made for.

    Args:
        chat_template: whether the tokenizer has a chat template.
        responses_only: whether only assistant turns will carry loss, to compare it with the marks of turns
            (`train`, `weight`); None if nothing is trained.

    Raises:
        InputError: the format is unknown, conversations come without a chat template, or a row cannot be
            trained on: it names the first such row (from 0), the column and the value. Null and non-string
            fields, empty responses, conversations without an assistant turn, unknown roles and turns out of
            order are refused, and images, replies labelled bad, weights and turns marked otherwise.
    """
    import datasets
    import pyarrow as pa

    conversion = Conversion(dataset, chat_template=chat_template, responses_only=responses_only)
    batches = conversion.batches(dataset, 0, len(dataset), batch_size=1000)
    info = datasets.DatasetInfo(features=conversion.features)
    return datasets.Dataset(pa.concat_tables(map(conversion.table, batches)), info=info)


class Conversion:
    """How the rows of one data set become TRL's columns, see `to_trl`; it holds none of them.

    Args:
        numbers: of the rows, by which errors name them; None for 0, 1, 2, ...
        template: the source of the chat template; None where there is none, or nobody asks what is unused.

    Attributes:
        unused_columns: the columns that nothing is made of, and the keys of turns.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        *,
        chat_template: bool,
        responses_only: bool | None = None,
        numbers: range | None = None,
        template: str | None = None,
    ):
        from datasets import Features, Value

        from unsloth_pack.data.lossless_json import ExactJson

        if not len(dataset):
            raise InputError("the dataset has 0 rows; give one with at least one")
        self.numbers = numbers or range(len(dataset))
        refuse_media(dataset, self.numbers)
        first_rows = [dataset[i] for i in range(min(8, len(dataset)))]
        self.data_format = detect_format(dataset.column_names, first_rows)
        self.key = ["to_trl", chat_template, responses_only]  # all that it depends on beside the data set
        self._columns = [name for name in dataset.column_names if name in KNOWN_COLUMNS]
        learned = _learned(responses_only)
        string, answer = Value("string"), _answer_column(self._columns)
        features: dict[str, Any] = {"prompt": string, "completion": string}
        self._convert: Callable[[int, Row], Row]
        match self.data_format:
            case DataFormat.TEXT:
                self._convert, features, used = _text, {"text": string}, {"text"}
            case DataFormat.ALPACA if chat_template:
                self._convert, features = _alpaca_messages, dict.fromkeys(features, _messages_type())
                used = {"instruction", "input", "output", *_OF_CONVERSATIONS}
            case DataFormat.ALPACA:
                self._convert, used = _alpaca_strings, {"instruction", "input", "output", "system"}
            case DataFormat.PROMPT_COMPLETION if not isinstance(first_rows[0]["prompt"], list):
                self._convert, used = _prompt_strings, {"prompt", answer}
            case DataFormat.PROMPT_COMPLETION:
                self._convert = partial(_prompt_messages, learned=learned)
                used = {"prompt", answer, *_OF_CONVERSATIONS}
                sources = {"prompt": "prompt", "completion": answer}
                features = _conversation_features(dataset, sources, chat_template)
            case DataFormat.MESSAGES | DataFormat.SHAREGPT:
                column = "messages" if self.data_format is DataFormat.MESSAGES else "conversations"
                self._convert = partial(_messages, column=column, learned=learned)
                used = {column, *_OF_CONVERSATIONS}
                features = _conversation_features(dataset, {"messages": column}, chat_template)
        self._unfit = _OF_CONVERSATIONS - used
        self.unused_columns = tuple(name for name in dataset.column_names if name not in used)
        if template and self.data_format is not DataFormat.TEXT:
            turns = [name for name in OF_TURNS if name in used and name in dataset.column_names]
            self.unused_columns += unread_keys(dataset, turns, template)
        if not self._unfit:
            of_template = {"tools": string, "chat_template_kwargs": ExactJson()}
            features |= {name: kind for name, kind in of_template.items() if name in self._columns}
        self.features = Features(features)
        self._json_columns = [name for name, kind in features.items() if isinstance(kind, ExactJson)]

    def batches(
        self, dataset: datasets.Dataset, first: int, end: int, batch_size: int
    ) -> Iterator[dict[str, list[Any]]]:
        """The converted columns of the rows `first` to `end - 1`, a batch at a time."""
        rows, numbers = dataset.select(range(first, end)), self.numbers[first:end]
        are_text = self.data_format is DataFormat.TEXT
        refuse_acting_columns(rows, numbers, are_text=are_text, unused=self._unfit)
        rows = rows.select_columns(self._columns)
        filled = {name: kind for name, kind in rows.features.items() if _may_have_filler(kind)}
        starts = range(0, end - first, batch_size)
        for start, batch in zip(starts, rows.iter(batch_size=batch_size), strict=True):
            of_batch = numbers[start : start + batch_size]
            for name, kind in filled.items():
                values = zip(of_batch, batch[name], strict=True)
                batch[name] = [_without_absent_keys(index, name, kind, value) for index, value in values]
            cells = zip(*batch.values(), strict=True)
            converted = [
                self._convert(index, dict(zip(batch, row, strict=True)))
                for index, row in zip(of_batch, cells, strict=True)
            ]
            columns = {name: [row[name] for row in converted] for name in self.features}
            for name in self._json_columns:  # as a column of JSON texts would give them back
                values = zip(of_batch, columns[name], strict=True)
                columns[name] = [json.loads(fields.json_text(index, name, value)) for index, value in values]
            yield columns

    def table(self, batch: Mapping[str, list[object]]) -> pa.Table:
        """A converted batch as Arrow holds it."""
        import pyarrow as pa

        from unsloth_pack.data.lossless_json import json_array

        schema = self.features.arrow_schema
        return pa.table(
            {
                name: json_array(values)
                if name in self._json_columns
                else pa.array(values, schema.field(name).type)
                for name, values in batch.items()
            }
        )


def _learned(responses_only: bool | None) -> dict[str, bool]:
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
    system = fields.optional_string(index, row, "system")
    masked = dict.fromkeys(fields.ROLES, False)  # the loss is on the completion
    prompt = fields.with_system(system, fields.messages(index, row, "prompt", masked))
    completion = fields.messages(index, row, answer, learned)
    fields.check_order(index, answer, prompt + completion)
    fields.check_answered(index, answer, completion)
    return {"prompt": prompt, "completion": completion} | _for_template(index, row)


def _messages(index: int, row: Row, column: str, learned: Mapping[str, bool]) -> Row:
    system = fields.optional_string(index, row, "system")
    messages = fields.with_system(system, fields.messages(index, row, column, learned))
    fields.check_order(index, column, messages)
    fields.check_answered(index, column, messages)
    return {"messages": messages} | _for_template(index, row)


def _for_template(index: int, row: Row) -> dict[str, Any]:
    """The columns of the dataset that the chat template reads beside the turns."""
    return fields.tools(index, row) | fields.template_kwargs(index, row)


def _answer_column(columns: Collection[str]) -> str:
    return "completion" if "completion" in columns else "response"


def _conversation_features(
    rows: datasets.Dataset, sources: dict[str, str], chat_template: bool
) -> dict[str, Any]:
    """The types of TRL's columns. `sources` names the column that each message list comes from."""
    from unsloth_pack.data.lossless_json import ExactJson

    if not chat_template:
        raise InputError(
            f"column {own_name(next(iter(sources.values())))!r} holds conversations, but the tokenizer has "
            "no chat template; use an instruct model, or set tokenizer.chat_template"
        )
    return {
        name: _messages_type() if _keys(rows.features[column]) in fields.PLAIN_TURNS else ExactJson()
        for name, column in sources.items()
    }


def _messages_type() -> datasets.List:
    from datasets import List, Value

    return List({"role": Value("string"), "content": Value("string")})


def _keys(feature: object) -> list[str]:
    """The keys of the objects in a list column; empty for any other type."""
    inner = getattr(feature, "feature", None)
    return list(inner) if isinstance(inner, dict) else []


# Objects as Arrow's struct type holds them: with null for every key that only other rows have.
#
# Parquet files and `datasets` use that type, which cannot tell a null from an absent key. Here null means an
# absent key, as it does to transformers in a turn. Where users choose the keys, as in the arguments of a
# call, either meaning could be wrong: such a null is refused.

_CHOSEN_KEYS = {"arguments", "parameters", "chat_template_kwargs"}  # the objects whose keys users choose


def _may_have_filler(feature: object) -> bool:
    """Whether Arrow's struct type may have put null where an object lacked a key that others have."""
    return _holds_objects(feature) and _keys(feature) not in fields.PLAIN_TURNS


def _holds_objects(feature: object) -> bool:
    """Whether a column of this `datasets` type holds structs."""
    inner = getattr(feature, "feature", None)  # of a list
    return isinstance(feature, dict) or (inner is not None and _holds_objects(inner))


def _without_absent_keys(index: int, column: str, feature: object, value: object) -> Any:
    """The value of row `index` without keys that are null. A null that might have been meant is refused."""

    def strip(feature: object, inner: object, path: tuple[str, ...]) -> Any:
        if isinstance(feature, dict) and isinstance(inner, dict):
            if chosen := _CHOSEN_KEYS.intersection(path):
                for key in (key for key, item in inner.items() if item is None):
                    start = min(map(path.index, chosen))
                    name = ".".join((*path[start:], key))
                    problem = f"{name} is null, as a struct column also holds keys that are absent"
                    remedy = "give the rows as a .jsonl file, which tells them apart"
                    fail(index, column, problem, value, remedy)
            items = {key: item for key, item in inner.items() if item is not None}
            return {key: strip(feature[key], item, (*path, key)) for key, item in items.items()}
        if isinstance(inner, list):
            return [strip(getattr(feature, "feature", None), item, path) for item in inner]
        return inner

    return strip(feature, value, (column,))

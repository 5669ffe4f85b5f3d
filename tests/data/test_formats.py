"""Conversion: TRL's columns from every format, and the error of each bad row."""

import json
import tempfile
from pathlib import Path

import datasets
import pytest
from tables import table

from unsloth_pack.data import DataFormat, detect_format, load_rows
from unsloth_pack.data.formats import Conversion
from unsloth_pack.errors import InputError

USER = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "hi"}
SYSTEM = {"role": "system", "content": "be kind"}
TOOL = {"role": "tool", "content": "{}"}
SCHEMA = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {}}}}
WRAPPED = {"type": "function", "function": SCHEMA}


def from_json(rows):
    """Rows as a user's json file gives them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        path.write_text(json.dumps(rows), encoding="utf-8")
        return load_rows(str(path))


def converted(dataset, chat_template=True):
    return list(Conversion(dataset, chat_template=chat_template).rows(0, len(dataset), 9))


def convert(rows, chat_template=True):
    return converted(from_json(rows), chat_template)


def error_of(rows, chat_template=True):
    with pytest.raises(InputError) as caught:
        convert(rows, chat_template)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- detection


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, REPLY], "text": "x", "prompt": "p", "completion": "c"}, DataFormat.MESSAGES),
        ({"conversations": [], "instruction": "i", "output": "o"}, DataFormat.SHAREGPT),
        ({"instruction": "i", "output": "o", "text": "x", "prompt": "p", "response": "r"}, DataFormat.ALPACA),
        ({"prompt": "p", "completion": "c", "text": "x"}, DataFormat.PROMPT_COMPLETION),
        ({"text": "x", "instruction": "i", "url": "u"}, DataFormat.TEXT),
        ({"messages": "a string", "text": "x"}, DataFormat.TEXT),
        ({"messages": None, "text": "x"}, DataFormat.MESSAGES),
    ],
)
def test_the_most_structured_format_wins(row, expected):
    assert detect_format(list(row), [row]) is expected


# ---- conversion


def test_turns_by_other_names():
    chatty = [SYSTEM | {"role": "developer"}, USER | {"content": parts("hel", "lo")}, REPLY | {"role": "bot"}]
    mixed = [{"from": "human", "value": "hello"}, {"from": "chatgpt", "value": "hi", "content": "x"}]
    assert convert([{"messages": chatty}]) == [{"messages": [SYSTEM, USER, REPLY]}]
    assert convert([{"messages": mixed}]) == [{"messages": [USER, REPLY]}]
    assert convert([{"conversations": [USER, REPLY]}]) == [{"messages": [USER, REPLY]}]


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def test_the_system_text_of_alpaca_without_chat_template():
    rows = [
        {"instruction": "add {x}", "input": "1 1", "output": "2", "system": ""},
        {"instruction": "greet", "output": "hi", "system": "be kind"},
    ]
    first, second = convert(rows, chat_template=False)
    assert first["prompt"].startswith("Below is an instruction that describes a task, paired with an input")
    assert first["prompt"].endswith("### Instruction:\nadd {x}\n\n### Input:\n1 1\n\n### Response:\n")
    assert second["prompt"].startswith(
        "be kind\n\nBelow is an instruction that describes a task. Write a resp"
    )
    assert second["prompt"].endswith("### Instruction:\ngreet\n\n### Response:\n")
    assert (first["completion"], second["completion"]) == ("2", "hi")


def test_alpaca_with_chat_template():
    rows = [
        {"instruction": "add", "input": "1 1", "output": "2", "system": "be kind", "id": 1},
        {"instruction": "greet", "input": None, "output": "hi", "system": "", "id": 2},
        {"instruction": "", "input": "greet", "output": "hi", "id": 3},
    ]
    assert convert(rows) == [
        {
            "prompt": [SYSTEM, {"role": "user", "content": "add\n1 1"}],
            "completion": [REPLY | {"content": "2"}],
        },
        {"prompt": [{"role": "user", "content": "greet"}], "completion": [REPLY]},
        {"prompt": [{"role": "user", "content": "greet"}], "completion": [REPLY]},
    ]


def test_sharegpt_with_tool_calls():
    turns = [("human", "hello"), ("function_call", '{"name": "f"}'), ("observation", "{}"), ("gpt", "hi")]
    conversation = [{"from": role, "value": value} for role, value in turns]
    rows = [
        {"conversations": conversation, "tools": json.dumps([SCHEMA]), "system": "be kind"},
        {"conversations": conversation[:1] + conversation[3:], "tools": "[]", "system": None},
        {"conversations": conversation[:1] + conversation[3:], "tools": "", "system": " "},
    ]
    first, *others = convert(rows)
    call = {"role": "assistant", "content": '{"name": "f"}'}
    assert first["messages"] == [SYSTEM, USER, call, TOOL, REPLY]
    assert json.loads(first["tools"]) == [WRAPPED]
    assert others == [{"messages": [USER, REPLY], "tools": None}] * 2


def test_filler_nulls_of_parquet_structs_are_dropped():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"a": 1}}}]}
    other = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    filled = datasets.Dataset.from_list([{"messages": [USER, call]}, {"messages": [USER, other]}])
    assert filled[0]["messages"] != [USER, call]
    assert [row["messages"] for row in converted(filled)] == [[USER, call], [USER, other]]


def test_prompt_completion_and_text_stay():
    strings = [{"prompt": "", "completion": "c"}, {"prompt": "p", "completion": "d"}]
    assert convert(strings) == convert(strings, chat_template=False) == strings
    assert convert([{"prompt": "p", "response": "c", "id": 1}]) == [{"prompt": "p", "completion": "c"}]
    lists = [{"prompt": [SYSTEM, USER], "completion": [REPLY]}]
    assert convert(lists) == lists
    assert convert([{"text": "a", "url": "u"}], chat_template=False) == [{"text": "a"}]


# ---- bad rows

GOOD = {
    "alpaca": {"instruction": "i", "input": "", "output": "o"},
    "pair": {"prompt": "p", "completion": "c"},
    "response": {"prompt": "p", "response": "c"},
    "text": {"text": "t"},
    "chat": {"messages": [USER, REPLY]},
    "lists": {"prompt": [USER], "completion": [REPLY]},
    "tools": {"messages": [USER, REPLY], "tools": "[]"},
    "history": {"instruction": "i", "output": "o", "history": []},
}


def reply(content):
    return {"role": "assistant", "content": content}


STRINGS = [
    ("alpaca", "output", None, "expected a string, got None; write it as one or remove the row"),
    ("alpaca", "instruction", " ", "expected some text, got ' '"),
    ("alpaca", "input", 3, "expected a string, got 3"),
    ("history", "history", [["q", "a"]], "earlier turns, got [['q', 'a']]; write the row as messages"),
    ("pair", "completion", "", "expected some text, got ''"),
    ("text", "text", {"a": 1}, "expected a string, got {'a': 1}"),
]
TURNS = [
    ("hi", "expected a list of turns, got 'hi'; write it as one or remove the row"),
    ([], "expected at least one turn, got []; add the turns or remove the row"),
    ([USER], "no assistant turn, got ['user']; add the response or remove the row"),
    ([USER, {"content": "x"}], "turn 1 has no role, got {'content': 'x'}"),
    (
        [{"from": "bing", "value": "a"}],
        "turn 0 has an unknown role, got 'bing'; use one of system, developer,",
    ),
    ([USER, reply(None)], "turn 1 (assistant) needs a string as 'content', got None"),
    ([USER | {"content": [{"type": "text", "text": "x", "image": "0.png"}]}, REPLY], "turn 0 (user) needs a"),
    ([USER, reply([{"type": "image"}])], "got [{'type': 'image'}]; write its text as one string"),
    ([USER, reply(" ")], "turn 1 (assistant) is an empty response, got ' '; fill in the response"),
    ([USER, REPLY | {"weight": 0}], "turn 1 (assistant) has a mark that contradicts the loss of this run"),
    ([USER, USER, REPLY], "two user turns in a row, got ['user', 'user', 'assistant']; merge them"),
    ([SYSTEM, SYSTEM, USER, REPLY], "a system turn that is not the first"),
    (
        [USER, TOOL, REPLY],
        "a tool turn that answers no assistant turn, got ['user', 'tool', 'assistant']; add",
    ),
    ([{"from": "gpt", "value": 4}], "turn 0 (gpt) needs a string as 'value', got 4"),
]
OTHERS = [
    ("lists", "prompt", [], "expected at least one turn, got []"),
    ("tools", "tools", "[{", "not valid JSON, got '[{'; correct it or remove the row"),
    ("tools", "tools", ["f"], "expected a list of objects, got ['f']; write one JSON object a tool"),
]


@table(
    ("kind", "column", "value", "message"),
    [
        *STRINGS,
        *(("chat", "messages", *case) for case in TURNS),
        *OTHERS,
    ],
)
def test_bad_row(kind, column, value, message):
    error = error_of([GOOD[kind], GOOD[kind], GOOD[kind] | {column: value}, GOOD[kind]])
    assert error.startswith(f"row 2, column {column!r}: ")
    assert message in error


def test_conversations_need_a_chat_template():
    message = error_of([GOOD["chat"]], chat_template=False)
    assert "column 'messages' holds conversations, but the tokenizer has no chat template; use an" in message


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ turn['content'] }}", ("id", "mood of the turns", "reasoning_content of the turns")),
        ("{{ turn.reasoning_content }} {{ moody }}", ("id", "mood of the turns")),
        (None, ("id",)),
    ],
)
def test_keys_of_turns_that_the_template_does_not_read_are_told(template, told):
    turns = [USER | {"mood": "sad", "train": None, "name": ""}, REPLY | {"reasoning_content": "Why?"}]
    rows = datasets.Dataset.from_list([{"messages": turns, "id": 1}] * 2)
    assert Conversion(rows, chat_template=True).unused_columns(template or "") == told

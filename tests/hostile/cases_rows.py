"""Rows that cannot be trained on: null and nested fields, empty and disordered conversations, templates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_folder import TEMPLATE, byte_tokenizer, save_model
from refusals import Case, nothing, train

USER, REPLY = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
SYSTEM, TOOL = {"role": "system", "content": "be kind"}, {"role": "tool", "content": "{}"}
CHAT = {"messages": [USER, REPLY]}
GOOD = {
    "alpaca": {"instruction": "i", "input": "", "output": "o"},
    "pair": {"prompt": "p", "completion": "c"},
    "response": {"prompt": "p", "response": "c"},
    "text": {"text": "t"},
}


def case(
    name: str, rows: list[Any], says: str, prepare: Callable[[Path], object] = nothing, **flags: object
) -> Case:
    """Rows in a jsonl file, after whatever else is prepared."""

    def write(folder: Path) -> None:
        prepare(folder)
        lines = (json.dumps(row) for row in rows)
        (folder / "rows.jsonl").write_text("\n".join(lines))

    return Case(name, says, train(**{"dataset": "rows.jsonl"} | flags), write)


WRONG_VALUES = {
    "null": (None, "expected a string, got None"),
    "a number": (5, "expected a string, got 5"),
    "a list": (["x"], "expected a string, got \\['x'\\]"),
    "blank": (" \n\t", "expected some text"),
    "empty": ("", "expected some text, got ''"),
}
ANSWERS = {"alpaca": "output", "pair": "completion", "response": "response", "text": "text"}
FIELDS = [
    case(f"{kind}, {column}: {name}", [row, row, row | {column: value}], f"row 2, column '{column}': {says}")
    for kind, row in GOOD.items()
    for column in [ANSWERS[kind]]
    for name, (value, says) in WRONG_VALUES.items()
]
FIELDS += [
    case(
        f"{kind}, without {column}",
        [row, {k: v for k, v in row.items() if k != column}],
        f"row 1, column '{column}'",
    )
    for kind, row in GOOD.items()
    for column in row
    if len(row) > 1 and column != "input"
]

TURNS: dict[str, tuple[Any, str]] = {
    "null": (None, "expected a list of turns, got None"),
    "a string": ("hi", "expected a list of turns, got 'hi'"),
    "empty": ([], "expected at least one turn"),
    "strings": (["hi", "you"], "turn 0 has no role, got 'hi'"),
    "no answer": ([USER], "no assistant turn, got \\['user'\\]"),
    "no role": ([USER, {"content": "x"}], "turn 1 has no role"),
    "an unknown role": (
        [USER, {"role": "narrator", "content": "x"}],
        "unknown role, got 'narrator'; use one of system",
    ),
    "a role in capitals": ([{"role": "User", "content": "x"}, REPLY], "unknown role, got 'User'"),
    "null content": ([USER, {"role": "assistant", "content": None}], "needs a string as 'content', got None"),
    "content in parts": (
        [USER, {"role": "assistant", "content": [{"type": "image"}]}],
        "images need FastVisionModel",
    ),
    "a part without its text": (
        [{"role": "user", "content": [{"type": "text", "text": None}]}, REPLY],
        "needs a string as 'content'",
    ),
    "tool_calls of a word": (
        [USER, {"role": "assistant", "content": "", "tool_calls": "f"}],
        "expected a list of tool_calls, got 'f'",
    ),
    "a blank answer": ([USER, {"role": "assistant", "content": " \n"}], "is an empty response"),
    "two users": ([USER, USER, REPLY], "two user turns in a row"),
    "two answers": ([USER, REPLY, REPLY], "two assistant turns in a row"),
    "a late system turn": ([USER, SYSTEM, REPLY], "a system turn that is not the first"),
    "a tool without a call": ([USER, TOOL, REPLY], "a tool turn that answers no assistant turn"),
    "from without value": ([{"from": "human"}, {"from": "gpt", "value": "a"}], "needs a string as 'value'"),
    "an unknown from": ([{"from": "bing", "value": "a"}], "unknown role, got 'bing'"),
}
CONVERSATIONS = [
    case(f"{column}: {name}", [good, {column: turns}], f"row 1, column '{column}': .*{says}")
    for column in ("messages", "conversations")
    for good in [{column: [USER, REPLY]}]
    for name, (turns, says) in TURNS.items()
]
PAIRS = {"prompt": [USER], "completion": [REPLY]}
CONVERSATIONS += [
    case(
        "a prompt of no turns", [PAIRS, PAIRS | {"prompt": []}], "row 1, column 'prompt'.*at least one turn"
    ),
    case("a completion of a string", [PAIRS, PAIRS | {"completion": "c"}], "expected a list of turns"),
    case("a completion that asks", [PAIRS | {"completion": [USER]}], "row 0, column 'completion'"),
    case("tools that are no JSON", [CHAT | {"tools": "[{"}], "column 'tools': not valid JSON"),
    case("tools that are one object", [CHAT | {"tools": '{"name": "f"}'}], "expected a list of objects"),
    case("history beside a question", [GOOD["alpaca"] | {"history": [["q", "a"]]}], "earlier turns"),
    case("a second system prompt", [{"messages": [SYSTEM, USER, REPLY], "system": "x"}], "not the first"),
]
MIXED = [
    case("alpaca, then text", [GOOD["alpaca"], GOOD["text"]], "row 1, column 'instruction'"),
    case("text, then alpaca", [GOOD["text"], GOOD["alpaca"]], "row 0, column 'instruction'"),
    case(
        "messages, then conversations", [CHAT, {"conversations": [USER, REPLY]}], "row 1, column 'messages'"
    ),
    case("unknown columns", [{"question": "q", "answer": "a"}], "columns question \\(str\\), answer"),
    case("columns in capitals", [{"Instruction": "q", "Output": "a"}], "columns Instruction \\(str\\)"),
    case("only a prompt", [{"prompt": "p"}], "columns prompt \\(str\\)"),
    case("a name that steers a terminal", [{"\x1b[31mtext\n": "a"}], r"columns \\x1b\[31mtext"),
    case("token ids alone", [{"input_ids": [1, 2]}], "token ids of an unknown tokenizer"),
    case(
        "packed rows without a manifest", [{"input_ids": [1, 2], "seq_lengths": [1, 1]}], "without a manifest"
    ),
    case("a text of nothing that counts", [{"text": "t"}], "would count", max_seq_length=1),
    case(
        "rows longer than allowed", [{"text": "t" * 99}], "would lose 9", max_seq_length=9, max_token_loss=0.1
    ),
    case(
        "evaluation", [{"question": "q"}], "columns question", dataset="few.jsonl", eval_dataset="rows.jsonl"
    ),
    case("responses of plain text", [GOOD["text"]], "rows are plain text", train_on_responses_only=True),
]


def model_with(chat_template: str | None, **special: Any) -> Callable[[Path], None]:
    """Another `own` model, with this template and these special tokens."""

    def prepare(folder: Path) -> None:
        save_model(folder / "own", chat_template=chat_template)
        tokenizer = byte_tokenizer(chat_template)
        for name, value in special.items():
            setattr(tokenizer, name, value)
        tokenizer.save_pretrained(folder / "own")

    return prepare


def with_template(name: str, template: str | None, says: str, row: Any = CHAT, **flags: object) -> Case:
    return case(f"template: {name}", [row], says, model_with(template), model_name="own", **flags)


TEMPLATES = [
    with_template(
        "none, and messages", None, "'messages' holds conversations, but the tokenizer has no chat"
    ),
    with_template("cut", TEMPLATE[:40], "chat template"),
    with_template("an open loop", "{% for m in messages %}{{ m.content }}", "chat template"),
    with_template("a sum of text and numbers", "{{ 1 + 'a' }}", "row 0: the chat template refuses it"),
    with_template("that raises", "{{ raise_exception('no tools') }}", "row 0: .*no tools"),
    with_template(
        "that reaches for Python", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "row 0: .*refuses"
    ),
    with_template(
        "that marks no answers",
        "{{ messages[0].content }}",
        "row 0: .*does not mark",
        train_on_responses_only=True,
        row={"messages": [USER, REPLY, USER, REPLY]},
    ),
    case(
        "no end-of-sequence token",
        [GOOD["text"]],
        "no eos_token",
        model_with(None, eos_token=None),
        model_name="own",
    ),
]
CASES = [*FIELDS, *CONVERSATIONS, *MIXED, *TEMPLATES]

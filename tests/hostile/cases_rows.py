"""Rows that cannot be trained on: null and nested fields, empty and disordered conversations, templates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from model_folder import TEMPLATE, byte_tokenizer, save_model
from refusals import Case, nothing, train

USER, REPLY = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}
CHAT = {"messages": [USER, REPLY]}
GOOD = {
    "alpaca": {"instruction": "i", "input": "", "output": "o"},
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


# Every refusal of a field or a turn has its case in tests/data/test_formats.py
FIELDS = [
    case(
        "alpaca: null",
        [GOOD["alpaca"], GOOD["alpaca"] | {"output": None}],
        "row 1, column 'output': expected",
    ),
    case("messages: no answer", [CHAT, {"messages": [USER]}], "row 1, column 'messages': no assistant turn"),
]
MIXED = [
    case("alpaca, then text", [GOOD["alpaca"], GOOD["text"]], "row 1, column 'instruction'"),
    case(
        "messages, then conversations", [CHAT, {"conversations": [USER, REPLY]}], "row 1, column 'messages'"
    ),
    case("unknown columns", [{"question": "q", "answer": "a"}], "columns question \\(str\\), answer"),
    case("a name that steers a terminal", [{"\x1b[31mtext\n": "a"}], r"columns \\x1b\[31mtext"),
    case("token ids alone", [{"input_ids": [1, 2]}], "token ids of an unknown tokenizer"),
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
CASES = [*FIELDS, *MIXED, *TEMPLATES]

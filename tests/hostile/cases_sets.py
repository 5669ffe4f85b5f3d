"""Several data sets: weights, limits, splits, columns, shares that are held out, files that are none."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from refusals import FEW, Case, train

ASKED = '{"question": "q", "answer": "a"}\n' * 4
CHATS = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n' * 4
NAMES = ("few.jsonl", "asked.jsonl")
MAP = {"question": "prompt", "answer": "completion"}


def some_sets(folder: Path) -> None:
    """Beside few.jsonl: a file of no format, chats, a folder of splits, files without documents."""
    (folder / "asked.jsonl").write_text(ASKED)
    (folder / "chats.jsonl").write_text(CHATS)
    (folder / "empty.jsonl").write_text("")
    (folder / "masked.jsonl").write_text('{"prompt": "a", "completion": ""}\n')
    (folder / "plain.txt").write_text("one\n\ntwo\n")
    (folder / "parts").mkdir()
    (folder / "parts" / "train.jsonl").write_text(FEW)
    (folder / "parts" / "test.jsonl").write_text(FEW)


def sets(
    name: str, items: Any, says: str, also: Callable[[Path], object] | None = None, **flags: Any
) -> Case:
    """A run on these data sets."""

    def prepare(folder: Path) -> None:
        some_sets(folder)
        if also:
            also(folder)

    named = items if isinstance(items, str) else json.dumps(items)
    return Case(f"sets: {name}", says, train(dataset=named, **flags), prepare)


def both(**second: Any) -> Sequence[Any]:
    """Two data sets, of which the second has these keys."""
    return ["few.jsonl", {"path": "few.jsonl", **second}]


# ---- what an item may say

OF_ITEMS = [
    sets(f"weight {value!r}", both(weight=value), "item 2, weight is .*; it should")
    for value in (0, float("nan"), "much")
]
OF_ITEMS += [
    sets(f"limit {value!r}", both(limit=value), "item 2, limit is .*; it should") for value in (0, 0.5, "all")
]
OF_ITEMS += [
    sets(f"split {value!r}", both(split=value), "item 2, split is .*; it should")
    for value in (" ", ["train"])
]
OF_ITEMS += [
    sets(f"path {value!r}", ["few.jsonl", {"path": value}], "item 2, path is .*; ") for value in ("", None, 5)
]
OF_ITEMS += [
    sets(f"item {value!r}", ["few.jsonl", value], "item 2(, path|, weight)? is .*; ")
    for value in (None, ["few.jsonl"], {"weight": 2})
]
OF_ITEMS += [
    sets(f"key {key!r}", both(**{key: 1}), "item 2, .* is unknown; leave it out")
    for key in ("wieght", "a\nb")
]
OF_ITEMS += [
    sets("no data sets", [], "it should have at least 1 item"),
    sets("a list that does not end", '["few.jsonl", ', "give correct JSON"),
    sets("a comma too many", "few.jsonl,,asked.jsonl", "item 2, path is ''; it should"),
]

# ---- what is there

OF_FILES = [
    sets("an empty file beside a whole one", "few.jsonl,empty.jsonl", "empty.jsonl: 0 rows"),
    sets(
        "a set without a token that counts",
        "few.jsonl,masked.jsonl",
        "masked.jsonl: .*; |max_token_loss|no token",
    ),
    sets(
        "packs beside a file",
        "few.jsonl,packs",
        "holds packed rows, which are trained on alone",
        lambda f: ((f / "packs").mkdir(), (f / "packs" / "packs.json").write_text("{}")),
    ),
]

# ---- splits, columns, shares, mixtures

OF_PARTS = [
    sets("a split of a file", both(split="test"), "few.jsonl: split is 'test', and it has no splits"),
    sets("a split for a file", "few.jsonl", "few.jsonl: split is 'test'", split="test"),
    sets(
        "two columns as one",
        "asked.jsonl",
        "give each column another name",
        columns="question=prompt,answer=prompt",
    ),
    sets("a column that nobody has", ",".join(NAMES), "no data set has such a column", columns="ask=prompt"),
    sets("a column that the item lacks", both(columns={"ask": "prompt"}), "few.jsonl: columns maps 'ask'"),
    sets(
        "a name that is taken",
        [{"path": "few.jsonl", "columns": {"instruction": "output"}}],
        "there is a column 'output' already",
    ),
    sets(
        "all columns left out", [{"path": "asked.jsonl", "columns": {"question": None, "answer": None}}], "; "
    ),
    sets(
        "columns of an item as a number", both(columns=5), "item 2, columns is 5; it should be a valid dict"
    ),
    sets(
        "text for responses alone",
        "few.jsonl,plain.txt",
        "plain.txt: train_on_resp",
        train_on_responses_only=True,
    ),
    sets(
        "held out beside an evaluation",
        ",".join(NAMES),
        "give one of them",
        eval_fraction=0.5,
        eval_dataset="demo",
    ),
    sets("a fraction of a stream", both(weight=0.5), "give a whole number", streaming=True),
]
OF_PARTS += [
    sets(f"eval_fraction {value}", "few.jsonl", "eval_fraction.*it should be less", eval_fraction=value)
    for value in (1, "nan")
]
CASES = [*OF_ITEMS, *OF_FILES, *OF_PARTS]

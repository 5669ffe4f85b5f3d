"""The demo's preferences: answers to its commands, and answers to other ones. Nothing is stored."""

import json
from itertools import pairwise
from typing import Any

from unsloth_pack.demo import HELDOUT_FILE, TRAIN_FILE, messages

SPLITS = {"train": (TRAIN_FILE, 400), "test": (HELDOUT_FILE, 40)}  # rows of each


def preference_rows(split: str) -> list[dict[str, Any]]:
    """Return `prompt`, `chosen`, the answer to it, and `rejected`, that to the next one: lists of turns."""
    file, n_rows = SPLITS[split]
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines()[: n_rows + 1])
    pairs = [(messages(row), messages(following)[1:]) for row, following in pairwise(rows)]
    return [{"prompt": turns[:1], "chosen": turns[1:], "rejected": other} for turns, other in pairs]


def feedback_rows(split: str) -> list[dict[str, Any]]:
    """Return `prompt`, `completion` and `label`, true for the answers to it, which every second row has."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if is_good else "rejected"], "label": is_good}
        for number, row in enumerate(preference_rows(split))
        for is_good in [number % 2 == 0]
    ]

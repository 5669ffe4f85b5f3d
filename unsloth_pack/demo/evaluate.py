"""Exact match on held-out rows, by greedy generation."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

Row = dict[str, str]  # `instruction`, `input` and `output`, alpaca's columns


def user_text(row: Row) -> str:
    """The user's message: the instruction, and the input on the line below."""
    return f"{row['instruction']}\n{row['input']}" if row["input"] else row["instruction"]


def messages(row: Row) -> list[dict[str, str]]:
    """The row as a conversation of two turns."""
    return [{"role": "user", "content": user_text(row)}, {"role": "assistant", "content": row["output"]}]


@dataclass(frozen=True)
class Generation:
    """The prompt of one row (its user turn), the expected answer and the generated answer."""

    prompt: str
    expected: str
    answer: str

    @property
    def correct(self) -> bool:
        return self.answer == self.expected


@dataclass(frozen=True)
class ExactMatch:
    """`score`: the share of rows, 0 to 1, answered exactly. `generations`: one for each row, in order."""

    score: float
    generations: list[Generation]


@torch.inference_mode()
def exact_match(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    batch_size: int = 64,
) -> ExactMatch:
    """Greedy answers to every row, compared with its `output`. `model` is anything with `generate`.

    Rows with answers of similar length share a batch, padded on the left. A batch stops a few tokens after
    its longest expected answer, because a longer answer is wrong already.
    """
    turns = [messages(row) for row in rows]
    prompts = tokenizer.apply_chat_template(
        [turn[:1] for turn in turns], add_generation_prompt=True, tokenize=False
    )
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]["output"]))
    answers = [""] * len(rows)

    was_training = model.training
    model.eval()
    for start in range(0, len(rows), batch_size):
        batch = by_length[start : start + batch_size]
        inputs = tokenizer(
            [prompts[i] for i in batch], padding=True, padding_side="left", return_tensors="pt"
        ).to(model.device)
        expected = tokenizer([rows[i]["output"] for i in batch], padding=True, return_tensors="pt")[
            "input_ids"
        ]
        output = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=expected.shape[1] + 4,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for i, text in zip(batch, texts, strict=True):
            answers[i] = text.strip()
    model.train(was_training)

    generations = [
        Generation(user["content"], assistant["content"], answer)
        for (user, assistant), answer in zip(turns, answers, strict=True)
    ]
    return ExactMatch(sum(generation.correct for generation in generations) / len(rows), generations)

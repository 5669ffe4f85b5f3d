"""Exact match on held-out rows and pictures, by greedy generation."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

from unsloth_pack.demo import Row, messages, pictures, user_text


@dataclass(frozen=True)
class Generation:
    """The answer to one row."""

    prompt: str
    expected: str
    answer: str


@dataclass(frozen=True)
class ExactMatch:
    """The share of exact answers, 0 to 1, and the answers in the order of the rows."""

    score: float
    generations: list[Generation]


def exact_match(
    model: Any, tokenizer: PreTrainedTokenizerBase, rows: list[Row], batch_size: int = 64
) -> ExactMatch:
    """Compare greedy answers to every row with its `output`.

    Rows with answers of similar length share a batch. It stops a few tokens after its longest expected
    answer, because a longer answer is wrong already.
    """
    turns = [messages(row) for row in rows]
    prompts = tokenizer.apply_chat_template(
        [turn[:1] for turn in turns], add_generation_prompt=True, tokenize=False
    )

    def encode(batch: list[int]) -> BatchEncoding:
        texts = [prompts[i] for i in batch]
        encoded: BatchEncoding = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        return encoded

    expected = [row["output"] for row in rows]
    answers = _greedy_answers(model, tokenizer, encode, expected, batch_size)
    return _score([user_text(row) for row in rows], expected, answers)


def exact_match_of_pictures(model: Any, processor: Any, rows: list[pictures.Row]) -> ExactMatch:
    """Compare greedy answers to every row of one picture and one question with the row's answer."""
    from PIL import Image

    questions = [row["messages"][0]["content"].removeprefix(pictures.MARK) for row in rows]
    turns = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        for question in questions
    ]
    prompts = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)

    def encode(batch: list[int]) -> BatchEncoding:
        images = [Image.open(io.BytesIO(rows[i]["images"][0])) for i in batch]
        texts = [prompts[i] for i in batch]
        options = dict(padding=True, padding_side="left", return_tensors="pt")
        encoded: BatchEncoding = processor(text=texts, images=images, **options)
        return encoded

    expected = [row["messages"][1]["content"] for row in rows]
    answers = _greedy_answers(model, processor.tokenizer, encode, expected)
    return _score(questions, expected, answers)


def _score(prompts: list[str], expected: list[str], answers: list[str]) -> ExactMatch:
    n_exact = sum(map(str.__eq__, answers, expected))
    return ExactMatch(n_exact / len(answers), [*map(Generation, prompts, expected, answers)])


@torch.inference_mode()
def _greedy_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    encode: Callable[[list[int]], BatchEncoding],
    expected: list[str],
    batch_size: int = 64,
) -> list[str]:
    """Generate greedy answers, in the order of `expected`, to rows that `encode` pads on the left."""
    by_length = sorted(range(len(expected)), key=lambda i: len(expected[i]))
    answers = [""] * len(expected)
    was_training = model.training
    model.eval()
    for start in range(0, len(expected), batch_size):
        batch = by_length[start : start + batch_size]
        inputs = encode(batch).to(model.device)
        longest = max(len(ids) for ids in tokenizer([expected[i] for i in batch])["input_ids"])
        output = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=longest + 4,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for i, text in zip(batch, texts, strict=True):
            answers[i] = text.strip()
    model.train(was_training)
    return answers

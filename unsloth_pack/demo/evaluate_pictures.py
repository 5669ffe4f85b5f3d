"""Exact match on held-out pictures, by greedy generation."""

import io
from typing import Any

from PIL import Image
from transformers import BatchEncoding

from unsloth_pack.demo.evaluate import ExactMatch, greedy_answers, score
from unsloth_pack.demo.pictures import MARK, Row


def exact_match(model: Any, processor: Any, rows: list[Row], batch_size: int = 64) -> ExactMatch:
    """Compare greedy answers to every row of one picture and one question with the row's answer."""
    questions = [row["messages"][0]["content"].removeprefix(MARK) for row in rows]
    turns = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        for question in questions
    ]
    prompts = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)

    def encode(batch: list[int]) -> BatchEncoding:
        images = [Image.open(io.BytesIO(rows[i]["images"][0])) for i in batch]
        texts = [prompts[i] for i in batch]
        return processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")

    expected = [row["messages"][1]["content"] for row in rows]
    answers = greedy_answers(model, processor.tokenizer, encode, expected, batch_size)
    return score(questions, expected, answers)

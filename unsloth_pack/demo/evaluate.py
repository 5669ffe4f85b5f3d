"""Exact match on held-out rows and pictures, by greedy generation."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unsloth_pack.demo import messages
from unsloth_pack.demo.pictures import MARK


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


@torch.inference_mode()
def exact_match(
    model: Any, processor: Any, rows: Sequence[dict[str, Any]], batch_size: int = 64
) -> ExactMatch:
    """Compare greedy answers to every row of a demo with its own.

    Rows with answers of similar length share a batch. It stops a few tokens after its longest expected
    answer, because a longer answer is wrong already. The processor is a tokenizer for rows without pictures.
    """
    tokenizer, with_pictures = getattr(processor, "tokenizer", processor), "images" in rows[0]
    conversations = [row["messages"] if with_pictures else messages(row) for row in rows]
    questions = [turns[0]["content"].removeprefix(MARK) for turns in conversations]
    expected = [turns[1]["content"] for turns in conversations]
    contents: list[Any] = [*questions]
    if with_pictures:
        contents = [[{"type": "image"}, {"type": "text", "text": question}] for question in questions]
    dialogues = [[{"role": "user", "content": content}] for content in contents]
    prompts = processor.apply_chat_template(dialogues, add_generation_prompt=True, tokenize=False)
    by_length = sorted(range(len(expected)), key=lambda i: len(expected[i]))
    answers = [""] * len(expected)
    was_training = model.training
    model.eval()
    for start in range(0, len(expected), batch_size):
        batch = by_length[start : start + batch_size]
        options: dict[str, Any] = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
        if with_pictures:
            from PIL import Image

            options["images"] = [Image.open(io.BytesIO(rows[i]["images"][0])) for i in batch]
        inputs = processor(text=[prompts[i] for i in batch], **options).to(model.device)
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
    n_exact = sum(map(str.__eq__, answers, expected))
    return ExactMatch(n_exact / len(answers), [*map(Generation, questions, expected, answers)])

"""Make the bundled model, tokenizer and data: `python -m tools.build_demo`.

The data files depend only on the seeds below. The weights also depend on the device they were trained on.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from tools.demo_tasks import base_rows, distinct, finetune_rows
from unsloth_pack.data.tokenize import IGNORE_INDEX
from unsloth_pack.demo import MODEL_DIR, Row, messages
from unsloth_pack.demo.evaluate import exact_match

VOCAB_SIZE = 1024
PAD, END = "<|pad|>", "<|endoftext|>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{%- if tools -%}{{- '<|tools|>' + (tools | tojson) -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] or '' -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<|call|>' + ((call['function'] or call) | tojson) -}}"
    "{%- endfor -%}{{- eos_token -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

# input_ids and labels, both [tokens]; the answer alone has labels
Example = tuple[torch.Tensor, torch.Tensor]


def write_data(folder: Path) -> None:
    """Write train.jsonl, heldout.jsonl and base_heldout.jsonl. Held-out prompts are in no training set."""
    seen: set[str] = set()
    files = {
        "heldout.jsonl": distinct(finetune_rows(seed=1), 160, seen),
        "train.jsonl": distinct(finetune_rows(seed=2), 1200, seen),
        "base_heldout.jsonl": _base_heldout(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _base_heldout() -> list[Row]:
    return distinct(base_rows(seed=3), 200, set())


def base_training_rows(count: int) -> list[Row]:
    """Rows to train the base model on, none of them held out."""
    return distinct(base_rows(seed=4), count, {messages(row)[0]["content"] for row in _base_heldout()})


def train_tokenizer(rows: list[Row]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that splits digits and writes a space before the first word too."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=True), pre_tokenizers.Digits(individual_digits=True)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((turn["content"] for row in rows for turn in messages(row)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=ROLES,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained model of 1.3 million parameters."""
    config = LlamaConfig(
        vocab_size=960,  # the tokenizer's, rounded up to a multiple of 64
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08,  # 1 / sqrt(hidden_size); so narrow a model learns slowly from 0.02
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> list[Example]:
    """Each row in the chat format: the prompt by the template, then the answer and the end token."""
    turns = [messages(row)[:1] for row in rows]
    texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(texts)["input_ids"]
    answers = tokenizer([row["output"] for row in rows])["input_ids"]
    examples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        answer = [*answer, tokenizer.eos_token_id]
        labels = [IGNORE_INDEX] * len(prompt) + answer
        examples.append((torch.tensor(prompt + answer), torch.tensor(labels)))
    return examples


def batches(examples: list[Example], tokens: int, pad_id: int, rng: Random) -> Iterator[Example]:
    """Endless `input_ids` and `labels`, both [rows, longest], of at most `tokens` tokens.

    Rows of similar length share a batch and are padded on the right, so that causal attention needs no mask.
    """
    while True:
        order = sorted(range(len(examples)), key=lambda i: len(examples[i][0]) * rng.uniform(1, 1.1))
        cuts, longest, start = [], 0, 0
        for stop, i in enumerate(order):
            longest = max(longest, len(examples[i][0]))
            if longest * (stop + 1 - start) > tokens:
                cuts.append(order[start:stop])
                longest, start = len(examples[i][0]), stop
        cuts.append(order[start:])
        rng.shuffle(cuts)
        for cut in cuts:
            ids = pad_sequence([examples[i][0] for i in cut], batch_first=True, padding_value=pad_id)
            labels = pad_sequence([examples[i][1] for i in cut], batch_first=True, padding_value=IGNORE_INDEX)
            yield ids, labels


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    heldout: list[Row],
    steps: int,
    batch_tokens: int,
) -> None:
    """Train every weight in place, on the model's device, printing the loss and the held-out exact match."""
    device = model.device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, min(200, steps // 10), steps)
    stream = batches(examples, batch_tokens, tokenizer.pad_token_id, Random(0))
    losses, started = [], time.perf_counter()
    for step in range(1, steps + 1):
        ids, labels = (tensor.to(device, non_blocking=True) for tensor in next(stream))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 100 == 0 or step == steps:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            print(f"step {step:5d}  loss {mean:.4f}  {time.perf_counter() - started:.0f} s", flush=True)
        if step % max(1, steps // 3) == 0:
            print(
                f"exact match {exact_match(model, tokenizer, heldout, batch_size=256).score:.3f}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=MODEL_DIR.parent, help="the folder that gets model/ and data/"
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of base text to generate")
    parser.add_argument("--batch_tokens", type=int, default=49_152)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    write_data(args.out / "data")
    rows, heldout = base_training_rows(args.rows), _base_heldout()
    tokenizer = train_tokenizer(rows[:20_000])
    examples = encode(tokenizer, rows)
    model = new_model(tokenizer).to(args.device)
    print(f"{model.num_parameters():,} parameters, {sum(len(ids) for ids, _ in examples):,} tokens")
    train(model, tokenizer, examples, heldout, args.steps, args.batch_tokens)

    model = model.to(torch.bfloat16)
    result = exact_match(model, tokenizer, heldout, batch_size=256)
    for miss in [generation for generation in result.generations if generation.answer != generation.expected][
        :5
    ]:
        print(f"missed {miss.prompt!r}: wanted {miss.expected!r}, got {miss.answer!r}")
    print(f"exact match in bfloat16 {result.score:.3f}")
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()

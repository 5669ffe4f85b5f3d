"""Packed rows against padded batches on the CPU: samples a second over the same documents.

    python benchmarks/packing.py --dataset alpaca_en_demo.json [--json PATH]

Both run the bundled model's architecture with LoRA through the same patched forward and its backward, over
the same documents: batches of 8 padded to their longest, in shuffled order, against rows of 2,048 tokens
packed by TRL. Rounds alternate, so that a machine that slows down slows both.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import date

import torch
from datasets import disable_progress_bars
from rich.console import Console
from rich.table import Table
from trl import pack_dataset

from unsloth_pack import FastLanguageModel
from unsloth_pack.data import load_rows
from unsloth_pack.data.tokenize import documents_of


def padded_batches(documents, batch_size, pad_token_id):
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0)).tolist()
    for start in range(0, len(order) - batch_size + 1, batch_size):
        batch = [torch.tensor(documents[i]) for i in order[start : start + batch_size]]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=pad_token_id)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in batch], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        yield len(batch), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed_rows(dataset, capacity):
    for row in pack_dataset(dataset, capacity, strategy="bfd").shuffle(seed=0):
        ids = torch.tensor([row["input_ids"]])
        yield (
            len(row["seq_lengths"]),
            {"input_ids": ids, "labels": ids, "packed_seq_lengths": row["seq_lengths"]},
        )


def train(model, batches):
    """Samples, real tokens and seconds of a forward and a backward over every batch."""
    samples = tokens = 0
    start = time.perf_counter()
    for n, batch in batches:
        model(**batch).loss.backward()
        model.zero_grad()
        samples += n
        tokens += int((batch["labels"] != -100).sum())
    return samples, tokens, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, help="alpaca rows, as json")
    parser.add_argument("--capacity", type=int, default=2048, help="tokens of a packed row (default: 2048)")
    parser.add_argument("--batch", type=int, default=8, help="documents of a padded batch (default: 8)")
    parser.add_argument("--documents", type=int, default=400, help="of the data set (default: 400)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()

    disable_progress_bars()
    model, tokenizer = FastLanguageModel.from_pretrained("demo", max_seq_length=args.capacity)
    model = FastLanguageModel.get_peft_model(model).train()
    rows = load_rows(args.dataset).select(range(args.documents))
    dataset = documents_of(rows, tokenizer, max_length=args.capacity).rows
    dataset = dataset.select_columns(["input_ids"])
    padded = list(padded_batches(dataset["input_ids"], args.batch, tokenizer.pad_token_id))
    packed = list(packed_rows(dataset, args.capacity))
    train(model, padded[:1]), train(model, packed[:1])  # warms up

    rounds = [(train(model, padded), train(model, packed)) for _ in range(args.rounds)]
    table = Table("", "samples/s", "real tokens/s", "samples", title=f"{torch.get_num_threads()} threads")
    figures = {}
    for name, runs in zip(("padded", "packed"), zip(*rounds, strict=True), strict=True):
        samples, tokens, _ = runs[0]
        seconds = statistics.median(run[2] for run in runs)
        figures[name] = {"samples_per_second": samples / seconds, "tokens_per_second": tokens / seconds}
        table.add_row(name, f"{samples / seconds:.1f}", f"{tokens / seconds:,.0f}", str(samples))
    ratio = figures["packed"]["samples_per_second"] / figures["padded"]["samples_per_second"]
    Console().print(table, f"packed / padded: {ratio:.2f}")
    if args.json:
        import transformers
        import trl

        about = {
            "date": date.today().isoformat(),
            "cpu_threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "versions": {m.__name__: m.__version__ for m in (torch, transformers, trl)},
            "arguments": {
                name: value for name, value in vars(args).items() if name not in ("json", "dataset")
            },
        }
        with open(args.json, "w") as file:
            json.dump({**about, **figures, "ratio": ratio}, file, indent=1)


if __name__ == "__main__":
    main()

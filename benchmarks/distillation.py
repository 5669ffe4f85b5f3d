"""A step of distillation from the base model against a step of SFT: seconds and memory of both, in turns.

    python benchmarks/distillation.py [--shape llama3.1-8b] [--tokens 8192] [--rounds 8] [--json PATH]

One packed row of eight documents trains an adapter on every projection, in a bare loop with fused AdamW. The
base model teaches: the same weights without the adapter, forward alone, on the same row. Steps of both kinds
take turns in one process, so that only their ratio matters. Layers are recomputed unless `--checkpointing`
says otherwise; B of the adapter is not 0. Times are medians; memory is the peak that torch allocated.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shapes import EVERY_SHAPE, device_name, versions
from transformers import AutoModelForCausalLM

from unsloth_pack import FastLanguageModel, patch_model
from unsloth_pack.losses.distillation import DistillationLoss
from unsloth_pack.losses.head import cross_entropy
from unsloth_pack.training.distill import make_teacher

WARM = 3  # steps of each kind that do not count
DOCUMENTS = 8
MODES = {"true": True, "false": False, "auto": "auto"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="llama3.1-8b", choices=EVERY_SHAPE, help="of the model (default: llama3.1-8b)")
    add("--tokens", type=int, default=8192, help="of the row (default: 8192)")
    add("--rounds", type=int, default=8, help="steps of each kind that count (default: 8)")
    add("--rank", type=int, default=16, help="of the adapter (default: 16)")
    add("--checkpointing", default="true", choices=MODES, help="(default: true)")
    add("--json", type=Path, help="also write every number here")
    args = parser.parse_args()
    result = measure(args.shape, args.tokens, args.rounds, args.rank, MODES[args.checkpointing])
    result |= {"device": device_name(), "versions": versions(), "arguments": vars(args) | {"json": None}}
    for kind in ("sft", "distill"):
        seconds, peak = result["seconds"][kind], result["peak_bytes"][kind] / 2**30
        print(f"{kind:<8} {1e3 * statistics.median(seconds):9.1f} ms a step, peak {peak:.2f} GiB")
    print(f"distill / sft: {result['ratio']:.3f} of the time, {result['more_gib']:+.2f} GiB")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(shape: str, tokens: int, rounds: int, rank: int, checkpointing: Any) -> dict[str, Any]:
    """Time both kinds of steps in turns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(shape, rank, checkpointing, device)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device == "cuda")
    loss = DistillationLoss(make_teacher(model), kl_weight=0.1)
    row = make_row(EVERY_SHAPE[shape].vocab, tokens, device)
    step = partial(run_step, model, optimizer, row)
    seconds: dict[str, list[float]] = {"sft": [], "distill": []}
    peaks = dict.fromkeys(seconds, 0)
    for number in range(WARM + rounds):
        for kind, loss_of in (("sft", cross_entropy), ("distill", loss)):
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took = step(loss_of)
            if number >= WARM:
                seconds[kind].append(took)
                if device == "cuda":
                    peaks[kind] = max(peaks[kind], torch.cuda.max_memory_allocated())
    sft, distill = (statistics.median(seconds[kind]) for kind in ("sft", "distill"))
    more = (peaks["distill"] - peaks["sft"]) / 2**30
    return {"seconds": seconds, "peak_bytes": peaks, "ratio": distill / sft, "more_gib": more}


def build(shape: str, rank: int, checkpointing: Any, device: str) -> Any:
    """A patched model of random weights, with an adapter that changes something."""
    torch.manual_seed(0)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(EVERY_SHAPE[shape].config(), dtype=torch.bfloat16)
    patch_model(base.requires_grad_(False))
    model = FastLanguageModel.get_peft_model(base, r=rank, use_gradient_checkpointing=checkpointing)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.01)
    return model.train()


def make_row(vocab: int, tokens: int, device: str) -> dict[str, Any]:
    """A packed row of documents of about one length, every token of which has a label."""
    ids = torch.randint(3, vocab, (1, tokens), device=device)
    lengths = [tokens // DOCUMENTS] * (DOCUMENTS - 1)
    return {"input_ids": ids, "labels": ids, "packed_seq_lengths": [*lengths, tokens - sum(lengths)]}


def run_step(model: Any, optimizer: Any, row: dict[str, Any], loss_of: Any) -> float:
    """Run one update; return its seconds."""
    model.get_base_model().training_loss = loss_of
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    model(**row).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())

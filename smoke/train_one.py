"""One architecture: 20 steps packed and 20 steps unpacked on the same documents, on a tiny random model.

    python smoke/train_one.py ARCHITECTURE [--backend NAME] [--device cpu|cuda]

The loss must fall in both, and the first losses, over the same documents and weights, must agree. A
backend that cannot run the architecture here is reported as refused, which is not a failure.
"""

import argparse
import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, set_seed

from tests.tiny import tiny_config
from unsloth_pack import BackendUnavailable, FastLanguageModel, patch_model, supported_architectures

STEPS = 20
LENGTHS = (5, 33, 64, 12, 90, 47)


def documents(n, vocab_size=64):
    """`n` batches of documents that count upwards from a random start: easy to learn, never the same."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(3, vocab_size, (n, len(LENGTHS)), generator=generator).tolist()
    return [
        [3 + (torch.arange(length) + s) % (vocab_size - 3) for length, s in zip(LENGTHS, row, strict=True)]
        for row in starts
    ]


def packed(batch, device):
    ids = torch.cat(batch).to(device)[None]
    return {"input_ids": ids, "labels": ids, "packed_seq_lengths": [len(document) for document in batch]}


def unpacked(batch, device):
    ids = pad_sequence(batch, batch_first=True).to(device)
    mask = pad_sequence([torch.ones_like(document) for document in batch], batch_first=True).to(device)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def losses(arch, backend, device, dtype, describe):
    set_seed(0)
    config = tiny_config(arch)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).requires_grad_(False)
    patch_model(model, backend)
    model = FastLanguageModel.get_peft_model(model, r=8).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    history = []
    for batch in documents(STEPS):
        loss = model(**describe(batch, device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", choices=sorted(supported_architectures()))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    try:
        one = losses(args.arch, args.backend, args.device, dtype, packed)
    except BackendUnavailable as refusal:
        print(f"{args.arch:12} {args.backend:9} refused: {refusal}")
        return 0
    other = losses(args.arch, args.backend, args.device, dtype, unpacked)
    # Both compute the same sums, so they may differ by a few units of rounding in the dtype.
    agree = abs(one[0] - other[0]) <= 8 * torch.finfo(dtype).eps * abs(one[0])
    falls = all(history[-1] < 0.9 * history[0] for history in (one, other))
    verdict = "ok" if agree and falls else "FAILED"
    print(
        f"{args.arch:12} {args.backend:9} packed {one[0]:.4f} -> {one[-1]:.4f}  "
        f"unpacked {other[0]:.4f} -> {other[-1]:.4f}  {verdict}"
    )
    return int(verdict != "ok")


if __name__ == "__main__":
    sys.exit(main())

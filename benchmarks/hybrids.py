"""Models with attention and state layers: updates a second with kernels for the latter, without, and in TRL.

    python benchmarks/hybrids.py --kernels FOLDER [--case lfm2,granite4-h,qwen3.5] [--json PATH]
    python benchmarks/hybrids.py --case tiny --peers ours-without,trl       on a CPU

`ours` and `ours-without` train on packed rows: whole rows through the kernels of fla-core, causal-conv1d and
mamba-ssm, and document by document without them. `trl` pads the documents, because plain transformers carries
the state from document to document in a packed row. It has the kernels, too. LoRA has rank 16.

`--kernels` is a folder with those packages, and with a Triton that they run on where torch's is another one.
It is put on the path of `ours` and `trl` alone. Without it they have what is installed.

Tokens are real tokens. Seconds are the median of the updates after the warm-up, and tokens/s the mean of all
of them. Every run of ours prints its report. Exit code 1 if a run failed; what it said is printed.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from full import Case, texts
from peer_runs import parser_of, run_peers
from shapes import EVERY_SHAPE, build
from watched import Watched

PEERS = ("ours", "ours-without", "trl")
PADDED = 16  # documents of a padded batch
CASES = {
    "lfm2": Case("lfm2-1.2b", row_tokens=8192),
    "granite4-h": Case("granite4-h-1b", row_tokens=8192),
    "qwen3.5": Case("qwen3.5-0.8b", row_tokens=8192),
    "tiny": Case("tiny-lfm2", row_tokens=256, steps=6, warm=2),
}


def main() -> int:
    parser = parser_of(__doc__, CASES, "lfm2,granite4-h,qwen3.5", PEERS)
    parser.add_argument("--kernels", type=Path, help="a folder with the packages of the kernels")
    return run_peers(__file__, parser, CASES, PEERS, child, line_of)


def line_of(run: dict[str, Any]) -> str:
    return (
        f"{run['ms']:.1f} ms an update of {run['tokens']:,.0f} tokens in {run['places']:,.0f} places, "
        f"{run['tokens_s']:,.0f} tokens/s, {run['peak_GiB']:.2f} GiB, loss {run['losses'][0]:.4f} to "
        f"{run['losses'][-1]:.4f}, triton {run['triton']}"
        + "".join(f"\n    {line}" for line in run["report"])
    )


# In a process of its own


def child(what: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    if args.kernels is not None and what in ("ours", "trl"):  # before anything looks for them
        sys.path.insert(0, str(args.kernels.resolve()))
    folder = build(CASES[name].shape, args.work)
    return {} if what == "build" else train(what, CASES[name], folder, args.work)


def load(peer: str, case: Case, folder: str) -> tuple[Any, Any]:
    """The model with its adapter, and its tokenizer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    on_gpu = torch.cuda.is_available()
    targets = [*EVERY_SHAPE[case.shape].projections]
    lora: dict[str, Any] = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": targets}
    if peer != "trl":
        from unsloth_pack import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=case.row_tokens,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            load_in_4bit=False,
        )
        return FastLanguageModel.get_peft_model(model, use_gradient_checkpointing=False, **lora), tokenizer
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if on_gpu else torch.float32)
    model = get_peft_model(plain.to("cuda" if on_gpu else "cpu"), LoraConfig(**lora))
    return model, AutoTokenizer.from_pretrained(folder)


def train(peer: str, case: Case, folder: str, work: Path) -> dict[str, Any]:
    """The figures of one run."""
    import torch
    import triton
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    model, tokenizer = load(peer, case, folder)
    packs = peer != "trl"
    config = SFTConfig(
        output_dir=str(work / f"hybrids-{peer}"),
        per_device_train_batch_size=1 if packs else PADDED,
        gradient_accumulation_steps=1,
        packing=packs,
        padding_free=packs,
        max_length=case.row_tokens,
        max_steps=case.steps,
        learning_rate=2e-4,
        warmup_steps=5,
        logging_steps=5,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        seed=3407,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"text": texts(case)}),
        processing_class=tokenizer,
    )
    watched = Watched()
    watched.follow(trainer)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = watched.seconds(case.warm)
    return {
        "ms": 1000 * statistics.median(seconds),
        "seconds": seconds,
        "tokens_s": sum(watched.tokens[case.warm :]) / sum(seconds),
        "tokens": statistics.mean(watched.tokens),
        "places": statistics.mean(watched.places),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "losses": [float(loss) for loss in watched.losses],
        "triton": triton.__version__,
        "report": report_of(model) if packs else [],
    }


def report_of(model: Any) -> list[str]:
    from unsloth_pack.patching.patch import patch_of

    patch = patch_of(model)
    assert patch is not None
    return str(patch.report).splitlines()


if __name__ == "__main__":
    sys.exit(main())

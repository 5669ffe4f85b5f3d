"""What a log line for every update costs: written late, written at once, and only for every tenth update.

    python benchmarks/log_lines.py [--case 0.5b,1.7b,3b] [--rounds 2] [--json PATH]
    python benchmarks/log_lines.py --case tiny                 on a CPU, where all lines are written at once

`SFTTrainer` trains our patched model with LoRA of rank 16 on packed rows. `late` logs every update as a
patched model does by itself, `at-once` as transformers does, and `tenth` logs every tenth update. Nothing but
the log waits for the device: the clock runs from the end of the warm-up to the end of the last update, and
the device is waited for at these two alone. So a run has one time, `ms` for each update. Exit code 1 if a
run failed.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from full import Case, texts
from hybrids import load, report_of
from peer_runs import parser_of, run_peers
from shapes import build

PEERS = ("late", "at-once", "tenth")
CASES = {
    "0.5b": Case("qwen2.5-0.5b", row_tokens=2048, steps=100, warm=30),
    "1.7b": Case("qwen3-1.7b", row_tokens=8192, steps=50, warm=20),
    "3b": Case("llama3.2-3b", row_tokens=8192, steps=40, warm=15),
    "tiny": Case("tiny", row_tokens=256, steps=20, warm=5),
}


def main() -> int:
    parser = parser_of(__doc__, CASES, "0.5b,1.7b,3b", PEERS)
    return run_peers(__file__, parser, CASES, PEERS, child, line_of)


def line_of(run: dict[str, Any]) -> str:
    return (
        f"{run['ms']:.2f} ms an update, {run['tokens_s']:,.0f} tokens/s, {run['peak_GiB']:.2f} GiB, "
        f"{run['lines']} lines, the last of update {run['last']} with a loss of {run['loss']:.4f}"
        + "".join(f"\n    {line}" for line in run["report"] if "step" in line)
    )


# In a process of its own


def child(what: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    folder = build(case.shape, args.work)
    return {} if what == "build" else train(what, case, folder, args.work)


def train(peer: str, case: Case, folder: str, work: Path) -> dict[str, Any]:
    """The figures of one run."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from unsloth_pack.patching import deferred_logging

    on_gpu = torch.cuda.is_available()
    model, tokenizer = load("ours", case, folder)
    if peer == "at-once":
        deferred_logging.can_line_wait = lambda trainer: False
    config = SFTConfig(
        output_dir=str(work / f"log-lines-{peer}"),
        per_device_train_batch_size=1,
        packing=True,
        padding_free=True,
        max_length=case.row_tokens,
        max_steps=case.steps,
        learning_rate=2e-4,
        warmup_steps=5,
        logging_steps=10 if peer == "tenth" else 1,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=3407,
    )

    class Clock(TrainerCallback):
        """The time between the end of the warm-up and of the last update."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (case.warm, case.steps):
                if on_gpu:
                    torch.cuda.synchronize()
                self.seconds = time.perf_counter() - getattr(self, "began", 0.0)
                self.began = time.perf_counter()

    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"text": texts(case)}),
        processing_class=tokenizer,
        callbacks=[clock := Clock()],
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    tokens = lines[-1]["num_tokens"] * (case.steps - case.warm) / case.steps
    return {
        "ms": 1000 * clock.seconds / (case.steps - case.warm),
        "tokens_s": tokens / clock.seconds,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "lines": len(lines),
        "last": lines[-1]["step"],
        "loss": lines[-1]["loss"],
        "report": report_of(model),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Full fine-tuning on packed rows: updates a second of TRL's trainer over this package, TRL and Unsloth.

    python benchmarks/full.py [--case 0.5b,3b] [--peers ours,trl,unsloth] [--flash FOLDER] [--json PATH]
    python benchmarks/full.py --case tiny --peers ours,trl         on a CPU

Every weight of a model of random weights trains, in bfloat16 on a GPU, without an adapter. All peers pack the
same documents with TRL, one row an update. The model is built once under --work. Each peer runs in a process
of its own, with a time limit. --rounds interleaves them, so that a drift of the machine hits all.

Tokens are counted where the trainer hands a batch over. Seconds are the median of the updates after the
warm-up. The dtypes of weights, gradients and the optimizer's state are read after the last update, so that
peers which train in other dtypes are seen. Exit code 1 if a run failed; what it said is printed.
"""

import argparse
import importlib.util
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from peer_runs import parser_of, run_peers
from shapes import build

PEERS = ("ours", "trl", "unsloth")
LENGTHS = (180, 0.8)  # of a document: median and sigma of the logarithm, in tokens
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        shape: of the model, by its name in `shapes`.
        tokens: of a packed row.
        optim: by transformers' name, on a GPU.
        checkpointing: whether every layer is recomputed.
        steps: updates of a run.
        warm: of them, the first that do not count.
    """

    shape: str
    tokens: int
    optim: str
    checkpointing: bool
    steps: int
    warm: int


CASES = {
    "0.5b": Case("qwen2.5-0.5b", 2048, "adamw_torch_fused", checkpointing=False, steps=50, warm=15),
    "3b": Case("llama3.2-3b", 8192, "adamw_torch_fused", checkpointing=False, steps=20, warm=8),
    "8b": Case("llama3.1-8b", 8192, "adamw_8bit", checkpointing=True, steps=14, warm=6),
    "tiny": Case("tiny", 128, "adamw_torch_fused", checkpointing=False, steps=8, warm=3),
}


def main() -> int:
    parser = parser_of(__doc__, CASES, "0.5b,3b", PEERS)
    parser.add_argument("--flash", type=Path, help="a folder with flash_attn for the other peers")
    return run_peers(__file__, parser, CASES, PEERS, child, line_of, lengths=LENGTHS)


def line_of(run: dict[str, Any]) -> str:
    return (
        f"{run['ms']:.1f} ms an update of {run['tokens']:,.0f} tokens, {run['tokens_s']:,.0f} tokens/s, "
        f"{run['peak_GiB']:.2f} GiB; {run['parameters'] / 1e6:,.0f} million parameters, weights "
        f"{run['weights']}, state {run['state']}; losses "
        f"{', '.join(f'{loss:.3f}' for loss in run['losses'])}; {run['said']}"
    )


# In a process of its own


def child(what: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    if what in ("trl", "unsloth") and args.flash is not None:  # before transformers looks for it
        sys.path.insert(0, str(args.flash.resolve()))
    folder = build(CASES[name].shape, args.work)
    return {} if what == "build" else train(what, CASES[name], folder, args.work)


def documents(case: Case) -> list[dict[str, str]]:
    """Random letters, one token each, enough for every update."""
    draw = random.Random(0)
    median, sigma = LENGTHS
    made, n_letters = [], 0
    while n_letters < 1.2 * case.steps * case.tokens:
        length = min(max(int(median * draw.lognormvariate(0.0, sigma)), 4), case.tokens)
        made.append({"text": "".join(draw.choices(LETTERS, k=length))})
        n_letters += length
    return made


def train(peer: str, case: Case, folder: str, work: Path) -> dict[str, Any]:
    """The figures of one run."""
    if peer == "unsloth":  # before TRL is imported
        from unsloth import FastLanguageModel
    elif peer == "ours":
        from unsloth_pack import FastLanguageModel
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if peer == "trl":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        has_flash = on_gpu and importlib.util.find_spec("flash_attn") is not None
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="flash_attention_2" if has_flash else "sdpa"
        ).to("cuda" if on_gpu else "cpu")
    else:
        checkpointing = {"ours": True, "unsloth": "unsloth"}[peer] if case.checkpointing else False
        model, tokenizer = FastLanguageModel.from_pretrained(
            folder,
            max_seq_length=case.tokens,
            dtype=dtype,
            load_in_4bit=False,
            full_finetuning=True,
            use_gradient_checkpointing=checkpointing,
        )
    config = SFTConfig(
        output_dir=str(work / f"full-{peer}"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        packing=True,
        max_length=case.tokens,
        max_steps=case.steps,
        warmup_steps=5,
        learning_rate=1e-5,
        logging_steps=5,
        optim=case.optim if on_gpu else "adamw_torch",
        gradient_checkpointing=case.checkpointing,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        seed=3407,
    )
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    rows = Dataset.from_list(documents(case))
    trainer = SFTTrainer(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[Clock()]
    )
    tokens: list[int] = []
    step = trainer.training_step

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens.append(inputs["input_ids"].numel())
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = counted
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    warm = [after - before for before, after in pairwise(ends)][case.warm - 1 :]
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    return {
        "ms": 1000 * statistics.median(warm),
        "tokens_s": statistics.median(tokens[case.warm :]) / statistics.median(warm),
        "tokens": statistics.mean(tokens),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "parameters": sum(p.numel() for p in trained),
        "weights": _dtypes(trained),
        "state": _dtypes(x for one in trainer.optimizer.state.values() for x in _tensors(one)),
        "said": _said(trainer.model) if peer == "ours" else "",
    }


def _dtypes(tensors: Any) -> str:
    """The dtypes of all but small tensors, by how many numbers have them."""
    numbers: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.numel() > 1:
            numbers[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return " and ".join(name for name, _ in numbers.most_common())


def _tensors(state: dict[str, Any]) -> list[Any]:
    import torch

    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def _said(model: Any) -> str:
    """What the patch says of captured steps."""
    from unsloth_pack.patching.patch import patch_of

    patch = patch_of(model)
    lines = str(patch.report if patch is not None else "").splitlines()
    return next((" ".join(line.split()) for line in lines if "captured" in line), "")


if __name__ == "__main__":
    sys.exit(main())

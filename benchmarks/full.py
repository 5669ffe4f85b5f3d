"""Full fine-tuning on packed rows: updates a second of this package, plain TRL and Unsloth.

    python benchmarks/full.py [--case 0.5b,3b] [--peers ours,trl,unsloth] [--flash FOLDER] [--json PATH]
    python benchmarks/full.py --case tiny --peers ours,trl         on a CPU

All peers train every weight of the same model on the same documents of random letters, through TRL's
SFTTrainer, which packs them. Ours is `FastLanguageModel.from_pretrained(full_finetuning=True)` and nothing
else. `ours-train` and what begins with it is the trainer of `unsloth-pack train`, alone or with gradients
applied as they come (`-in-backward`), with float32 masters on the host (`-on-host`), or both. Gradients that
are applied as they come are not clipped; all others are clipped to a norm of 1. No peer recomputes layers.

`--weights` sets the dtype of the weights, and with them of gradients and moments, for all peers. bfloat16 is
the default of Unsloth's `full_finetuning=True`; float32 is its `float32_mixed_precision=True`. Every run
tells which dtypes it has found at an update, how many weights trained, and what else could make it unfair.
`--flash` names a folder with the package `flash_attn` for the peers alone; ours brings its own attention.

Tokens are counted where the trainer hands a row over. Seconds are the median of the updates after the
warm-up. Exit code 1 if a run failed; what it said is printed. Masters of an 8B model take 105 GiB of host
memory, so give --work on a disk, not on a RAM disk, for them.
"""

import argparse
import importlib.util
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_runs import parser_of, run_peers
from shapes import build
from watched import Watched

# The peers that are ours, with what `unsloth-pack train` is asked for; None trains through TRL's own trainer
OURS: dict[str, dict[str, bool] | None] = {
    "ours": None,
    "ours-train": {},
    "ours-train-in-backward": {"optimizer_in_backward": True},
    "ours-train-on-host": {"masters_on_host": True},
    "ours-train-on-host-in-backward": {"optimizer_in_backward": True, "masters_on_host": True},
}
PEERS = (*OURS, "trl", "unsloth")
# Median and sigma of the logarithm of the letters, one token each, of a document
LENGTHS = (150, 0.8)
SHORTEST = 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPARE = 1.2  # tokens of the documents for each that is trained on
_LOOKED_AT = 3  # the update whose gradients are looked at


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        shape: of the model, by its name in `shapes`.
        row_tokens: of a packed row at most; an update is one row.
        optim, optim_args: as transformers calls them. Masters on the host have `adamw_torch_fused`.
        steps: updates of a run.
        warm: of them, the first that do not count.
    """

    shape: str
    row_tokens: int
    optim: str = "adamw_torch_fused"
    optim_args: str | None = None
    steps: int = 16
    warm: int = 6


CASES = {
    "0.5b": Case("qwen2.5-0.5b", row_tokens=2048, steps=40, warm=15),
    "3b": Case("llama3.2-3b", row_tokens=8192),
    "8b": Case("llama3.1-8b", row_tokens=8192, optim="adamw_8bit", steps=12, warm=5),
    "8b-torchao": Case(
        "llama3.1-8b",
        row_tokens=8192,
        optim="adamw_torch_8bit",
        optim_args="bf16_stochastic_round=true",
        steps=12,
        warm=5,
    ),
    "tiny": Case("tiny", row_tokens=256, steps=6, warm=2),
}


def main() -> int:
    parser = parser_of(__doc__, CASES, "0.5b,3b", PEERS)
    parser.set_defaults(peers="ours,trl,unsloth")
    add = parser.add_argument
    add("--weights", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16")
    add("--flash", type=Path, help="a folder with the package flash_attn, for trl and unsloth")
    return run_peers(__file__, parser, CASES, PEERS, child, line_of, lengths=LENGTHS)


def line_of(run: dict[str, Any]) -> str:
    return (
        f"{run['ms']:.1f} ms an update, {run['tokens_s']:,.0f} tokens/s, {run['peak_GiB']:.2f} GiB (device "
        f"{run['device_GiB']:.2f}), {run['tokens']:,.0f} tokens an update, loss {run['losses'][0]:.4f} to "
        f"{run['losses'][-1]:.4f}\n"
        f"    {run['trained']:,} of {run['weights']:,} weights train; weights {_said(run['weight_dtypes'])}, "
        f"gradients {_said(run['gradient_dtypes'])}, moments {_said(run['moment_dtypes'])}\n"
        f"    {run['optimizer']}, norm clipped to {run['clipped_to']:g}, {run['recomputing']} modules "
        f"recompute, attention {run['attention']}, batch {run['batch']}\n"
        f"    loaded in {run['load_s']:.0f} s, trained in {run['train_s']:.0f} s"
        + "".join(f"\n    {line}" for line in run["report"])
    )


def _said(dtypes: dict[str, int]) -> str:
    return " and ".join(f"{n:,} in {dtype}" for dtype, n in dtypes.items()) or "none"


# In a process of its own


def child(what: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    if args.flash is not None and what in ("trl", "unsloth"):  # before transformers looks for it
        sys.path.insert(0, str(args.flash.resolve()))
    folder = build(CASES[name].shape, args.work)
    return {} if what == "build" else train(what, CASES[name], folder, args.work, args.weights)


def texts(case: Case) -> list[str]:
    """Documents of random letters, enough for all rows."""
    draw = random.Random(0)
    median, sigma = LENGTHS
    found, wanted = [], _SPARE * case.steps * case.row_tokens
    while wanted > 0:
        length = max(SHORTEST, min(int(median * draw.lognormvariate(0.0, sigma)), case.row_tokens // 2))
        found.append("".join(draw.choices(LETTERS, k=length)))
        wanted -= length
    return found


def load(peer: str, case: Case, folder: str, weights: str) -> tuple[Any, Any]:
    """The model, every weight of which trains, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    on_gpu, dtype = torch.cuda.is_available(), getattr(torch, weights)
    if peer in OURS:
        from unsloth_pack import FastLanguageModel

        return FastLanguageModel.from_pretrained(
            folder, max_seq_length=case.row_tokens, dtype=dtype, full_finetuning=True
        )
    if peer == "unsloth":
        from unsloth import FastLanguageModel as Unsloth

        return Unsloth.from_pretrained(
            folder,
            max_seq_length=case.row_tokens,
            dtype=torch.bfloat16,
            load_in_4bit=False,
            full_finetuning=True,
            use_gradient_checkpointing=False,
            **({"float32_mixed_precision": True} if weights == "float32" else {}),
        )
    has_flash = on_gpu and importlib.util.find_spec("flash_attn") is not None
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="flash_attention_2" if has_flash else "sdpa"
    )
    return model.to("cuda" if on_gpu else "cpu"), AutoTokenizer.from_pretrained(folder)


def train(peer: str, case: Case, folder: str, work: Path, weights: str) -> dict[str, Any]:
    """The figures of one run."""
    began = time.perf_counter()
    if peer == "unsloth":  # before TRL is imported
        import unsloth  # noqa: F401
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.training_args import OptimizerNames
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    model, tokenizer = load(peer, case, folder, weights)
    options = OURS.get(peer) or {}
    # What `unsloth-pack train` sets besides, so that nothing waits for the device
    of_train = {"logging_nan_inf_filter": False, "accelerator_config": {"non_blocking": on_gpu}}
    config = SFTConfig(
        output_dir=str(work / f"full-{peer}"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        packing=True,
        max_length=case.row_tokens,
        max_steps=case.steps,
        learning_rate=1e-4,
        warmup_steps=5,
        weight_decay=0.01,
        max_grad_norm=0.0 if "optimizer_in_backward" in options else 1.0,
        logging_steps=5,
        optim="adamw_torch_fused" if "masters_on_host" in options else case.optim,
        optim_args=None if "masters_on_host" in options else case.optim_args,
        gradient_checkpointing=False,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
        save_strategy="no",
        seed=3407,
        **({} if OURS.get(peer) is None else of_train),
    )
    kind: Any = SFTTrainer
    if OURS.get(peer) is not None:
        from unsloth_pack.training.trainer import RunTrainer as kind
    if "masters_on_host" in options:
        from unsloth_pack.training.optimizers import check_host_memory

        check_host_memory(model)
    seen: dict[str, Any] = {}
    device_bytes = [0]  # taken of the device after each update, caches included

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == _LOOKED_AT - 1:
                seen.update(look_at(trainer.model))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if on_gpu:
                free, total = torch.cuda.mem_get_info()
                device_bytes.append(total - free)

    trainer = kind(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"text": texts(case)}),
        processing_class=tokenizer,
        callbacks=[Watch()],
        **options,
    )
    watched = Watched()
    watched.follow(trainer)
    replays = count_replays(model) if peer in OURS else None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    loaded = time.perf_counter()
    trainer.train()
    seconds = watched.seconds(case.warm)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {
        "ms": 1000 * statistics.median(seconds),
        "tokens_s": statistics.median(
            n / s for n, s in zip(watched.tokens[case.warm :], seconds, strict=True)
        ),
        "tokens": statistics.mean(watched.tokens),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "device_GiB": max(device_bytes) / 2**30,
        "losses": [float(loss) for loss in watched.losses],
        **seen,
        "batch": watched.shapes,
        "moment_dtypes": moment_dtypes(optimizer),
        "optimizer": f"{OptimizerNames(config.optim).value} ({type(optimizer).__name__})",
        "clipped_to": config.max_grad_norm,
        "attention": getattr(model.config, "_attn_implementation", None),
        "load_s": loaded - began,
        "train_s": time.perf_counter() - loaded,
        "report": [] if replays is None else report_of(model, replays, case.steps),
    }


def elements(tensors: Iterable[Any]) -> dict[str, int]:
    """How many numbers they hold, by dtype."""
    counted: Counter[str] = Counter()
    for tensor in tensors:
        counted[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return dict(counted.most_common())


def look_at(model: Any) -> dict[str, Any]:
    """What trains, in which dtype, and its gradients, where there are any between two updates."""
    parameters = list(model.parameters())
    return {
        "weights": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "weight_dtypes": elements(parameters),
        "gradient_dtypes": elements(p.grad for p in parameters if p.grad is not None),
        "recomputing": sum(bool(getattr(m, "gradient_checkpointing", False)) for m in model.modules()),
    }


def moment_dtypes(optimizer: Any) -> dict[str, int]:
    """Of the state that has a number for each of a weight, not of scales and counts.

    torchao's moments in 8 bits say that they are of the weight's dtype; what they hold is their `codes`.
    """
    return elements(
        getattr(value, "codes", value)
        for weight, state in optimizer.state.items()
        for value in state.values()
        if hasattr(value, "dtype") and value.numel() == weight.numel() > 1
    )


def count_replays(model: Any) -> list[bool]:
    """For each row from now on whether it was replayed from a CUDA graph."""
    graphs, replayed = model.get_decoder().step_graphs, []

    def counted(make: Callable[..., Any], decides: bool) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            output = make(*args, **kwargs)
            if decides or output is not None:
                replayed.append(output is not None)
            return output

        return made

    # Where the first one gives nothing, the second one is asked
    graphs.replay, graphs.run = counted(graphs.replay, False), counted(graphs.run, True)
    return replayed


def report_of(model: Any, replays: list[bool], steps: int) -> list[str]:
    from unsloth_pack.patching.patch import patch_of

    patch = patch_of(model)
    assert patch is not None
    said = f"{sum(replays)} of {steps} rows replayed; step {model.get_decoder().step_graphs}"
    return [said, *str(patch.report).splitlines()]


if __name__ == "__main__":
    sys.exit(main())

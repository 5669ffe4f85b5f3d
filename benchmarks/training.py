"""Memory over a run, the time to its first steps, and the longest context that trains.

    python benchmarks/training.py curve    [--shape S] [--dataset FILE] [--steps 200] [--json PATH]
    python benchmarks/training.py start-up [--shape S] [--dataset FILE] [--json PATH]
    python benchmarks/training.py context  [--shape S] [--start TOKENS] [--most TOKENS] [--json PATH]

curve     Memory at every 10 steps of packed training on real text lengths: the peak since the last look, the
          bytes held, and the bytes that the allocator has reserved. Exit code 1 if one of them is more than
          1% higher after the first 50 steps than within them. Captures within them raise the peak, which can
          hide growth; the bytes held show it.
start-up  The seconds to import torch, then unsloth_pack, then its FastLanguageModel; to load a model; and of
          its first steps, without compiled kernels on the disk and again with those of the run before. Exit
          code 1 if the first step takes more than 60 s.
context   The longest document that trains in TRL's SFTTrainer, in bfloat16 and 4-bit, with gradient
          checkpointing and the inputs of layers on the host; the same for Unsloth if it is installed. Only
          --layers of the layers run, because one step of all would take an hour. Memory for the weights,
          adapters, gradients and moments of the others is allocated and not used. The first trials are at
          --start and at twice that. A line through their peaks gives the end of the GPU's memory, and trials
          around it follow until one fits and one that is 1/64 longer does not. Each trial has a process of
          its own. `host GiB` is the memory that the inputs of all layers would take.

Models have random weights and are built once under --work.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shapes import SHAPES, build, device_name, versions

GRAIN = 4096  # tokens
USABLE = 0.98  # of a GPU's memory: the rest is the CUDA context and fragments
FINENESS = 64  # trials near the end of memory are 1/FINENESS of the context apart
ALLOWED_GROWTH = 1.01
SETTLED = 50  # steps
COLD_LIMIT = 60  # seconds
FIRST_STEPS = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=("curve", "start-up", "context"))
    add("--shape", choices=tuple(SHAPES), default="tiny")
    add("--dataset", default="demo", help="a file of rows for curve and start-up (default: the demo's)")
    add("--steps", type=int, default=200, help="of curve (default: 200)")
    add(
        "--layers",
        type=int,
        default=2,
        help="layers that run in context; the shape's number for all (default: 2)",
    )
    add("--start", type=int, default=8 * GRAIN, help=f"tokens (default: {8 * GRAIN})")
    add("--most", type=int, help="tokens; needed without a GPU (default: the model's positions)")
    add("--peers", default="unsloth_pack,unsloth", help="libraries of context, if installed (default: both)")
    add("--weights", default="bfloat16,4-bit", help="weights of context (default: both)")
    add("--timeout", type=int, default=900, help="seconds of one trial of context")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "unsloth-pack-benchmarks")
    add("--json", type=Path, help="also write every number here")
    add("--trial", help=argparse.SUPPRESS)  # what a process of its own is to do, as JSON
    args = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if args.trial:
        trial = {"start-up": first_steps, "context": train_on_one_document}[args.what]
        print("RESULT " + json.dumps(trial(args, **json.loads(args.trial))))
        return 0
    import torch

    if args.what == "context" and not torch.cuda.is_available() and not args.most:
        print("context fills a GPU and this machine has none; --most TOKENS tries it out", file=sys.stderr)
        return 2
    report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "shape": args.shape}
    report |= {"device": device_name(), "versions": versions()}
    print(f"{args.shape} on {report['device']}, torch {torch.__version__}\n")
    figures, is_fine = {"curve": curve, "start-up": start_up, "context": context}[args.what](args)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report | figures, indent=1) + "\n")
    return 0 if is_fine else 1


# Memory over a run


def curve(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    from transformers import TrainerCallback

    looks: list[dict[str, float]] = []
    print(f"{'step':>6}{'peak GiB':>10}{'held GiB':>10}{'reserved GiB':>14}")

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % 10 == 0:
                looks.append({"step": state.global_step} | memory())
                print("{step:>6}{peak:>10.3f}{held:>10.3f}{reserved:>14.3f}".format(**looks[-1]), flush=True)

    make_trainer(args, args.steps, [Look()]).train()
    growth = {name: ratio for name in ("peak", "held", "reserved") if (ratio := grown(looks, name))}
    if not growth:
        print(f"\nfewer than {SETTLED + 10} steps do not show whether memory grows")
        return {"curve": looks}, True
    for name, ratio in growth.items():
        grew = "grew" if ratio > ALLOWED_GROWTH else "did not grow"
        print(f"\n{name} memory {grew} after step {SETTLED}: {ratio:.4f} of what it was", end="")
    print()
    return {"curve": looks, "growth": growth}, max(growth.values()) <= ALLOWED_GROWTH


def grown(looks: list[dict[str, float]], name: str) -> float:
    """The maximum after the run has settled, relative to the maximum before; 0 if either is missing."""
    parts = [[look[name] for look in looks if (look["step"] > SETTLED) is late] for late in (False, True)]
    return max(parts[1]) / max(parts[0]) if all(map(any, parts)) else 0.0


def memory() -> dict[str, float]:
    """GiB: the peak since the last look, the memory held, and the memory that the allocator has reserved.

    On a CPU they are of the process: its peak is that since it began, and 0 stands for the allocator.
    """
    import torch

    if torch.cuda.is_available():
        found = [
            torch.cuda.max_memory_allocated(),
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
        ]
        torch.cuda.reset_peak_memory_stats()
    else:
        status = Path("/proc/self/status").read_text().splitlines()
        n_bytes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in status if line.endswith("kB")}
        found = [n_bytes["VmHWM"], n_bytes["VmRSS"], 0]
    return dict(zip(("peak", "held", "reserved"), (n / 2**30 for n in found), strict=True))


def make_trainer(args: argparse.Namespace, steps: int, callbacks: list[Any]) -> Any:
    """The trainer of `unsloth-pack train` over packed rows of the data, on a model of the shape."""
    import torch

    from unsloth_pack import FastLanguageModel
    from unsloth_pack.cli import quieten
    from unsloth_pack.data import load_rows
    from unsloth_pack.packing import pack_dataset
    from unsloth_pack.run.documents import DocumentPreparation
    from unsloth_pack.training.trainer import make_trainer
    from unsloth_pack.training.trl_setup import sft_config

    quieten(show_bars=False)
    rows, length = load_rows(args.dataset), SHAPES[args.shape].tokens
    folder = build(args.shape, args.work, ["\n".join(map(str, row.values())) for row in rows])
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=length)
    model = FastLanguageModel.get_peft_model(model)
    documents = DocumentPreparation(tokenizer, length).documents(rows).rows
    on_gpu = torch.cuda.is_available()
    config = sft_config(
        str(args.work / "out"),
        padding_free=True,
        dtype=model.dtype,
        per_device_train_batch_size=1,
        max_steps=steps,
        learning_rate=2e-4,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        logging_steps=5,
        save_strategy="no",
        report_to="none",
    )
    return make_trainer(model, tokenizer, config, pack_dataset(documents, length), None, callbacks)


# The time to the first steps


def start_up(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import unsloth_pack; "
    )
    code += "c = time.perf_counter(); from unsloth_pack import FastLanguageModel; d = time.perf_counter(); "
    code += "print(b - a, c - b, d - c)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
    if failed := next((run for run in runs if run.returncode), None):
        raise RuntimeError(failed.stderr)
    columns = zip(*([float(x) for x in run.stdout.split()[-3:]] for run in runs), strict=True)
    names = ("import torch", "import unsloth_pack, after it", "its FastLanguageModel, after it")
    imports = dict(zip(names, map(statistics.median, columns), strict=True))
    for name, seconds in imports.items():
        print(f"{name:<36}{seconds:>9.3f} s")
    found = {"imports": imports}
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        for name in ("cold", "warm"):
            found[name] = trial = run_trial(args, {})
            if "failed" in trial:
                print(f"{name}: {trial['failed']}")
                return found, False
            print(f"\n{name}: model, data and trainer {trial['load']:.1f} s; steps, in seconds")
            for number, step in enumerate(trial["steps"], start=1):
                print(f"{number:>6}{step['seconds']:>9.3f}  {step['step_graphs']}")
    first = found["cold"]["steps"][0]["seconds"]
    print(f"\nthe cold first step took {first:.1f} s, {COLD_LIMIT} are allowed")
    return found, first <= COLD_LIMIT


def first_steps(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import TrainerCallback

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    steps: list[dict[str, Any]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            graphs = trainer.model.get_base_model().base_model.step_graphs
            steps.append({"seconds": now() - self.start, "step_graphs": str(graphs)})

    start = now()
    trainer = make_trainer(args, FIRST_STEPS, [Clock()])
    load = now() - start
    trainer.train()
    return {"load": load, "steps": steps}


# The longest context


def context(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    build(args.shape, args.work, layers=args.layers)
    peers = [peer for peer in args.peers.split(",") if find_spec(peer) is not None]
    found = []
    for weights in args.weights.split(","):
        for peer in peers:
            trials: list[dict[str, Any]] = []
            longest = search(args, {"peer": peer, "in_4bit": weights == "4-bit"}, trials)
            found.append({"peer": peer, "weights": weights, "longest": longest, "trials": trials})
    print(f"\n{'':<14}{'weights':<10}{'longest context':>16}{'peak GiB':>10}{'host GiB':>10}")
    shape = SHAPES[args.shape]
    for run in found:
        best = next((t for t in run["trials"] if t["tokens"] == run["longest"]), {"peak": 0})
        run["host"] = 2 * shape.hidden * shape.layers * run["longest"] / 2**30
        print(
            f"{run['peer']:<14}{run['weights']:<10}{run['longest']:>16,}{best['peak']:>10.1f}{run['host']:>10.1f}"
        )
    for missing in sorted({*args.peers.split(",")} - {*peers}):
        print(f"{missing} is not installed here")
    return {"layers": args.layers, "context": found}, any(run["longest"] for run in found)


def search(args: argparse.Namespace, case: dict[str, Any], trials: list[dict[str, Any]]) -> int:
    """The most tokens that train; 0 if not even --start does. Any failure of a trial counts as too long."""
    most = args.most or SHAPES[args.shape].positions

    def fits(tokens: int) -> bool:
        trial = run_trial(args, case | {"tokens": tokens})
        trials.append({"tokens": tokens} | trial)
        print(
            f"{case['peer']}, {'4-bit' if case['in_4bit'] else 'bfloat16'}, {tokens:>9,}: {said(trial)}",
            flush=True,
        )
        return "failed" not in trial

    start = min(args.start, most)
    if not fits(start):
        return 0
    fit, too_many, guess, back = start, most + GRAIN, min(2 * start, most), 0
    while too_many - fit > (step := max(1, fit // FINENESS // GRAIN) * GRAIN):
        if fits(guess):
            fit, expected = guess, end_of_memory(trials)
        else:
            too_many, expected, back = guess, guess, 2 * back or guess // FINENESS // GRAIN * GRAIN or GRAIN
        middle = (fit + too_many) // 2 // GRAIN * GRAIN
        guess = min(max(expected - back, middle if back else fit + step), too_many - step)
    return fit


def end_of_memory(trials: list[dict[str, Any]]) -> int:
    """Tokens at which the line through the last two peaks meets the memory that a GPU has for tensors."""
    (t0, p0), (t1, p1) = [(t["tokens"], t["peak"]) for t in trials if "failed" not in t][-2:]
    usable = USABLE * (trials[0]["total"] or float("inf"))
    return int(min((usable - p0) * (t1 - t0) / max(p1 - p0, 1e-3) + t0, 2**40)) // GRAIN * GRAIN


def said(trial: dict[str, Any]) -> str:
    return trial.get("failed") or f"{trial['peak']:.1f} GiB, {trial['seconds']:.1f} s"


def train_on_one_document(args: argparse.Namespace, peer: str, in_4bit: bool, tokens: int) -> dict[str, Any]:
    if peer == "unsloth":
        from unsloth import FastLanguageModel
    else:
        from unsloth_pack import FastLanguageModel
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    model, tokenizer = FastLanguageModel.from_pretrained(
        build(args.shape, args.work, layers=args.layers),
        max_seq_length=tokens,
        dtype=torch.bfloat16,
        load_in_4bit=in_4bit,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=TARGETS,
        lora_alpha=16,
        use_gradient_checkpointing="unsloth",
    )
    others = set_aside(model, SHAPES[args.shape].layers)
    generator = torch.Generator().manual_seed(0)
    vocabulary = SHAPES[args.shape].vocab
    document = torch.randint(3, vocabulary, (tokens,), generator=generator).tolist()
    config = SFTConfig(
        output_dir=str(args.work / "out"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,  # peers' defaults differ
        max_steps=1,
        max_length=tokens if peer == "unsloth" else None,
        padding_free=peer == "unsloth_pack",  # a packed row of one document
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
    )
    rows = Dataset.from_dict({"input_ids": [document]})
    trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=config)
    memory()  # resets the peak
    start = time.perf_counter()
    trainer.train()
    del others
    total = torch.cuda.mem_get_info()[1] / 2**30 if on_gpu else 0.0
    return memory() | {"seconds": time.perf_counter() - start, "total": total}


def set_aside(model: Any, n_layers: int) -> Any:
    """GPU memory for the missing layers up to `n_layers`, and for the optimizer's moments of the layers that
    are there, because a first step does not have these moments yet.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    layers = model.get_decoder().layers
    inside = {id(p) for p in layers.parameters()}
    outside = sum(p.nbytes for p in model.parameters() if id(p) not in inside)
    trained = sum(p.nbytes for p in layers.parameters() if p.requires_grad)
    held = (torch.cuda.memory_allocated() - outside + 3 * trained) / len(layers)  # gradients and two moments
    missing = (n_layers - len(layers)) * held + 2 * trained
    return torch.empty(int(missing), dtype=torch.uint8, device="cuda")


# Processes


def run_trial(args: argparse.Namespace, trial: dict[str, Any]) -> dict[str, Any]:
    """The answer of a fresh process, or `failed` and why."""
    command = [sys.executable, __file__, args.what, "--shape", args.shape, "--dataset", args.dataset]
    command += ["--layers", str(args.layers), "--work", str(args.work), "--trial", json.dumps(trial)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {args.timeout} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if answers:
        return json.loads(answers[-1].removeprefix("RESULT "))
    if done.returncode == -9:
        return {"failed": "killed, as the host does when its memory runs out"}
    lines = done.stderr.strip().splitlines() or ["it said nothing"]
    errors = [line for line in lines if "Error" in line]
    return {"failed": (errors or lines)[-1]}


if __name__ == "__main__":
    sys.exit(main())

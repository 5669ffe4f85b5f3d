"""Training on several GPUs: tokens and updates a second after the warm-up, compared with one GPU.

    python benchmarks/ranks.py --gpus 1,2 --mode ddp,fsdp2,zero2,zero3 [--shape S] [--rows N] [--dataset FILE]
                               [--flags FLAGS] [--json P]

For 70B, whose 141 GB are written to --work within a minute: --gpus 4 --mode fsdp2,fsdp2-nf4 --shape llama70b
--steps 10 --cold 4 --flags=--use_gradient_checkpointing=true

Each combination of a number of GPUs and a mode is a run of `cli.py` under torchrun, with --rows packed rows
per rank and update. The model has random weights and is built once under --work; the rows of --dataset are
repeated until there are enough. On one GPU nothing is sharded, and every mode is compared with that one run.

The first --cold updates compile kernels and do not count. Seconds are the median over the rest, from one log
line to the next; tokens are those of all ranks, padding not counted. `waiting` is the sampler's estimate of
the share of time that the average rank waits for the busiest one. Exit code 1 if a run failed.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

from shapes import EVERY_SHAPE, build, device_name, versions

ROOT = Path(__file__).resolve().parents[1]
MODES = {
    "ddp": [],
    "fsdp2": ["--fsdp=full"],
    "fsdp2-keep": ["--fsdp=keep"],
    "fsdp2-nf4": ["--fsdp=full", "--load_in_4bit"],
    "fsdp2-fp8": ["--fsdp=full", "--load_in_fp8"],
    "ddp-nf4": ["--load_in_4bit"],
    "zero2": ["--deepspeed=zero2"],
    "zero3": ["--deepspeed=zero3"],
}
LETTERS_A_TOKEN = 6  # an upper limit in English text: too many rows are better than too few


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", default="1,2", help="numbers of GPUs; of processes on a CPU (default: 1,2)")
    add("--mode", default="ddp", help=f"of {', '.join(MODES)} (default: ddp)")
    add("--shape", choices=tuple(EVERY_SHAPE), default="tiny")
    add("--rows", type=int, default=1, help="packed rows of a rank and update (default: 1)")
    add("--dataset", default="demo", help="a file of rows (default: the demo's)")
    add("--steps", type=int, default=32, help="updates of a run (default: 32)")
    add("--cold", type=int, default=8, help="of them, the first that do not count (default: 8)")
    add("--flags", default="", help="further flags of every run")
    add("--timeout", type=int, default=600, help="seconds of one run")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "unsloth-pack-benchmarks")
    add("--json", type=Path, help="also write every number here")
    args = parser.parse_args()
    if args.dataset != "demo":
        args.dataset = str(Path(args.dataset).resolve())  # the model is built in another folder
    args.work = args.work.resolve()
    counts = sorted({int(count) for count in args.gpus.split(",")})
    modes = args.mode.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--mode is {', '.join(unknown)}; choose of {', '.join(MODES)}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    model, data = prepared(args, most_rows=max(counts) * args.steps * args.rows)

    rows = f"{args.rows} x {EVERY_SHAPE[args.shape].tokens:,} tokens a rank and update"
    print(f"{args.shape} on {device_name()}, {rows}, warm\n")
    print(f"{'':<14}{'updates/s':>10}{'tokens/s':>10}{'times one':>10}{'GiB a rank':>12}{'waiting':>9}")
    runs: list[dict[str, Any]] = []
    for gpus in counts:
        for mode in ["ddp"] if gpus == 1 else modes:
            runs.append({"gpus": gpus, "mode": mode} | run(args, gpus, mode, model, data))
            compare(runs[-1], alone=runs[0])
            print(line_of(runs[-1]), flush=True)
    if args.json:
        report = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "shape": args.shape,
            "rows": args.rows,
        }
        report |= {"device": device_name(), "versions": versions(), "runs": runs}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any("failed" in run for run in runs))


def prepared(args: argparse.Namespace, most_rows: int) -> tuple[str, Path]:
    """The model's folder, and a file with text for so many packed rows; in a process of their own.

    Building takes memory of the GPU, which the runs need.
    """
    code = "import sys, ranks; print(*ranks.build_all(*sys.argv[1:]))"
    arguments = [args.shape, args.dataset, str(args.work), str(most_rows)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parent,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    model, data = done.stdout.splitlines()[-1].split()
    return model, Path(data)


def build_all(shape: str, dataset: str, work: str, most_rows: str) -> tuple[str, Path]:
    from unsloth_pack.cli import quieten
    from unsloth_pack.data import load_rows

    quieten(show_bars=False)
    rows = load_rows(dataset).to_list()
    texts = ["\n".join(map(str, row.values())) for row in rows]
    model = build(shape, Path(work), texts)
    wanted = int(most_rows) * EVERY_SHAPE[shape].tokens * LETTERS_A_TOKEN
    copies = -(-wanted // sum(map(len, texts)))
    data = Path(work) / f"{shape}-{most_rows}-rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) * copies)
    return model, data


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def run(args: argparse.Namespace, gpus: int, mode: str, model: str, data: Path) -> dict[str, Any]:
    """The figures of one run, or `failed` and why."""
    out = args.work / f"ranks-{gpus}-{mode}"
    command = [sys.executable]
    if gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    command += [str(ROOT / "cli.py"), "--sample_packing", "--overwrite_output_dir", "--no_probe"]
    command += [f"--model_name={model}", f"--dataset={data}", f"--output_dir={out}"]
    command += [f"--max_seq_length={EVERY_SHAPE[args.shape].tokens}", f"--max_steps={args.steps}"]
    command += ["--max_token_loss=1"]  # documents of the data set may be longer than a row
    command += [
        f"--per_device_train_batch_size={args.rows}",
        "--gradient_accumulation_steps=1",
        "--logging_steps=1",
        *MODES[mode],
        *args.flags.split(),
    ]
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=args.timeout
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {args.timeout} s", "command": command}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        said = [line for line in lines if line.startswith("unsloth-pack:")] or lines
        return {"failed": said[-1], "stderr": done.stderr[-4000:], "command": command}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {"wall_seconds": time.perf_counter() - began} | figures(lines, args.cold)


def figures(lines: list[dict[str, Any]], cold: int) -> dict[str, Any]:
    """Figures of the updates after the first `cold`, from the lines of a run's `metrics.jsonl`."""
    logs = [line for line in lines if line["kind"] == "log" and "loss" in line]
    warm = [
        {name: after[name] - before[name] for name in ("seconds", "num_tokens")}
        for before, after in pairwise(logs)
        if before["step"] >= cold
    ]
    seconds = statistics.median(update["seconds"] for update in warm)
    data = next(line for line in lines if line["kind"] == "data" and line["use"] == "train")
    summary = next(line for line in lines if line["kind"] == "summary")
    return {
        "warm_updates": len(warm),
        "seconds_an_update": seconds,
        "updates_s": 1 / seconds,
        "tokens_an_update": statistics.mean(update["num_tokens"] for update in warm),
        "tokens_s": statistics.median(update["num_tokens"] / update["seconds"] for update in warm),
        "updates": warm,
        "peak_GiB_by_rank": [n_bytes / 2**30 for n_bytes in summary["peak_memory_by_rank"]],
        "spread": data.get("spread"),
        "losses": [line["loss"] for line in logs],
    }


def compare(run: dict[str, Any], alone: dict[str, Any]) -> None:
    """Add the ratios of a run to the run on one GPU, if there is one."""
    if alone["gpus"] == 1 and "tokens_s" in run and "tokens_s" in alone:
        run["times_one"] = run["tokens_s"] / alone["tokens_s"]


def line_of(run: dict[str, Any]) -> str:
    name = f"{run['gpus']} {run['mode'] if run['gpus'] > 1 else 'alone'}"
    if "failed" in run:
        return f"{name:<14}{run['failed']}"
    times = f"{run['times_one']:.2f}" if "times_one" in run else "-"
    waiting = f"{run['spread']['waiting']:.1%}" if run["spread"] else "-"
    return (
        f"{name:<14}{run['updates_s']:>10.2f}{run['tokens_s']:>10,.0f}{times:>10}"
        f"{max(run['peak_GiB_by_rank']):>12.1f}{waiting:>9}"
    )


if __name__ == "__main__":
    sys.exit(main())

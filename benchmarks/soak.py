"""A long packed run in slices: interrupted at random, resumed, and judged over all slices together.

    python benchmarks/soak.py --data FOLDER --work FOLDER [--minutes 9] [--shape S] [--state PREFIX]

Each slice continues the soak in --work for its minutes. The command line trains on packed rows of all files
in --data, evaluates ten times a run and saves every --save_steps updates. After a run has ended, another one
starts with the next seed. About every --every updates, SIGKILL or SIGTERM ends the process, half of the time
while it saves, and the next process goes on with --resume. --seed determines the signals and their moments.

--state carries a soak to another machine: the files PREFIX.0, PREFIX.1, ... are unpacked into an empty --work
before the slice, and written after it. The model and the data are made again. --minutes 0 only judges.

Every process notes each of its updates: the loss, the rows and the number of tokens that it saw, and memory.
The judgements come from these notes and the runs' metrics, over all slices until now. Exit code 1 if any
fails.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

from shapes import SHAPES, build, device_name, versions
from soak_judgement import judge, read_lines

from unsloth_pack.report.metrics import FILE_NAME, has_ended

PART = 14 * 2**20  # bytes of a file of --state
LONGEST_TEXT = 2000  # characters of plain text that are one document
HELD_OUT = 20  # every so many documents one is held out
UPDATE_POLL, SAVE_POLL = 0.02, 0.001  # seconds
PATIENCE = 180  # seconds for an update and a save after SIGTERM
context: Any = multiprocessing.get_context("spawn")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="a folder of json, jsonl, csv, parquet and txt files")
    add("--work", type=Path, required=True, help="holds the soak from slice to slice")
    add("--minutes", type=float, default=9, help="of this slice (default: 9)")
    add("--sessions", type=int, default=2**31, help="at most in this slice, however many minutes are left")
    add("--shape", choices=("demo", *SHAPES), default="qwen0.5b", help="of the model (default: qwen0.5b)")
    add("--tokens", type=int, help="of a packed row (default: the shape's)")
    add("--epochs", type=int, default=20, help="of each run (default: 20)")
    add("--save_steps", type=int, default=50, help="updates (default: 50)")
    add("--every", type=int, default=600, help="updates between interruptions, on average (default: 600)")
    add("--seed", type=int, default=0)
    add("--state", help="where the soak is carried: the beginning of the files' names", metavar="PREFIX")
    add("--json", type=Path, help="also write every number here")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * args.minutes
    args.work.mkdir(parents=True, exist_ok=True)
    if args.state and not (args.work / "sessions").exists():
        unpack(args.state, args.work)
    (args.work / "sessions").mkdir(exist_ok=True)
    if args.minutes:
        in_child(prepare, args.data, args.work, args.shape)
    is_well, before = True, read_log(args.work)
    slice_number, last = 1 + max([log["slice"] for log in before], default=0), len(before) + args.sessions
    while is_well and time.monotonic() < deadline and len(read_log(args.work)) < last:
        is_well = session(args, slice_number, deadline)
    if args.state:
        pack(args.state, args.work)
    report, passed = judge(args.work)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if passed and is_well else 1


# The mixture and the model


def in_child(function: Any, *arguments: Any) -> None:
    """Run a function in a process of its own, whose end frees all that it loaded, its GPU context too."""
    child = context.Process(target=function, args=arguments)
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"{function.__name__} failed")


def prepare(data: Path, work: Path, shape: str) -> None:
    """Write the mixture of documents, and a model whose tokenizer was trained on it."""
    documents = [document for path in sorted(data.iterdir()) for document in documents_of(path)]
    random.Random(0).shuffle(documents)
    (work / "data").mkdir(exist_ok=True)
    parts = {"eval": documents[::HELD_OUT], "train": [d for i, d in enumerate(documents) if i % HELD_OUT]}
    for name, rows in parts.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (work / "data" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    if shape != "demo":
        build(shape, work / "model", [" ".join(document.values()) for document in documents])


def documents_of(path: Path) -> list[dict[str, str]]:
    """Prompts with completions from a file of any format; plain text gives completions only."""
    from unsloth_pack.data import load_rows
    from unsloth_pack.data.files import SUFFIXES
    from unsloth_pack.data.formats import Conversion

    if path.suffix not in SUFFIXES:
        return []
    source = load_rows(str(path))
    has_turns = not {"conversations", "messages"}.isdisjoint(source.column_names)
    rows = list(Conversion(source, chat_template=has_turns).rows(0, len(source), 1000))
    if "text" in rows[0]:
        texts = [row["text"] for row in rows]
        pieces = [text[i : i + LONGEST_TEXT] for text in texts for i in range(0, len(text), LONGEST_TEXT)]
        return [{"prompt": "", "completion": piece} for piece in pieces if piece.strip()]
    if "prompt" in rows[0]:
        return rows
    found = []
    for turns in (row["messages"] for row in rows):
        last = max(i for i, turn in enumerate(turns) if turn["role"] == "assistant")
        before = "".join(f"{turn['role']}: {turn['content']}\n" for turn in turns[:last])
        found.append({"prompt": f"{before}assistant: ", "completion": turns[last]["content"]})
    return found


# One process of training


def session(args: argparse.Namespace, slice_number: int, deadline: float) -> bool:
    """Start or resume the current run, and interrupt it. Returns whether it ended as expected."""
    number = len(read_log(args.work)) + 1
    runs = sorted((args.work / "runs").glob("*"), key=lambda path: int(path.name))
    if not runs or ((runs[-1] / FILE_NAME).exists() and has_ended(runs[-1])):
        runs.append(args.work / "runs" / str(len(runs) + 1))
    out, notes = runs[-1], args.work / "sessions" / f"{number:04}.jsonl"
    rng = random.Random(f"{args.seed} {number}")
    process = context.Process(target=train, args=(args.work, notes, arguments_of(args, out)))
    process.start()
    try:
        log = {"number": number, "slice": slice_number, "run": int(out.name)}
        log |= interrupt(process, out, notes, rng, args.every, deadline)
    finally:
        process.kill()
    log["ended"] = has_ended(out) if (out / FILE_NAME).exists() else False
    with (args.work / "log.jsonl").open("a") as file:
        file.write(json.dumps(log) + "\n")
    print(said(log), flush=True)
    killed = log["signal"] is not None and log["exit"] == -signal.Signals[log["signal"]]
    stopped = log["signal"] == "SIGTERM" and log["exit"] == 128 + signal.SIGTERM
    is_well = killed or stopped or (log["exit"] == 0 and log["ended"])
    if not is_well:
        print((args.work / "output.txt").read_text()[-4000:], file=sys.stderr)
    return is_well


def arguments_of(args: argparse.Namespace, out: Path) -> list[str]:
    """The command line, with paths inside --work."""
    folder = out.relative_to(args.work)
    if (out / FILE_NAME).exists():
        return ["--resume", f"--output_dir={folder}"]
    demo = args.shape == "demo"
    given = {"model_name": "demo" if demo else f"model/{args.shape}", "output_dir": folder}
    given |= {"dataset": "data/train.jsonl", "eval_dataset": "data/eval.jsonl", "save_steps": args.save_steps}
    given |= {"max_seq_length": args.tokens or (512 if demo else SHAPES[args.shape].tokens)}
    given |= {"num_train_epochs": args.epochs, "seed": args.seed + int(out.name), "r": 4}
    given |= {"gradient_accumulation_steps": 2, "max_token_loss": 1}
    return ["--sample_packing", *(f"--{name}={value}" for name, value in given.items())]


def interrupt(
    process: Any, out: Path, notes: Path, rng: random.Random, every: int, deadline: float
) -> dict[str, Any]:
    """End the process after a random number of updates, or at the deadline. Returns how it ended."""
    number = rng.choice((signal.SIGKILL, signal.SIGTERM))
    in_a_save, n_updates = rng.random() < 0.5, int(every * rng.uniform(0.2, 1.8))
    saving = out / ".saving"

    def is_over() -> bool:
        return time.monotonic() >= deadline or not process.is_alive()

    while not is_over() and n_lines(notes) <= n_updates:
        time.sleep(UPDATE_POLL)
    while in_a_save and not is_over() and not saving.exists():
        time.sleep(SAVE_POLL)
    time.sleep(rng.uniform(0, 0.03))
    if not process.is_alive():
        process.join()
        return {"signal": None, "saving": False, "exit": process.exitcode}
    if time.monotonic() >= deadline:
        number = signal.SIGTERM
    is_saving = saving.exists()
    os.kill(process.pid, number)
    process.join(PATIENCE)
    if number == signal.SIGKILL:
        is_saving = saving.exists()  # what the process has left behind
    return {"signal": number.name, "saving": is_saving, "exit": process.exitcode}


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def said(log: dict[str, Any]) -> str:
    how = f"{log['signal']}{' during a save' if log['saving'] else ''}" if log["signal"] else "no signal"
    end = ", the run is complete" if log["ended"] else ""
    return f"session {log['number']}, run {log['run']}: {how}, exit code {log['exit']}{end}"


def train(work: Path, notes: Path, arguments: list[str]) -> None:
    """Train through the command line, noting every update. Runs in a process of its own."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    output = os.open(work / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    notes = notes.absolute()
    os.chdir(work)
    from tqdm import tqdm

    from unsloth_pack.cli import main

    tqdm.set_lock(threading.RLock())  # the default is a semaphore, which outlives a killed process

    note_updates(notes)
    sys.exit(main(arguments))


def note_updates(notes: Path) -> None:
    """Let the command line's trainer note what each update saw, without waiting for the device."""
    import torch

    from unsloth_pack.training.trainer import RunTrainer

    hashed = torch.randint(-(2**62), 2**62, (2**20,), generator=torch.Generator().manual_seed(0))

    def mark(ids: Any) -> Any:
        """An int64 that tells a row from every other."""
        return ((ids.flatten() + 1) * hashed[: ids.numel()].to(ids.device)).sum()

    kind: Any = RunTrainer
    begin, step, tell = kind.train_from, kind.training_step, kind.log

    def train_from(trainer: Any, checkpoint: Path | None) -> None:
        rows = [int(mark(torch.tensor(row["input_ids"]))) for row in trainer.train_dataset]
        start = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
        about = {"device": device_name(), "versions": versions(), "rows": rows}
        write(about | {"from": start, "rows_per_update": trainer.args.gradient_accumulation_steps})
        trainer.rows_seen = {}  # by update: a line may be written after the next one
        trainer.tokens_seen = {}
        begin(trainer, checkpoint)

    def training_step(trainer: Any, model: Any, inputs: Any, *more: Any) -> Any:
        update, ids = trainer.state.global_step + 1, inputs["input_ids"]
        if update not in trainer.rows_seen and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.rows_seen.setdefault(update, []).append(mark(ids))
        trainer.tokens_seen[update] = trainer.tokens_seen.get(update, 0) + ids.numel()
        return step(trainer, model, inputs, *more)

    def log(trainer: Any, logs: dict[str, float], *more: Any) -> None:
        tell(trainer, logs, *more)
        line = {name: logs[name] for name in ("loss", "eval_loss") if name in logs}
        if "loss" in logs:
            rows = torch.stack(trainer.rows_seen.pop(trainer.state.global_step)).tolist()
            line |= {"rows": rows, "tokens": trainer.tokens_seen.pop(trainer.state.global_step)}
            line |= {"time": time.time()} | memory()
        if line:
            write({"step": trainer.state.global_step, **line})

    def write(line: dict[str, Any]) -> None:
        with notes.open("a") as file:
            file.write(json.dumps(line) + "\n")

    kind.train_from, kind.training_step, kind.log = train_from, training_step, log


def memory() -> dict[str, int]:
    """Bytes of the host now, and the peak of bytes on the GPU within the update."""
    import torch

    status = Path("/proc/self/status").read_text().splitlines()
    host = next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return {"host": host, "gpu": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0}


# What outlives a slice


def read_log(work: Path) -> list[dict[str, Any]]:
    return read_lines(work / "log.jsonl")


def pack(prefix: str, work: Path) -> None:
    """Write notes, metrics and the last checkpoint of the current run as one archive, cut into files."""
    from unsloth_pack.training.checkpoints import last_checkpoint

    runs = sorted((work / "runs").glob("*"), key=lambda path: int(path.name))
    kept = [work / "log.jsonl", work / "sessions", *(run / FILE_NAME for run in runs)]
    if runs and (checkpoint := last_checkpoint(runs[-1])):
        kept.append(checkpoint)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in kept:
            if path.exists():
                tar.add(path, path.relative_to(work))
    for old in parts_of(prefix):
        old.unlink()
    whole = archive.getvalue()
    for number, start in enumerate(range(0, len(whole), PART)):
        path = Path(f"{prefix}.{number}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole[start : start + PART])
    print(f"state: {len(whole) / 2**20:.1f} MiB in {len(parts_of(prefix))} files {prefix}.*")


def unpack(prefix: str, work: Path) -> None:
    whole = b"".join(path.read_bytes() for path in parts_of(prefix))
    if whole:
        with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
            tar.extractall(work, filter="data")


def parts_of(prefix: str) -> list[Path]:
    found = [p for p in Path(prefix).parent.glob(f"{Path(prefix).name}.*") if p.suffix[1:].isdigit()]
    return sorted(found, key=lambda path: int(path.suffix[1:]))


if __name__ == "__main__":
    sys.exit(main())

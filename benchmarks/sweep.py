"""Ours and its peers over many models, row lengths, ranks and kinds of weights: where is each faster?

    python benchmarks/sweep.py --minutes 25 [--peers ours,unsloth] [--points 'qwen*,*-gc'] [--json PATH]
                               [--data FILE] [--resume]
    python benchmarks/sweep.py --list

Each peer is one process that trains point after point. The peers take turns at every point, so that drift of
the machine reaches all of them, and the first of them changes from point to point. A point that fails or runs
out of memory is reported, and the next one runs. A peer that hangs or dies is started again for the rest.

The models have random weights. Each is built under --work when its points begin, and removed after them.
--data is a JSON list of rows with `instruction`, `input` and `output`. Without it the documents are made up,
with lengths like those of such data. A figure is the median of few steps: measure a close ratio again with
more of them.

The results file is written after each point. With --resume, points that it holds are not run again, so that
several calls can share the work. Exit code 1: some points did not run, or ours failed at one.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from comparison import TOLERANCE
from peer_process import PeerProcess
from sweep_points import Point, choose

HERE = Path(__file__).resolve().parent
PEERS = ("ours", "unsloth", "trl", "trl+liger")
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes")
PACKAGES += ("xformers", "unsloth", "unsloth_zoo", "liger-kernel")
START_SECONDS = 240
BUILD_SECONDS = 300
MOST_LEFT_GiB = 1.0  # that a peer may hold between points before it is started again
DOCUMENTS, WORDS = 1000, 5000  # of made-up data


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        points, peers = choose(args.points), peers_of(args.peers)
        if args.list:
            print("\n".join(point.name for point in points))
            return 0
        work = args.work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        (work / "texts.json").write_text(json.dumps(texts_of(args.data)), encoding="utf-8")
        data = args.data.name if args.data else "made up"
        sweep = Sweep(args.json or work / "sweep.json", peers, data, args.resume)
    except (OSError, ValueError) as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    processes = {name: start(name, work, args.peer_path) for name in ("builder", *peers)}
    deadline = time.monotonic() + 60 * args.minutes
    try:
        sweep.check_peers(processes)
        sweep.run(points, processes, work, args.timeout, deadline)
    except ValueError as error:
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    finally:
        for process in processes.values():
            process.stop()
    for peer in peers:
        if peer != "ours":
            print("\n" + "\n".join(table(sweep.found["points"], peer)))
    left = [point.name for point in points if not sweep.has(point.name)]
    if left:
        print(f"\nno time for {len(left)} points; --resume runs them: {', '.join(left)}")
    failed = any("failed" in point["results"]["ours"] for point in sweep.found["points"])
    return int(bool(left) or failed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=25, help="for the whole sweep (default: 25)")
    add("--peers", default="ours,unsloth", help=f"ours and others, of {', '.join(PEERS)}")
    add("--points", help="patterns of names, such as 'qwen*,*-gc' (default: all but the tiny ones)")
    add("--data", type=Path, help="a JSON list of alpaca rows (default: made-up documents)")
    add("--peer-path", action="append", default=[], help="put before PYTHONPATH for peers other than ours")
    add("--timeout", type=float, default=180, help="seconds of one peer at one point (default: 180)")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "unsloth-pack-sweep")
    add("--json", type=Path, help="the results file (default: sweep.json under --work)")
    add("--resume", action="store_true", help="run only the points that the results file lacks")
    add("--list", action="store_true", help="print the points and end")
    return parser.parse_args(argv)


def peers_of(given: str) -> list[str]:
    """The names of --peers.

    Raises:
        ValueError: a name is unknown, ours is missing, or there is nothing to compare with.
    """
    peers = given.split(",")
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise ValueError(f"--peers: {unknown[0]!r} is none of {', '.join(PEERS)}")
    if "ours" not in peers or len(peers) < 2 or len({*peers}) < len(peers):
        raise ValueError(f"--peers: {given!r} must hold ours and at least one other, each once")
    return peers


class Sweep:
    """The results file and the points that it holds.

    Args:
        path: of the file, written after each point.
        peers: ours and others; each answers at every point.
        data: what the documents are, in words.
        resume: whether to go on with the points of the file, if there is one.

    Raises:
        ValueError: there is a file and `resume` is false.
    """

    def __init__(self, path: Path, peers: Sequence[str], data: str, resume: bool) -> None:
        if path.exists() and not resume:
            raise ValueError(f"--json: {path} exists; add --resume to go on with it, or name another file")
        self.path, self.peers = path, peers
        what = "TRL's SFTTrainer, LoRA on all projections, full packed rows, one batch of them an update"
        self.found: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"sweep.py --peers {','.join(peers)}: {what}",
            "data": data,
            "points": [],
        }

    def check_peers(self, processes: Mapping[str, PeerProcess]) -> None:
        """Start the peers, note what is measured, and read the file that is resumed.

        Raises:
            ValueError: a peer does not start, or the file was measured in another way.
        """
        for process in processes.values():  # all at once, as each takes up to half a minute
            process.launch()
        for name, process in processes.items():
            if "failed" in (greeting := process.ready()):
                raise ValueError(f"--peers: {name} {greeting['failed']}")
        self.found["device"] = greeting["device"]
        self.found["versions"] = versions() | {"cuda": greeting["cuda"]}
        if not self.path.exists():
            return
        before = json.loads(self.path.read_text(encoding="utf-8"))
        for key in ("device", "versions", "command", "data"):
            if before.get(key) != self.found[key]:
                raise ValueError(
                    f"--resume: {key} of {self.path} is {before.get(key)}, now {self.found[key]}; "
                    "name another file with --json"
                )
        self.found = before

    def has(self, name: str) -> bool:
        return any(point["point"] == name for point in self.found["points"])

    def run(
        self,
        points: Sequence[Point],
        processes: Mapping[str, PeerProcess],
        work: Path,
        timeout: float,
        deadline: float,
    ) -> None:
        """Run the points that are missing, until the deadline."""
        todo = [point for point in points if not self.has(point.name)]
        longest = 0.0
        for number, point in enumerate(todo):
            began = time.monotonic()
            if began + longest > deadline:
                break
            if number == 0 or todo[number - 1].shape != point.shape:
                model = build(point.shape, processes["builder"], work)
            order = [*self.peers] if number % 2 == 0 else [*self.peers][::-1]
            results = {}
            for peer in order:
                left = max(deadline - time.monotonic(), 0)
                results[peer] = ask(processes[peer], point, model, work, min(timeout, left))
                if time.monotonic() >= deadline and "failed" in results[peer]:
                    break  # it had too little time
                print(said(point, peer, results[peer]), flush=True)
            else:
                results = {peer: results[peer] for peer in self.peers}
                self.found["points"].append(point.job() | {"order": order, "results": results})
                self._write()
            if number + 1 == len(todo) or todo[number + 1].shape != point.shape:
                shutil.rmtree(work / point.shape, ignore_errors=True)
            longest = max(longest, time.monotonic() - began)

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(self.path.name + ".new")
        unfinished.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.path)


def start(name: str, work: Path, peer_paths: Sequence[str]) -> PeerProcess:
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [os.path.abspath(path) for path in inherited.split(os.pathsep) if path]
    in_front = [str(HERE.parent)] if name == "ours" else [os.path.abspath(path) for path in peer_paths]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*in_front, *paths]),
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, str(HERE / "sweep_peer.py"), name]
    return PeerProcess(command, environment, work / "peers" / name, START_SECONDS)


def build(shape: str, builder: PeerProcess, work: Path) -> dict[str, Any]:
    job = {"shape": shape, "texts": str(work / "texts.json"), "work": str(work)}
    return builder.ask(job, BUILD_SECONDS)


def ask(
    process: PeerProcess, point: Point, model: Mapping[str, Any], work: Path, seconds: float
) -> dict[str, Any]:
    """A peer's answer at a point. A peer that holds memory afterwards is replaced."""
    if "failed" in model:
        return {"failed": f"the model was not built: {model['failed']}"}
    answer = process.ask(point.job() | {"model": model["model"], "texts": str(work / "texts.json")}, seconds)
    if answer.get("left_GiB", 0) > MOST_LEFT_GiB:
        process.stop()
    return answer


def texts_of(data: Path | None) -> list[str]:
    """Documents of alpaca's form and lengths.

    Raises:
        ValueError: the file is no JSON list of such rows.
    """
    if data is None:
        return made_up()
    try:
        rows = json.loads(data.read_text(encoding="utf-8"))
        form = "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n{}"
        found = [form.format(row["instruction"], row.get("input", ""), row["output"]) for row in rows]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"--data: {data} is no JSON list of rows with instruction and output ({error!r})"
        ) from None
    if not found:
        raise ValueError(f"--data: {data} holds no rows")
    return found


def made_up() -> list[str]:
    """Random documents of 15 to 400 words, most of them short, with a few words that come often."""
    draw = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(WORDS)]
    often = [1 / (place + 1) for place in range(WORDS)]
    lengths = [min(max(int(draw.lognormvariate(4.6, 0.7)), 15), 400) for _ in range(DOCUMENTS)]
    return [" ".join(draw.choices(words, often, k=length)) for length in lengths]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def said(point: Point, peer: str, answer: Mapping[str, Any]) -> str:
    if "failed" in answer:
        return f"{point.name:<40}{peer:<10}FAILED {answer['failed']}"
    return (
        f"{point.name:<40}{peer:<10}{answer['step_ms']:>9.1f} ms{answer['tok_s']:>10,} tok/s"
        f"{answer['peak_GiB']:>8.2f} GiB"
    )


def ratio_to(peer: str, results: Mapping[str, Mapping[str, Any]]) -> float | str:
    """Our tokens per second divided by a peer's, or why there is no such ratio."""
    ours, theirs = results["ours"], results[peer]
    for name, answer in (("ours", ours), (peer, theirs)):
        if "failed" in answer:
            return f"{name} failed: {answer['failed']}"
    tokens = sorted(answer["tokens_update"] for answer in (ours, theirs))
    if tokens[1] > (1 + TOLERANCE) * tokens[0]:
        return f"updates of {tokens[0]:,} and {tokens[1]:,} tokens do not compare"
    return ours["tok_s"] / theirs["tok_s"]


def table(points: Sequence[Mapping[str, Any]], peer: str) -> list[str]:
    """Every point beside a peer: the lowest ratio first, and those without a ratio at the end."""
    ratios = [(ratio_to(peer, point["results"]), point) for point in points]
    compared = sorted(((r, p) for r, p in ratios if isinstance(r, float)), key=lambda pair: pair[0])
    lines = [f"| point | ours, tokens/s | {peer}, tokens/s | ratio | peak GiB, ours / {peer} |"]
    lines += ["|---|---|---|---|---|"]
    for ratio, point in compared:
        ours, theirs = point["results"]["ours"], point["results"][peer]
        peaks = f"{ours['peak_GiB']:.2f} / {theirs['peak_GiB']:.2f}"
        lines.append(
            f"| {point['point']} | {ours['tok_s']:,} | {theirs['tok_s']:,} | {ratio:.2f} | {peaks} |"
        )
    for why, point in ratios:
        if isinstance(why, str):
            lines.append(f"| {point['point']} | | | | {why} |")
    slower = sum(ratio < 1 for ratio, _ in compared)
    return [*lines, "", f"{len(points)} points: {len(compared)} compared, ours slower at {slower}"]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the peers end too
    sys.exit(main())

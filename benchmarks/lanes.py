"""Run the cases of `compare.py` on all GPUs of a machine at once, and keep what they print for `collect.py`.

    python benchmarks/lanes.py COMPARE --logs FOLDER [--cases pr,8b,...] [--peers ours,unsloth] [--rounds 1]
                               [--minutes 9] [--data FOLDER]
    python benchmarks/collect.py FOLDER/*.log --json benchmarks/results/compare-h200-DATE.json

Every GPU is a lane of its own, with its own processes, models and log. A lane takes the cases of one shape of
model after the other, so that the model is built once. All peers of a case run on one GPU, in turns. Only
our run is made where `collect.py` compares a case with the peers of another one.

A case that a log in FOLDER holds already is left out: a second call goes on where the first one stopped. No
case is begun when less time is left than the longest one has taken.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from collect import BESIDE, CASES, read_log

HERE = Path(__file__).resolve().parent
# Cases by the shape that they train, the longest first
SHAPES = (
    ("8b", "8b-gc", "8b-q4", "8b-auto", "8b-fp8"),
    ("pr", "pr-padded", "pr-16k"),
    ("gemma3-1b",),
    ("3b", "3b-drop"),
    ("moe",),
    ("1.7b-2x4k",),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("compare", type=Path, help="our comparison script")
    add("--logs", type=Path, required=True, help="a folder for the logs, one a GPU")
    add("--cases", default=",".join(CASES), help="default: all")
    add("--peers", default="ours,unsloth")
    add("--rounds", type=int, default=1)
    add("--minutes", type=float, default=9, help="for all of it (default: 9)")
    add("--data", type=Path, help="the folder with the data of the script")
    add("--gpus", type=int, help="how many lanes (default: all GPUs)")
    args = parser.parse_args(argv)
    if unknown := [case for case in args.cases.split(",") if case not in CASES]:
        parser.error(f"--cases: {unknown[0]!r} is none of {', '.join(CASES)}")
    if not args.compare.is_file():
        parser.error(f"{args.compare} is no file; give the path of our comparison script")
    args.logs.mkdir(parents=True, exist_ok=True)
    queue = Queue(set(args.cases.split(",")) - measured(args.logs), time.monotonic() + 60 * args.minutes)
    lanes = [Lane(number, args, queue) for number in range(args.gpus or n_gpus())]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    if queue.left:
        print(f"no time for {', '.join(queue.left)}; the same call goes on with them")
    return int(bool(queue.left))


def measured(logs: Path) -> set[str]:
    """The cases that logs of a folder hold."""
    return {result["case"] for log in logs.glob("*.log") for result in read_log(log)[1]}


def n_gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    return len(listed.stdout.splitlines())


class Queue:
    """Hands out cases to lanes, those of a shape to one of them.

    Args:
        cases: that are to run.
        deadline: by `time.monotonic`.
    """

    def __init__(self, cases: set[str], deadline: float) -> None:
        self._shapes = [shape for cases_of in SHAPES if (shape := [c for c in cases_of if c in cases])]
        self._lock = threading.Lock()
        self._deadline, self._longest = deadline, 0.0
        self.left: list[str] = []

    def cases(self) -> Iterator[str]:
        """Cases for one lane, while there is time."""
        while True:
            with self._lock:
                shape = self._shapes.pop(0) if self._shapes else []
            if not shape:
                return
            for case in shape:
                began = time.monotonic()
                if began + self._longest > self._deadline:
                    self.left.append(case)
                    continue
                yield case
                self._longest = max(self._longest, time.monotonic() - began)


class Lane(threading.Thread):
    """One GPU."""

    def __init__(self, number: int, args: argparse.Namespace, queue: Queue) -> None:
        super().__init__()
        self._args, self._queue = args, queue
        self._log = args.logs / f"gpu{number}.log"
        self._work = Path(tempfile.gettempdir()) / f"compare-gpu{number}"
        self._work.mkdir(parents=True, exist_ok=True)
        self._environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(number)}

    def run(self) -> None:
        if not self._log.exists():
            self._say(sys.executable, str(HERE / "collect.py"), "stamp")
        for case in self._queue.cases():
            args, peers = self._args, self._args.peers
            command = [sys.executable, str(args.compare.resolve()), "--case", case, "--work", str(self._work)]
            command += ["--peers", "ours" if case in BESIDE else peers, "--rounds", str(args.rounds)]
            command += ["--data", str(args.data.resolve())] if args.data else []
            self._say(*command)
            print(f"{self._log.stem}: {case} done", flush=True)

    def _say(self, *command: str) -> None:
        """Log what a command prints. It runs in the lane's folder: libraries leave compiled code there."""
        with self._log.open("a", encoding="utf-8") as log:
            quiet = {"stdout": log, "stderr": subprocess.DEVNULL}
            subprocess.run(command, **quiet, env=self._environment, cwd=self._work)


if __name__ == "__main__":
    sys.exit(main())

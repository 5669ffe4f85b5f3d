"""Rounds of training runs, each peer in a process of its own, and the table of their medians.

A benchmark calls `run_peers` from its `main`. Its own file is started again for every run, with `--child` and
the name of the peer, or "build" to build the model once. What a run found is a JSON object on a marked line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shapes import device_name, versions

ROOT = Path(__file__).resolve().parents[1]
_RESULT = "RESULT "
_QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "UNSLOTH_DISABLE_STATISTICS": "1"}

Runs = dict[str, dict[str, list[dict[str, Any]]]]


def parser_of(
    doc: str | None, cases: Mapping[str, Any], default: str, peers: tuple[str, ...]
) -> argparse.ArgumentParser:
    """The flags that every such benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--case", default=default, help=f"of {', '.join(cases)} (default: {default})")
    add("--peers", default=",".join(peers), help=f"of {', '.join(peers)}; ratios are of the first by each")
    add("--rounds", type=int, default=2, help="runs of every peer (default: 2)")
    add("--timeout", type=int, default=400, help="seconds of one run (default: 400)")
    add("--work", type=Path, default=Path(tempfile.gettempdir()) / "unsloth-pack-benchmarks")
    add("--json", type=Path, help="also write every number here")
    add("--child", choices=("build", *peers), help=argparse.SUPPRESS)
    return parser


def run_peers(
    file: str,
    parser: argparse.ArgumentParser,
    cases: Mapping[str, Any],
    peers: tuple[str, ...],
    child: Callable[[str, str, argparse.Namespace], dict[str, Any]],
    line_of: Callable[[dict[str, Any]], str],
    **published: Any,
) -> int:
    """The exit code: 1 if a run failed.

    Args:
        file: of the benchmark.
        child: the figures of one run, of "build" or a peer, for a case by its name. They hold `ms`,
            `tokens_s` and `peak_GiB`.
        line_of: what is printed of them.
        published: what else stands in the file of results.
    """
    args = parsed(parser, cases, peers, child)
    if args is None:
        return 0
    asked = args.peers.split(",")
    runs: Runs = {}
    for name in args.case.split(","):
        built = in_a_process(file, "build", name, args)
        if "failed" in built:
            print(f"{name}: cannot build the model: {failure_of(built)}", flush=True)
            runs[name] = {"build": [built]}
            continue
        runs[name] = {peer: [] for peer in asked}
        for _ in range(args.rounds):
            for peer in asked:
                run = in_a_process(file, peer, name, args)
                told = failure_of(run) if "failed" in run else line_of(run)
                print(f"{name} {peer}: {told}", flush=True)
                runs[name][peer].append(run)
        print(table(name, runs[name]), flush=True)
    return finished(runs, args.json, **published)


def parsed(
    parser: argparse.ArgumentParser,
    cases: Mapping[str, Any],
    peers: tuple[str, ...],
    child: Callable[[str, str, argparse.Namespace], dict[str, Any]],
) -> argparse.Namespace | None:
    """The flags, whose names are known; None in the process of a run, which is over.

    Args:
        cases, peers, child: as `run_peers` takes them.
    """
    args = parser.parse_args()
    for given, known, flag in ((args.case, cases, "--case"), (args.peers, peers, "--peers")):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"{flag} is {', '.join(sorted(unknown))}; choose of {', '.join(known)}")
    if args.child is None:
        return args
    print(_RESULT + json.dumps(child(args.child, args.case, args)), flush=True)
    return None


def finished(runs: Runs, path: Path | None, **published: Any) -> int:
    """Write the results file, if one is asked for. The exit code: 1 if a run failed."""
    if path is not None:
        report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device_name()}
        report |= {"versions": versions(), **published, "runs": runs}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    every = [run for by_peer in runs.values() for of_one in by_peer.values() for run in of_one]
    return int(any("failed" in run for run in every))


def in_a_process(
    file: str, what: str, case: str, args: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The figures of one run, or `failed` and why.

    Args:
        environment: variables beside those of this process.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, file, *sys.argv[1:], "--child", what, "--case", case]
    try:
        done = subprocess.run(
            [*command, "--work", str(args.work.resolve())],
            env=os.environ | _QUIET | {"PYTHONPATH": os.pathsep.join(paths)} | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=args.timeout,
        )
    except subprocess.TimeoutExpired as ended:
        said = b"".join(filter(None, (ended.stdout, ended.stderr))).decode(errors="replace")
        return {"failed": f"more than {args.timeout} s", "said": said[-4000:]}
    told = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not told:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()
        return {"failed": f"exit code {done.returncode}: {said[-1][:300]}", "said": "\n".join(said)[-4000:]}
    return json.loads(told[-1].removeprefix(_RESULT))


def failure_of(run: dict[str, Any]) -> str:
    """Why a run failed, and the last that it said."""
    return run["failed"] + "".join(f"\n    {line}" for line in run["said"].splitlines())


def table(case: str, by_peer: dict[str, list[dict[str, Any]]]) -> str:
    """Medians over the rounds, and ratios of the first peer by each."""
    names = ("ms", "tokens_s", "peak_GiB")
    medians = {
        peer: {name: statistics.median(run[name] for run in finished) for name in names}
        for peer, of_one in by_peer.items()
        if (finished := [run for run in of_one if "failed" not in run])
    }
    first = medians.get(next(iter(by_peer)))
    lines = [f"\n{case:<16}{'ms':>10}{'tokens/s':>12}{'GiB':>8}{'speed x':>10}{'memory x':>10}"]
    for peer, one in medians.items():
        line = f"  {peer:<14}{one['ms']:>10.1f}{one['tokens_s']:>12,.0f}{one['peak_GiB']:>8.2f}"
        if first is not None:
            memory = first["peak_GiB"] / one["peak_GiB"] if one["peak_GiB"] else float("nan")
            line += f"{first['tokens_s'] / one['tokens_s']:>10.2f}{memory:>10.2f}"
        lines.append(line)
    return "\n".join(lines) + "\n"

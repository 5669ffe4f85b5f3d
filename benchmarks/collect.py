"""Turn what `compare.py` printed, on one machine or several, into one results file.

    python benchmarks/collect.py stamp > LOG                on the machine; then compare.py ... >> LOG
    python benchmarks/collect.py LOG [LOG ...] --json FILE

`stamp` prints a line that says what a log is of: the machine, its device and date, and the versions. A log
holds such a line, then the lines RESULT and FAILED of `compare.py`; other lines are left out. Logs of one
machine count as its further rounds. The file is written only if `comparison.py` can read it, and its table is
printed.
"""

import argparse
import hashlib
import json
import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comparison import Comparison, tables

CASES = {
    "pr": "Qwen2.5-0.5B shape, rows of 2,048",
    "pr-16k": "Qwen2.5-0.5B shape, rows of 16,384",
    "pr-padded": "Qwen2.5-0.5B shape, padded batches of 8",
    "8b": "Llama-3.1-8B shape, rows of 8,192",
    "8b-gc": "Llama-3.1-8B shape, checkpointing",
    "8b-q4": "Llama-3.1-8B shape, 4-bit and checkpointing",
    "8b-auto": 'Llama-3.1-8B shape, `"auto"`, against checkpointing',
    "8b-fp8": "Llama-3.1-8B shape, fp8, against bfloat16",
    "3b": "Llama-3.2-3B shape, rows of 8,192",
    "3b-drop": "Llama-3.2-3B shape, rows of 4,096, rank 32, dropout, checkpointing",
    "1.7b-2x4k": "Qwen3-1.7B shape, two rows of 4,096",
    "gemma3-1b": "Gemma-3-1B shape, rows of 4,096",
    "moe": "Qwen3-30B-A3B layout, 8 layers, rows of 4,096",
}
BESIDE = {"8b-auto": "8b-gc", "8b-fp8": "8b"}
COMMAND = (
    "compare.py --case CASE --peers PEERS --rounds N: TRL's SFTTrainer, LoRA on seven projections, "
    "gradient_accumulation_steps 1 for every peer; medians after the warm-up steps"
)
STAMP = "MEASURED "
LETTERS_OF_A_FAILURE = 300


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", metavar="LOG", help="of compare.py, or `stamp`")
    parser.add_argument("--json", type=Path, help="the results file to write")
    parser.add_argument("--note", help="what else a reader has to know")
    args = parser.parse_args(argv)
    if args.logs == ["stamp"]:
        print(STAMP + json.dumps(stamp()))
        return 0
    try:
        if args.json is None:
            raise ValueError("--json is missing; name the results file to write")
        if args.json.exists():
            raise ValueError(f"--json: {args.json} exists; move it away, or name another file")
        found = collect([Path(log) for log in args.logs])
        if args.note:
            found["note"] = args.note
        comparison = write(found, args.json)
    except (OSError, ValueError) as error:
        print(f"collect.py: {error}", file=sys.stderr)
        return 2
    for document, table in tables(comparison).items():
        print("\n".join([document.name, "", *table, ""]))
    for failure in comparison.failures():
        print(f"{failure.title}: {failure.peer} failed: {failure.why}")
    return 0


def stamp() -> dict[str, Any]:
    """What a log is of. The machine has a short number that does not tell its name."""
    from shapes import device_name
    from sweep import versions

    machine = hashlib.sha256(str(uuid.getnode()).encode()).hexdigest()[:8]
    today = datetime.now(UTC).date().isoformat()
    return {"machine": machine, "device": device_name(), "date": today, "versions": versions()}


def collect(logs: Sequence[Path]) -> dict[str, Any]:
    """The results file of some logs.

    Raises:
        ValueError: a log has no stamp, an unreadable result or an unknown case, or logs are of different
            devices or versions.
    """
    machines: list[str] = []
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    first: dict[str, Any] = {}
    for log in logs:
        stamped, results = read_log(log)
        first = first or stamped
        for key in ("device", "versions"):
            if stamped[key] != first[key]:
                raise ValueError(
                    f"{log}: {key} is {stamped[key]}, in {logs[0]} {first[key]}; collect them apart"
                )
        if stamped["machine"] not in machines:
            machines.append(stamped["machine"])
        for result in results:
            number = machines.index(stamped["machine"]) + 1
            runs.setdefault((number, result["case"]), []).append(result)
        first["date"] = max(first["date"], stamped["date"])
    if not runs:
        raise ValueError(
            f"{', '.join(map(str, logs))}: no RESULT or FAILED line; give the output of compare.py"
        )
    order = [*CASES]
    measured = sorted({case for _, case in runs}, key=order.index)
    return {
        "date": first["date"],
        "device": first["device"],
        "versions": first["versions"],
        "command": COMMAND,
        "cases": {case: CASES[case] for case in measured},
        "beside": {case: other for case, other in BESIDE.items() if case in measured},
        "runs": [
            {"machine": machine, "case": case, "results": runs[machine, case]}
            for machine, case in sorted(runs, key=lambda run: (run[0], order.index(run[1])))
        ],
    }


def read_log(log: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The stamp of a log and its results.

    Raises:
        ValueError: see `collect`.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    stamped: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    is_failure = False  # whether the line before belongs to what a failed peer said
    for number, line in enumerate(lines, start=1):
        kind, _, rest = line.partition(" ")
        if kind == "FAILED" and len(rest.split()) > 1:
            peer, case, *said = rest.split(maxsplit=2)
            results.append({"peer": peer, "case": case.rstrip(":"), "failed": " ".join(said)})
            is_failure = True
        elif kind in (STAMP.strip(), "RESULT"):
            is_failure = False
            try:
                found = json.loads(rest)
            except ValueError as error:
                raise ValueError(f"{log}, line {number}: {kind} without its JSON ({error})") from None
            if kind == "RESULT":
                results.append(found)
            else:
                stamped = found
        elif kind in ("NOTE", "PROF") or line.split(": ")[0] in CASES:  # the latter begins a table
            is_failure = False
        elif is_failure and line.strip():
            results[-1]["failed"] = line.strip()  # the last line of what it said names the error
    if not stamped:
        raise ValueError(
            f"{log}: no {STAMP.strip()} line; begin the log with `collect.py stamp` on its machine"
        )
    for result in results:
        result["failed"] = result.get("failed", "")[:LETTERS_OF_A_FAILURE]
        if not result["failed"]:
            del result["failed"]
        if result["case"] not in CASES:
            raise ValueError(f"{log}: case {result['case']!r} has no title; add it to CASES of collect.py")
    return stamped, results


def write(found: dict[str, Any], path: Path) -> Comparison:
    """The file, once it can be read.

    Raises:
        NotComparable: see `Comparison`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unread = path.with_name(path.name + ".new")
    try:
        unread.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        comparison = Comparison(unread)
        comparison.pairs()
        unread.replace(path)
    finally:
        unread.unlink(missing_ok=True)
    return comparison


if __name__ == "__main__":
    sys.exit(main())

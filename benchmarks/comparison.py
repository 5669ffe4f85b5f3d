"""Read a committed comparison (`results/compare-*.json`) and pair ours with each peer, case by case.

    python benchmarks/comparison.py [FILE] [--write]

prints the README's table and that of docs/performance.md; --write puts them into these documents.

A file holds `runs`, each with a `case`, a `machine` (where there are several) and the `results` of the peers
in the order in which they ran. A peer's results of one case on one machine are its rounds. A result may be
`{"peer": ..., "failed": why}`. `benchmarks/collect.py` makes such files.

Steps are comparable only if both peers train the same number of tokens in an update. Earlier comparisons did
not check this and overstated our lead twofold: Unsloth accumulates over two micro-batches by default, and
only one was counted. So a file is refused if these numbers differ or are missing, or if it is marked `wrong`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

NEWEST = Path(__file__).parent / "results" / "compare-h200-2026-11-26.json"
TOLERANCE = 0.05  # of tokens an update: peers fill their rows a little differently
FIGURES = ("step_ms", "tok_s", "tokens_update", "peak_GiB")


class NotComparable(ValueError):
    """The figures of a file must not be compared; the message says why and what to do."""


@dataclass(frozen=True)
class Pair:
    """Ours and one peer.

    Args:
        case: of ours.
        title: the case in words.
        peer: "unsloth", "trl" or "trl+liger".
        ours, theirs: medians of `FIGURES` over the rounds.
        speeds: our tokens per second, divided by the peer's, in each round.
    """

    case: str
    title: str
    peer: str
    ours: Mapping[str, float]
    theirs: Mapping[str, float]
    speeds: tuple[float, ...]

    @property
    def speed(self) -> float:
        """The median of `speeds`."""
        return median(self.speeds)


@dataclass(frozen=True)
class Failure:
    """A peer that failed in a round of a case; `why` is the end of what it said."""

    case: str
    title: str
    peer: str
    why: str


class Comparison:
    """A results file.

    Raises:
        NotComparable: the file is marked `wrong`.
    """

    def __init__(self, path: Path = NEWEST) -> None:
        self.name = path.name
        self._found = json.loads(path.read_text(encoding="utf-8"))
        if "wrong" in self._found:
            wrong = self._found["wrong"]
            raise NotComparable(f"{path.name} is marked wrong ({wrong}); read {NEWEST.name} instead")
        self._rounds: dict[tuple[str, str], dict[Any, list[Mapping[str, Any]]]] = {}
        for run in self._found["runs"]:
            for result in run["results"]:
                machines = self._rounds.setdefault((run["case"], result["peer"]), {})
                machines.setdefault(run.get("machine"), []).append(result)

    def version(self, package: str) -> str:
        return self._found["versions"].get(package, "of an unknown version")

    def pairs(self) -> list[Pair]:
        """Every case of ours with every peer that ran it.

        Under `beside` the file names the peers' case to compare with, if they have no option like ours, such
        as their checkpointing for our `"auto"`. A round counts if both ran it.

        Raises:
            NotComparable: `tokens_update` is missing or differs between peers.
        """
        found = []
        for case in [case for case, peer in self._rounds if peer == "ours"]:
            beside = self._found.get("beside", {}).get(case, case)
            for peer in [peer for other, peer in self._rounds if other == beside and peer != "ours"]:
                rounds = [*_both(self._rounds[case, "ours"], self._rounds[beside, peer])]
                if not rounds:
                    continue
                ours, theirs = map(list, zip(*rounds, strict=True))
                _check_tokens(f"{self.name}, case {case}, peer {peer}", [*ours, *theirs])
                speeds = tuple(our["tok_s"] / their["tok_s"] for our, their in rounds)
                title = self._title(case)
                found.append(Pair(case, title, peer, _medians(ours), _medians(theirs), speeds))
        return found

    def reach(self, case: str, peer: str) -> tuple[float, float]:
        """The fewest and the most tokens per second that a peer trained in a round of a case."""
        results = chain.from_iterable(self._rounds[case, peer].values())
        speeds = [result["tok_s"] for result in results if "failed" not in result]
        return min(speeds), max(speeds)

    def mfu(self, case: str, tokens_per_second: float) -> float:
        """The share of the device's peak that the model's FLOPs of a case take."""
        flops = self._found["model_flops"]
        return flops["gflops_a_token"][case] * tokens_per_second / flops["peak_tflops"] / 1000

    def failures(self) -> list[Failure]:
        return [
            Failure(case, self._title(case), peer, result["failed"])
            for (case, peer), machines in self._rounds.items()
            for results in machines.values()
            for result in results
            if "failed" in result
        ]

    def _title(self, case: str) -> str:
        return self._found.get("cases", {}).get(case, case)


def read_pairs(path: Path = NEWEST) -> list[Pair]:
    """Every case of ours with every peer that ran it.

    Raises:
        NotComparable: as `Comparison` and its `pairs`.
    """
    return Comparison(path).pairs()


_Machines = Mapping[Any, Sequence[Mapping[str, Any]]]


def _both(ours: _Machines, theirs: _Machines) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The results of each round on each machine that both have finished."""
    for machine, results in ours.items():
        for our, their in zip(results, theirs.get(machine, ()), strict=False):
            if "failed" not in our and "failed" not in their:
                yield our, their


def _check_tokens(where: str, results: Sequence[Mapping[str, Any]]) -> None:
    remedy = "measure again with gradient_accumulation_steps=1 for every peer, or mark the file wrong"
    tokens = [result.get("tokens_update") for result in results]
    if None in tokens:
        raise NotComparable(f"{where}: tokens_update is missing, so the peers may not compare; {remedy}")
    if max(tokens) > (1 + TOLERANCE) * min(tokens):
        raise NotComparable(
            f"{where}: tokens_update is {min(tokens):,} to {max(tokens):,}, more than {TOLERANCE:.0%} apart; "
            + remedy
        )


def _medians(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: median(result[name] for result in results) for name in FIGURES}


# The tables of the documents

ROOT = Path(__file__).resolve().parents[1]
# docs/performance.md has all cases
CASES_OF_README = ("pr", "pr-16k", "1.7b-2x4k", "3b", "8b", "8b-gc", "8b-q4")
README_HEADER = (
    "| | unsloth_pack, tokens/s | [MFU](docs/performance.md#how-much-of-the-chip-does-it-use) "
    "| Unsloth {}, tokens/s | ratio | peak GiB of tensors, ours / Unsloth |"
)
PERFORMANCE_HEADER = "| | step, ms | tokens/s | ratio | peak GiB of tensors |"


def tables(comparison: Comparison) -> dict[Path, list[str]]:
    """For each document the lines of its table beside Unsloth."""
    pairs = [pair for pair in comparison.pairs() if pair.peer == "unsloth"]
    readme = [README_HEADER.format(comparison.version("unsloth")), "|---|---|---|---|---|---|"]
    performance = [PERFORMANCE_HEADER, "|---|---|---|---|---|"]
    for pair in pairs:
        ours, theirs = pair.ours, pair.theirs
        speeds = [f"{peer['tok_s']:,.0f}" for peer in (ours, theirs)]
        peaks = f"{ours['peak_GiB']:.2f} / {theirs['peak_GiB']:.2f}"
        if pair.case in CASES_OF_README:
            ratio = f"**{pair.speed:.2f}**{_spread(pair)}"
            mfu = f"{comparison.mfu(pair.case, ours['tok_s']):.0%}"
            readme.append(f"| {pair.title} | {speeds[0]} | {mfu} | {speeds[1]} | {ratio} | {peaks} |")
        steps = f"{ours['step_ms']:.1f} / {theirs['step_ms']:.1f}"
        ratio = f"{pair.speed:.2f}{_spread(pair)}"
        performance.append(f"| {pair.title} | {steps} | {' / '.join(speeds)} | {ratio} | {peaks} |")
    return {ROOT / "README.md": readme, ROOT / "docs" / "performance.md": performance}


def _spread(pair: Pair) -> str:
    if len(pair.speeds) == 1:
        return ""
    return f" ({min(pair.speeds):.2f} to {max(pair.speeds):.2f} in {len(pair.speeds)} rounds)"


def with_table(document: str, table: Sequence[str]) -> str:
    """The document with the table in place of the one whose header begins alike.

    Raises:
        ValueError: the document has no such table, or several.
    """
    lines, begin = document.split("\n"), " | ".join(table[0].split(" | ")[:2])
    starts = [number for number, line in enumerate(lines) if line.startswith(begin)]
    if len(starts) != 1:
        raise ValueError(f"{len(starts)} tables begin with {begin!r}, not one; correct the document")
    end = starts[0]
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return "\n".join([*lines[: starts[0]], *table, *lines[end:]])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The tables of the documents, from one results file.")
    parser.add_argument("file", type=Path, nargs="?", default=NEWEST, help=f"(default: {NEWEST.name})")
    parser.add_argument("--write", action="store_true", help="put the tables into the documents")
    args = parser.parse_args(argv)
    try:
        comparison = Comparison(args.file)
        for document, table in tables(comparison).items():
            print("\n".join([document.name, "", *table, ""]))
            if args.write:
                text = with_table(document.read_text(encoding="utf-8"), table)
                document.write_text(text, encoding="utf-8")
        for failure in comparison.failures():
            print(f"{failure.title}: {failure.peer} failed: {failure.why}")
    except (OSError, ValueError, KeyError) as error:
        print(f"comparison.py: {args.file}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

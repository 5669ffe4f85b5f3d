"""Read a committed comparison (`results/compare-*.json`) and pair ours with each peer, case by case.

Steps are comparable only if both peers train the same number of tokens in an update. Earlier comparisons did
not check this and overstated our lead twofold: Unsloth accumulates over two micro-batches by default, and
only one was counted. So a file is refused if these numbers differ or are missing, or if it is marked `wrong`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

NEWEST = Path(__file__).parent / "results" / "compare-h200-2026-11-22.json"
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
        peer: "unsloth" or "trl".
        ours, theirs: medians of `FIGURES` over the rounds.
    """

    case: str
    title: str
    peer: str
    ours: Mapping[str, float]
    theirs: Mapping[str, float]

    @property
    def speed(self) -> float:
        """Our tokens per second, divided by the peer's."""
        return self.ours["tok_s"] / self.theirs["tok_s"]


def read_pairs(path: Path = NEWEST) -> list[Pair]:
    """Every case of ours with every peer that ran it.

    Under `beside` the file names the peers' case to compare with, if they have no option like ours, such as
    their checkpointing for our `"auto"`.

    Raises:
        NotComparable: the file is marked `wrong`, or `tokens_update` is missing or differs between peers.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    if "wrong" in found:
        raise NotComparable(f"{path.name} is marked wrong ({found['wrong']}); read {NEWEST.name} instead")
    rounds: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in found["runs"]:
        for result in run["results"]:
            rounds.setdefault((run["case"], result["peer"]), []).append(result)

    pairs = []
    for case in [case for case, peer in rounds if peer == "ours"]:
        beside = found.get("beside", {}).get(case, case)
        for peer in [peer for other, peer in rounds if other == beside and peer != "ours"]:
            ours, theirs = rounds[case, "ours"], rounds[beside, peer]
            _check_tokens(f"{path.name}, case {case}, peer {peer}", [*ours, *theirs])
            title = found.get("cases", {}).get(case, case)
            pairs.append(Pair(case, title, peer, _medians(ours), _medians(theirs)))
    return pairs


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

"""The comparison with other libraries is fair, and the documents say what its results file says."""

import json
import re
import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from comparison import CASES_OF_README, NEWEST, Comparison, NotComparable, read_pairs, tables
from sweep import ratio_to
from tables import table

ROOT, RESULTS = Path(__file__).parents[1], NEWEST.parent
COMPARISONS = sorted(RESULTS.glob("compare-*.json"))
PEERS = ("ours", "unsloth")
README, PERFORMANCE = ROOT / "README.md", ROOT / "docs" / "performance.md"
WITH_TRL = RESULTS / "compare-h200-2026-11-22.json"


def measured(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def words(document):
    """The text of a document, however its lines are broken."""
    return " ".join(document.read_text().split())


@table("path", COMPARISONS, ids=lambda path: path.stem)
def test_peers_trained_as_many_tokens_an_update_or_the_file_says_it_is_wrong(path):
    if "wrong" in json.loads(path.read_text()):
        with pytest.raises(NotComparable, match=f"{path.name} is marked wrong .* read {NEWEST.name} instead"):
            read_pairs(path)
    else:
        assert read_pairs(path)


def test_the_tables_say_what_the_results_file_says():
    for document, lines in tables(Comparison()).items():
        assert "\n".join(lines) in document.read_text()
    assert len(tables(Comparison())[README]) == 2 + len(CASES_OF_README)

    (trl,) = [pair for pair in read_pairs(WITH_TRL) if pair.peer == "trl"]
    assert f"ours was {trl.speed:.2f} times as fast on the 0.5B" in words(PERFORMANCE)
    peaks = re.findall(r" \| ([\d.]+) / ([\d.]+) \|$", README.read_text(), re.MULTILINE)
    assert len(peaks) == len(CASES_OF_README)
    less = [round(100 * (1 - float(ours) / float(theirs))) for ours, theirs in peaks]
    assert f"In every row above we take {min(less)} to {max(less)}% less than Unsloth" in README.read_text()


def test_the_sweep_is_told_as_measured():
    ratios = []
    for name in ("sweep-h200-2026-11-25", "sweep-h100-2026-11-26"):
        points = {point["point"]: point["results"] for point in measured(name)["points"]}
        of_all = {name: ratio_to("unsloth", results) for name, results in points.items()}
        ratios.append({name: ratio for name, ratio in of_all.items() if isinstance(ratio, float)})
        assert min(ratios[-1].values()) >= 1
        if len(ratios) == 1:
            shown = _table(PERFORMANCE, "| point | ours, tokens/s |")
            for name, cells in shown.items():
                ours, theirs = (points[name][peer] for peer in PEERS)
                peaks = f"{ours['peak_GiB']:.2f} / {theirs['peak_GiB']:.2f}"
                speeds = [f"{ours['tok_s']:,}", f"{theirs['tok_s']:,}"]
                assert cells == [*speeds, f"{ratios[-1][name]:.2f}", peaks]
    first, second = (sorted(found.values()) for found in ratios)
    expected = [f"{ratio:.2f}" for ratio in (*first[:3], statistics.median(first), first[-1])]
    assert [cells[2] for cells in shown.values()] == expected
    assert f"None of {len(first)} is slower" in words(PERFORMANCE)
    assert f"at none of the {len(first)} points that compare" in words(README)
    by = f"by {second[0]:.2f} to {second[-1]:.2f} times"
    assert f"{len(second)} of {len(second)} points are faster, {by}" in words(PERFORMANCE)


def test_the_grid_is_told_as_measured():
    trust = (ROOT / "docs" / "trust.md").read_text()
    for device in ("h100", "images-h100"):
        table = (RESULTS / f"grid-{device}-2026-11-26.md").read_text()
        rows, n_measured, failed, refused, not_captured = map(
            int,
            re.search(r"(\d+) rows: (\d+) measured, (\d+) failed, (\d+) refused, (\d+) not", table).groups(),
        )
        above, worst = re.search(r"(\d+) rows were above .* by up to ([\d.]+),", table).groups()
        assert (rows, failed) == (n_measured + refused + not_captured, 0)
        file = f"(../benchmarks/results/grid-{device}-2026-11-26.md"
        (told,) = [line for line in trust.splitlines() if file in line]
        assert (
            f"| {rows:,} cases | {n_measured:,} measured, none above 1.5 ({int(above):,} were above" in told
        )
        assert f"at up to {worst}," in told
        assert "**Partial**" not in table
        assert f"{refused:,} refused and {not_captured:,} not captured" in told
        assert f"{rows:,} combinations" in words(README)
        assert re.search(rf"{n_measured:,} (were )?measured", words(README))


def test_the_soaks_are_told_as_measured():
    on_gpu = [measured("soak-h200-2026-11-21"), *measured("soak-h200-2026-11-22")["soaks"]]
    columns = (on_gpu, [measured("soak-cpu-2026-11-21")])
    survival, trust = ((ROOT / "docs" / name).read_text() for name in ("trust-survival.md", "trust.md"))

    def total(soaks, key):
        return sum(soak[key] for soak in soaks)

    updates = " | ".join(f"{total(soaks, 'updates'):,}" for soaks in columns)
    signals = " | ".join(f"{total(soaks, 'SIGKILL')}, {total(soaks, 'SIGTERM')}" for soaks in columns)
    assert f"| updates | {updates} |" in survival
    assert f"| SIGKILL, SIGTERM | {signals} |" in survival
    for title, key in (("of these during a save", "of them during a save"), ("evaluations",) * 2):
        assert f"| {title} | {' | '.join(str(total(soaks, key)) for soaks in columns)} |" in survival
    interrupted = total(on_gpu, "SIGKILL") + total(on_gpu, "SIGTERM")
    assert f"{interrupted} interruptions in {total(on_gpu, 'updates'):,} updates" in trust


def _table(document, header):
    """The table that begins with a line, as {first cell: [the other cells]}, without what is bold."""
    _, found = document.read_text().split(header)
    lines = found.split("\n\n")[0].split("\n")[2:]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return {title: cells for title, *cells in rows}

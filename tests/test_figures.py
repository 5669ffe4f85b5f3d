"""The comparison with other libraries is fair, and the documents say what its results file says."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from comparison import NEWEST, NotComparable, read_pairs  # noqa: E402

COMPARISONS = sorted(NEWEST.parent.glob("compare-*.json"))
README, PERFORMANCE = (ROOT / name for name in ("README.md", "docs/performance.md"))


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_peers_trained_as_many_tokens_an_update_or_the_file_says_it_is_wrong(path):
    if "wrong" in json.loads(path.read_text()):
        with pytest.raises(NotComparable, match=f"{path.name} is marked wrong .* read {NEWEST.name} instead"):
            read_pairs(path)
    else:
        assert read_pairs(path)


@pytest.mark.parametrize("peer", ["ours", "unsloth"])
@pytest.mark.parametrize("case", ["8b", "8b-gc"])
def test_a_peer_that_trained_twice_the_tokens_is_refused(tmp_path, case, peer):
    def double(result):
        result["tokens_update"] *= 2

    refused = r"tokens_update is 7,9\d\d to 15,\d\d\d, more than 5% apart; .*gradient_accumulation_steps=1"
    with pytest.raises(NotComparable, match=f"case {case}, peer unsloth: {refused}"):
        read_pairs(_changed(tmp_path, case, peer, double))


def test_a_file_that_does_not_count_tokens_is_refused(tmp_path):
    path = _changed(tmp_path, "pr", "trl", lambda result: result.pop("tokens_update"))
    with pytest.raises(NotComparable, match=r"case pr, peer trl: tokens_update is missing.*; measure again"):
        read_pairs(path)


def test_a_case_beside_another_is_checked_too(tmp_path):
    path = _changed(tmp_path, "8b-auto", "ours", lambda result: result.update(tokens_update=16_000))
    with pytest.raises(NotComparable, match="case 8b-auto, peer unsloth"):
        read_pairs(path)


def test_the_tables_say_what_the_results_file_says():
    of_readme, of_performance = {}, {}
    for pair in _against("unsloth"):
        ours, theirs = pair.ours, pair.theirs
        ratio, peaks = f"{pair.speed:.2f}", f"{ours['peak_GiB']:.2f} / {theirs['peak_GiB']:.2f}"
        of_readme[pair.title] = [f"{ours['tok_s']:,}", f"{theirs['tok_s']:,}", ratio, peaks]
        steps = f"{ours['step_ms']:.1f} / {theirs['step_ms']:.1f}"
        of_performance[pair.title] = [steps, f"{ours['tok_s']:,} / {theirs['tok_s']:,}", ratio, peaks]
    assert _table(README, "| | unsloth_pack, tokens/s | Unsloth") == of_readme
    assert _table(PERFORMANCE, "| | step, ms | tokens/s | ratio |") == of_performance

    (trl,) = _against("trl")
    speeds = [f"{trl.ours['tok_s']:,}", f"{trl.theirs['tok_s']:,}", f"{trl.speed:.2f}"]
    assert _table(PERFORMANCE, "| | ours | TRL | ratio |")[trl.title] == speeds


def test_the_first_screen_of_the_readme_says_what_the_results_file_says():
    pairs = _against("unsloth")
    first_screen = README.read_text().split("On one H200, in TRL", 1)[1].split("Train the bundled model")[0]
    digits = {"8b": 2, "8b-gc": 2, "8b-q4": 2}  # where 0.96 must not read 1.0
    speeds = [f"{pair.speed:.{digits.get(pair.case, 1)}f}" for pair in pairs]
    assert re.findall(r"(\d+\.\d+) times", first_screen) == speeds
    peaks = re.findall(r"(\d+\.\d)(?: GiB)?\s+against (\d+\.\d)", first_screen)
    assert [tuple(map(float, each)) for each in peaks] == [
        pytest.approx((pair.ours["peak_GiB"], pair.theirs["peak_GiB"]), abs=0.051) for pair in pairs
    ]


def test_the_picture_was_drawn_from_the_newest_results():
    assert b"Source\0" + NEWEST.name.encode() in (ROOT / "docs" / "packed.png").read_bytes()


def _against(peer):
    return [pair for pair in read_pairs() if pair.peer == peer]


def _changed(folder, case, peer, change):
    """The newest results with one result changed."""
    found = json.loads(NEWEST.read_text())
    (run,) = [run for run in found["runs"] if run["case"] == case]
    (result,) = [result for result in run["results"] if result["peer"] == peer]
    change(result)
    path = folder / "compare.json"
    path.write_text(json.dumps(found))
    return path


def _table(document, header):
    """The table that begins with a line, as {first cell: [the other cells]}, without what is bold."""
    _, found = document.read_text().split(header)
    lines = found.split("\n\n")[0].split("\n")[2:]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return {title: cells for title, *cells in rows}

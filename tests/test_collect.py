"""Logs of comparisons become one results file: rounds, machines, failures, and the spread of ratios."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import collect
from comparison import NEWEST, Comparison, tables, with_table

ONE_ROUND = NEWEST.parent / "compare-h200-2026-11-22.json"
VERSIONS = {"torch": "2.11.0", "unsloth": "2026.10.9"}


def stamp(machine="a", **others):
    found = {"machine": machine, "device": "a GPU", "date": "2026-11-25", "versions": VERSIONS}
    return "MEASURED " + json.dumps(found | others)


def result(peer, case, tok_s, tokens=2000):
    figures = {"step_ms": round(1e3 * tokens / tok_s, 1), "tok_s": tok_s, "tokens_update": tokens}
    return "RESULT " + json.dumps({"peer": peer, "case": case} | figures | {"peak_GiB": 2.5})


TABLE = """
pr: peer         step ms     tok/s samples/s  peak GiB   device  speed x memory x
    ours            33.9     59673     322.9      2.53     5.22     4.17     0.93
"""


@pytest.fixture
def run(tmp_path):
    def collect_logs(*logs):
        paths = []
        for number, lines in enumerate(logs):
            paths.append(tmp_path / f"{number}.log")
            paths[-1].write_text("\n".join(lines) + "\n")
        out = tmp_path / "compare.json"
        out.unlink(missing_ok=True)
        return collect.main([*map(str, paths), f"--json={out}"]), out

    return collect_logs


def test_results_survive_a_log(run):
    """A results file, printed as compare.py prints, gives the pairs that it gave."""
    found = json.loads(ONE_ROUND.read_text())
    lines = [stamp(versions=found["versions"])]
    for each in found["runs"]:
        lines += ["RESULT " + json.dumps(result) for result in each["results"]] + [TABLE]
    code, out = run(lines)
    assert code == 0

    def figures(path):
        return {(p.case, p.peer): (p.ours, p.theirs, p.speeds) for p in Comparison(path).pairs()}

    assert figures(out) == figures(ONE_ROUND)
    assert len(figures(out)) == 8


def test_rounds_of_two_machines_give_a_spread(run, capsys):
    first = [stamp("a"), result("ours", "pr", 4000), result("unsloth", "pr", 1000)]
    first += [result("ours", "pr", 5000), result("unsloth", "pr", 1000), TABLE]
    second = [stamp("b", date="2026-11-26"), result("ours", "pr", 3000), result("unsloth", "pr", 2000)]
    code, out = run(first, second)
    assert code == 0
    (pair,) = Comparison(out).pairs()
    assert (pair.speeds, pair.speed) == ((4.0, 5.0, 1.5), 4.0)
    assert (pair.ours["tok_s"], pair.theirs["tok_s"]) == (4000, 1000)
    assert "| **4.00** (1.50 to 5.00 in 3 rounds) |" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [run["machine"] for run in found["runs"]] == [1, 2]
    assert found["date"] == "2026-11-26"


def test_a_round_that_one_peer_failed_is_no_pair(run, capsys):
    lines = [stamp(), result("ours", "pr", 4000), "FAILED unsloth pr: Traceback (most recent call last):"]
    lines += ['  File "x.py"', "RuntimeError: no memory", "", TABLE]
    lines += [result("ours", "pr", 6000), result("unsloth", "pr", 1000)]
    lines += [result("ours", "moe", 900), "FAILED unsloth moe: timeout after 240 s"]
    _, out = run(lines)
    (pair,) = Comparison(out).pairs()
    assert (pair.case, pair.speeds, pair.ours["tok_s"]) == ("pr", (6.0,), 6000)
    failures = [(failure.case, failure.peer, failure.why) for failure in Comparison(out).failures()]
    assert failures == [
        ("pr", "unsloth", "RuntimeError: no memory"),
        ("moe", "unsloth", "timeout after 240 s"),
    ]
    assert "8 layers, rows of 4,096: unsloth failed: timeout after 240 s" in capsys.readouterr().out


def test_auto_is_paired_with_checkpointing_round_by_round(run):
    lines = [stamp(), result("ours", "8b-auto", 1500), result("unsloth", "8b-gc", 1000)]
    _, out = run(lines, [stamp("b"), result("unsloth", "8b-gc", 2000), result("ours", "8b-auto", 2400)])
    (pair,) = Comparison(out).pairs()
    assert (pair.case, pair.speeds) == ("8b-auto", (1.5, 1.2))


@pytest.mark.parametrize(
    ("logs", "message"),
    [
        ([[result("ours", "pr", 1)]], "0.log: no MEASURED line; begin the log with `collect.py stamp`"),
        ([[stamp(), TABLE]], "no RESULT or FAILED line; give the output of compare.py"),
        ([[stamp(), "RESULT {"]], "0.log, line 2: RESULT without its JSON"),
        ([[stamp(), result("ours", "9b", 1)]], "case '9b' has no title; add it to CASES of collect.py"),
        ([[stamp(), result("ours", "pr", 1)], [stamp(device="another")]], "device is another, in "),
        ([[stamp(), result("ours", "pr", 1), result("unsloth", "pr", 1, 4000)]], "measure again with"),
    ],
)
def test_what_cannot_be_collected_is_one_line_and_no_file(run, capsys, logs, message):
    code, out = run(*logs)
    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
    assert [*out.parent.glob("*.json*")] == []


@pytest.mark.parametrize("document", tables(Comparison()), ids=lambda path: path.name)
def test_the_documents_hold_the_tables_that_the_script_prints(document):
    table = tables(Comparison())[document]
    text = document.read_text()
    assert with_table(text, table) == text
    assert with_table(text.replace(table[2], "| old |"), table) == text
    with pytest.raises(ValueError, match="0 tables begin with"):
        with_table("nothing", table)

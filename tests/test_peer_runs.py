"""Runs of a benchmark in processes of their own: one that fails tells what it last said."""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import peer_runs


def run(tmp_path, source):
    script = tmp_path / "benchmark.py"
    script.write_text(f"import sys, time\nprint('trainer made', file=sys.stderr, flush=True)\n{source}\n")
    return peer_runs.in_a_process(str(script), "ours", "tiny", Namespace(work=tmp_path, timeout=3))


def test_a_run_that_takes_too_long_tells_what_it_last_said(tmp_path):
    found = run(tmp_path, "time.sleep(60)")
    assert peer_runs.failure_of(found) == "more than 3 s\n    trainer made"


def test_a_run_that_dies_tells_what_it_last_said(tmp_path):
    found = run(tmp_path, "sys.exit('out of memory')")
    assert peer_runs.failure_of(found).splitlines() == [
        "exit code 1: out of memory",
        "    trainer made",
        "    out of memory",
    ]

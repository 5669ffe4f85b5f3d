"""Cases of a comparison are shared out among GPUs, those of one model to one of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import collect
import lanes

COMPARE = """
import argparse, json, os, pathlib
parser = argparse.ArgumentParser()
for name in ("case", "work", "peers", "rounds", "data"):
    parser.add_argument(f"--{name}")
args = parser.parse_args()
assert pathlib.Path.cwd() == pathlib.Path(args.work)
for peer in args.peers.split(","):
    figures = dict(step_ms=1.0, tok_s=1000, tokens_update=1000, peak_GiB=1.0)
    about = dict(peer=peer, case=args.case, gpu=os.environ["CUDA_VISIBLE_DEVICES"])
    print("RESULT " + json.dumps(about | figures))
"""


@pytest.fixture
def run(tmp_path):
    script, logs = tmp_path / "compare.py", tmp_path / "logs"
    script.write_text(COMPARE)

    def on_two_gpus(*arguments):
        code = lanes.main([str(script), f"--logs={logs}", "--gpus=2", *arguments])
        return code, [result for log in sorted(logs.glob("*.log")) for result in collect.read_log(log)[1]]

    return on_two_gpus


def test_every_case_runs_once_and_those_of_a_model_on_one_gpu(run):
    code, results = run()
    assert code == 0
    peers = {}
    for result in results:
        peers.setdefault(result["case"], []).append(result["peer"])
    assert peers == {
        case: ["ours"] if case in collect.BESIDE else ["ours", "unsloth"] for case in collect.CASES
    }
    for cases in lanes.SHAPES:
        assert len({result["gpu"] for result in results if result["case"] in cases}) == 1
    assert sorted(case for cases in lanes.SHAPES for case in cases) == sorted(collect.CASES)


@pytest.mark.nightly
def test_what_logs_hold_is_not_run_again(run):
    run("--cases=pr,8b", "--peers=ours,trl")
    code, results = run("--cases=pr,8b,3b")
    assert code == 0
    assert sorted((result["case"], result["peer"]) for result in results) == [
        *(("3b", "ours"), ("3b", "unsloth")),
        *(("8b", "ours"), ("8b", "trl"), ("pr", "ours"), ("pr", "trl")),
    ]

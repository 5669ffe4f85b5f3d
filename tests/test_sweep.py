"""The sweep reports every point: those that fail, and those of a peer that hangs, dies or does not start."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import sweep
from peer_process import PeerProcess
from sweep_peer import full_rows

SOON = 3  # seconds in which the stand-in answers
STAND_IN = """
import json, os, sys, time
peer, behaviour = sys.argv[1], json.loads(sys.argv[2])
if behaviour.get("start") == peer:
    sys.exit("no module named " + peer)
def answer(found):
    print(json.dumps(found), flush=True)
answer({"ready": peer, "device": behaviour.get("device", "a device"), "cuda": None})
for line in sys.stdin:
    job = json.loads(line)
    with open("jobs.txt", "a") as file:
        file.write(json.dumps([os.getpid(), job.get("point")]) + "\\n")
    if peer == "builder":
        folder = os.path.join(job["work"], job["shape"])
        os.makedirs(folder)
        answer({"model": folder})
        continue
    assert os.path.isdir(job["model"])
    doing = behaviour.get(peer + " " + job["point"], {})
    if doing == "hang":
        time.sleep(60)
    elif doing == "die":
        sys.exit("a last word")
    else:
        os.write(1, b"3\\nno JSON\\n")
        figures = {"step_ms": 10.0, "tok_s": 1000, "tokens_update": 256, "peak_GiB": 1.0}
        answer(figures | {"left_GiB": 0.0} | doing)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the sweep over stand-ins for the peers: (exit code, points by name)."""

    def run_sweep(behaviour, *arguments, points="tiny*", peers="ours,unsloth"):
        def start(name, work, peer_paths):
            command = [sys.executable, "-c", STAND_IN, name, json.dumps(behaviour)]
            return PeerProcess(command, {}, work / "peers" / name, start_seconds=20)

        monkeypatch.setattr(sweep, "start", start)
        given = [f"--peers={peers}", f"--points={points}", f"--work={tmp_path}", f"--timeout={SOON}"]
        code = sweep.main([*given, *arguments])
        file = tmp_path / "sweep.json"
        found = json.loads(file.read_text())["points"] if file.exists() else []
        return code, {point["point"]: point["results"] for point in found}

    return run_sweep


def jobs(tmp_path, peer):
    return [json.loads(line) for line in (tmp_path / "peers" / peer / "jobs.txt").read_text().splitlines()]


ONE, TWO = "tiny-1x256-r8", "tiny-2x128-r8-drop0.1"


def test_the_table_has_the_lowest_ratio_first(run, capsys, tmp_path):
    behaviour = {f"unsloth {ONE}": {"tok_s": 500}, f"unsloth {TWO}": {"tok_s": 1250}}
    code, points = run(behaviour)
    assert (code, list(points)) == (0, [ONE, TWO])
    said = capsys.readouterr().out
    assert said.index(f"| {TWO} | 1,000 | 1,250 | 0.80 |") < said.index(f"| {ONE} | 1,000 | 500 | 2.00 |")
    assert "2 points: 2 compared, ours slower at 1" in said
    assert len({pid for pid, _ in jobs(tmp_path, "ours")}) == 1, "one process for all points"
    assert not (tmp_path / "tiny").exists(), "the model is removed after its points"


@pytest.mark.parametrize(
    ("doing", "why"),
    [
        ("hang", f"no answer in {SOON} s"),
        ("die", "died with exit code 1: .*a last word"),
        ({"failed": "out of memory: 3 GiB"}, "out of memory: 3 GiB"),
    ],
)
def test_a_failed_point_is_reported_and_the_next_one_runs(run, capsys, tmp_path, doing, why):
    code, points = run({f"unsloth {ONE}": doing})
    assert code == 0
    assert re.search(why, points[ONE]["unsloth"]["failed"])
    assert points[ONE]["ours"]["tok_s"] == points[TWO]["unsloth"]["tok_s"] == 1000
    assert f"| {ONE} | | | | unsloth failed: " in capsys.readouterr().out
    processes = {pid for pid, _ in jobs(tmp_path, "unsloth")}
    assert len(processes) == (1 if "failed" in doing else 2)


def test_updates_of_different_sizes_are_not_compared(run, capsys):
    run({f"unsloth {ONE}": {"tokens_update": 512}})
    assert f"| {ONE} | | | | updates of 256 and 512 tokens do not compare |" in capsys.readouterr().out


def test_points_without_time_are_named_and_resumed(run, capsys, tmp_path):
    assert run({}, "--minutes=0") == (1, {})
    assert f"no time for 2 points; --resume runs them: {ONE}, {TWO}" in capsys.readouterr().out
    run({}, points=ONE)
    assert run({}, "--resume")[1].keys() == {ONE, TWO}
    assert [point for _, point in jobs(tmp_path, "ours")] == [ONE, TWO]


def test_results_of_another_device_are_not_mixed_in(run, capsys, tmp_path):
    run({}, points=ONE)
    before = (tmp_path / "sweep.json").read_text()
    assert run({"device": "another"}, "--resume")[0] == 2
    assert "--resume: device of" in capsys.readouterr().err
    assert run({})[0] == 2
    assert "sweep.json exists; add --resume to go on with it" in capsys.readouterr().err
    assert (tmp_path / "sweep.json").read_text() == before


@pytest.mark.nightly  # three processes that import the whole stack
@pytest.mark.skipif(torch.cuda.is_available(), reason="TRL would need flash-attn")
def test_ours_and_trl_train_the_same_points(tmp_path):
    arguments = ["--peers=ours,trl", "--points=tiny*", f"--work={tmp_path}", "--minutes=10"]
    assert sweep.main(arguments) == 0
    for point in json.loads((tmp_path / "sweep.json").read_text())["points"]:
        ours, trl = (point["results"][peer] for peer in ("ours", "trl"))
        assert ours["tokens_update"] == trl["tokens_update"] > 0
        assert min(ours["tok_s"], trl["tok_s"]) > 0
        if not point["dropout"]:
            assert ours["loss"] == pytest.approx(trl["loss"], abs=2e-3)


def test_only_full_rows_are_trained():
    rows = Dataset.from_dict({"input_ids": [[1] * n for n in (100, 97, 96, 3, 100)]})
    point = {"row_tokens": 100, "rows": 1, "warm": 1, "timed": 2}
    assert [len(row["input_ids"]) for row in full_rows(rows, point)] == [100, 97, 100]
    with pytest.raises(ValueError, match="3 of 5 packed rows are full, 6 are to be trained"):
        full_rows(rows, point | {"rows": 2})

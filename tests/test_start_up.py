"""The benchmark of start-up: every stage of every peer, with empty caches first."""

import json
import sys
from pathlib import Path

import pytest
import warm

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import start_up


def run_in_a_warm_process(command, env, **_):
    """In place of `subprocess.run`."""
    return warm.program(*command[1:], environment=env)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_peers_train_the_same_and_stages_follow_each_other(real, tmp_path, monkeypatch, capfd):
    arguments = ["--case=tiny", "--peers=ours,trl", "--rounds=1"]
    if not real:
        monkeypatch.setattr("peer_runs.subprocess.run", run_in_a_warm_process)
    monkeypatch.setattr(
        sys, "argv", [start_up.__file__, *arguments, f"--work={tmp_path}", f"--json={tmp_path / 'a.json'}"]
    )
    assert start_up.main() == 0
    by_peer = json.loads((tmp_path / "a.json").read_text())["runs"]["tiny"]
    (ours,), (trl,) = by_peer["ours"], by_peer["trl"]
    assert len(ours["losses"]) == 4
    assert [float(x) for x in ours["losses"]] == pytest.approx([float(x) for x in trl["losses"]], rel=0.02)
    for one in (ours, trl):
        seconds = [one[stage] for stage in start_up.STAGES]
        assert seconds == sorted(seconds)
        assert seconds[0] > (0.1 if real else 0)  # to import torch takes longer
    assert "ours, nothing compiled" in capfd.readouterr().out

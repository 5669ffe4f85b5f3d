"""The ruler for full fine-tuning: all peers train the same, and a run that does not can be seen."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import full
from shapes import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(build("tiny", tmp_path_factory.mktemp("full")))


def run(peer, folder, weights="bfloat16"):
    return full.train(peer, full.CASES["tiny"], str(folder), folder, weights)


@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_peers_train_the_same_weights_on_the_same_tokens(folder, weights):
    ours, trl = run("ours", folder, weights), run("trl", folder, weights)
    same = ("tokens", "trained", "weights", "weight_dtypes", "gradient_dtypes", "moment_dtypes", "clipped_to")
    assert {name: ours[name] for name in same} == {name: trl[name] for name in same}
    assert ours["weight_dtypes"] == ours["gradient_dtypes"] == {weights: ours["trained"]}
    assert ours["moment_dtypes"] == {weights: 2 * ours["trained"]}
    assert ours["losses"] == pytest.approx(trl["losses"], rel=1e-3)
    assert min(ours["losses"][-2:]) < ours["losses"][0]


def test_gradients_that_are_freed_and_masters_are_told(folder):
    found = run("ours-train-on-host-in-backward", folder)
    assert found["gradient_dtypes"] == {}
    assert found["weight_dtypes"] == {"bfloat16": found["trained"]}
    assert found["moment_dtypes"] == {"float32": 2 * found["trained"]}
    assert found["clipped_to"] == 0
    said = full.line_of(found)
    assert "gradients none, moments 1,640,704 in float32" in said
    assert "0 of 6 rows replayed; step not captured: a graph makes all gradients at once" in said


def test_rows_are_counted_that_are_replayed_in_either_way():
    at_once, in_the_end = iter([None, "replayed", None]), iter(["captured", None])
    graphs = SimpleNamespace(replay=lambda: next(at_once), run=lambda: next(in_the_end))
    replayed = full.count_replays(SimpleNamespace(get_decoder=lambda: SimpleNamespace(step_graphs=graphs)))
    for _ in range(3):
        graphs.replay() or graphs.run()
    assert replayed == [True, True, False]

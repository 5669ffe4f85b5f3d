"""The ruler for full fine-tuning: all peers train the same, and a run that does not can be seen."""

import sys
from pathlib import Path

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

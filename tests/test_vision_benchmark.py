"""The rulers for images: all peers train the same on the same pixels, and every update is told."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import vision
import vision_tower
from vision_shapes import SHAPES, build


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("vision")


def run(peer, name, work, images="ready", tower="frozen", checkpointing=False):
    case = replace(vision.CASES[name], steps=3, warm=1)
    args = Namespace(work=work, images=images, tower=tower, checkpointing=checkpointing, workers=0)
    return vision.train(peer, case, build(case.shape, work), args)


@pytest.mark.parametrize("name", ["tiny", "tiny-2.5", "tiny-ov"])
@pytest.mark.parametrize(("images", "tower"), [("ready", "frozen"), ("jpeg", "lora")])
def test_peers_train_the_same_on_the_same_images(name, images, tower, work):
    """Where a peer gets pixels that were made beforehand, and where each decodes its own."""
    ours, trl = (run(peer, name, work, images, tower) for peer in ("ours", "trl"))
    same = ("tokens", "trained", "tower", "images", "recomputing")
    assert {key: ours[key] for key in same} == {key: trl[key] for key in same}
    assert ours["losses"] == pytest.approx(trl["losses"], abs=1e-4)
    assert ours["places"] == ours["tokens"] < trl["places"]


def test_all_peers_recompute_layers_where_a_case_asks_for_it(work):
    plain = run("ours", "tiny", work)
    assert "weights train without gradient checkpointing (0 modules)" in vision.line_of(plain)
    for peer in ("ours", "trl"):
        one = run(peer, "tiny", work, checkpointing=True)
        assert one["recomputing"] >= SHAPES["tiny"].text["num_hidden_layers"]
        assert one["losses"] == pytest.approx(plain["losses"], abs=1e-4)
        assert "weights train with gradient checkpointing" in vision.line_of(one)


def towers(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["vision_tower.py", "--sides=tiny", "--row_tokens=512", *arguments])
    return vision_tower.main()


def test_towers_agree(monkeypatch, tmp_path):
    path = tmp_path / "a.json"
    assert towers(monkeypatch, "--shapes=tiny,tiny-2.5", "--rows=2", "--repeats=3", f"--json={path}") == 0
    found = json.loads(path.read_text())["towers"]
    assert [one["tower"] for one in found] == ["tiny", "tiny-2.5"]
    for one in found:
        for peer in ("ours", "sdpa"):
            assert 0 < one[peer]["error"] < 1e-5
            assert len(one[peer]["seconds"]) == 6


def test_a_tower_that_is_wrong_is_told(monkeypatch):
    def patched_wrongly(model):
        model.model.visual.blocks[0].mlp.linear_fc1.weight.data.mul_(2)

    monkeypatch.setattr(vision_tower, "patch_model", patched_wrongly)
    assert towers(monkeypatch, "--shapes=tiny", "--rows=1", "--repeats=1") == 1

"""The rulers for images: all peers train the same on the same pixels, and every update is told."""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import vision
from vision_shapes import build


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

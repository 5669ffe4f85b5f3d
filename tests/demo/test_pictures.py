"""The vision demo's pictures: the same from each seed, in one split only, with boxes where the pixels are."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from unsloth_pack.demo.pictures import (
    dense_row,
    dense_rows,
    distinct,
    heldout_scenes,
    scenes,
)

SCENES = distinct(scenes(seed=11), 200, set())


def pixels(row):
    (image,) = row["images"]
    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))


@pytest.fixture(scope="module")
def splits():
    return {split: dense_rows(split) for split in ("train", "test")}


def test_no_picture_is_in_two_splits(splits):
    seen = {split: {pixels(row).tobytes() for row in rows} for split, rows in splits.items()}
    assert not seen["train"] & seen["test"]
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 2000, "test": 100}
    assert len(seen["test"]) == 100
    assert [dense_row(scene) for scene in heldout_scenes()] == splits["test"]


def test_boxes_are_where_the_pixels_are():
    assert len({scene.size for scene in SCENES}) == 4
    assert {len(scene.shapes) for scene in SCENES} == {1, 2, 3}
    for scene in SCENES:
        whole = np.asarray(scene.draw())
        assert whole.shape == (*scene.size[::-1], 3)
        for shape in scene.shapes:
            rest = replace(scene, shapes=tuple(each for each in scene.shapes if each != shape))
            drawn = (whole != np.asarray(rest.draw())).any(-1)
            rows, columns = (np.flatnonzero(drawn.any(axis)) for axis in (1, 0))
            assert shape.box == (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)


def test_dense_captions_hold_the_boxes_in_thousandths():
    for scene in SCENES:
        said = json.loads(dense_row(scene)["messages"][1]["content"])
        width, height = scene.size
        pixels = np.array([each["bbox_2d"] for each in said]) * [width, height, width, height] / 1000
        assert np.abs(pixels - [shape.box for shape in scene.shapes]).max() < 0.05
        assert [each["label"] for each in said] == [shape.name for shape in scene.shapes]

"""The limits of pixels of a run: those of its model, of the adapter that it begins with, or its own."""

import json

import pytest
from image_runs import prepared, train
from transformers import AutoImageProcessor

from unsloth_pack import FastVisionModel
from unsloth_pack.cli import main

FIRST, SECOND = 4096, 2048


@pytest.fixture(scope="module")
def first(place, tmp_path_factory):
    """A run whose images were smaller than those of its model."""
    out = tmp_path_factory.mktemp("first") / "out"
    train(place, out, "--max_pixels", FIRST, "--max_steps", 1)
    return out


def most_pixels(folder):
    return AutoImageProcessor.from_pretrained(folder).size["longest_edge"]


def vision_tokens(place, capsys, model, *more):
    capsys.readouterr()
    command = ["stats", "--model_name", model, "--dataset", place / "rows.jsonl", "--json", *more]
    assert main([str(each) for each in [*command, "--image_folder", place / "seen"]]) == 0
    return json.loads(capsys.readouterr().out)["images"]["vision_tokens"]


@pytest.mark.parametrize("way", [[], ["--merge_init_adapter"]], ids=["on with it", "on top"])
def test_a_second_stage_keeps_the_limits_of_the_first(place, first, capsys, tmp_path, way):
    out = tmp_path / "second"
    begins = ["--init_adapter", first, "--max_steps", 1, *way]
    made = prepared(place, tmp_path, *begins)
    assert made.train.ledger.vision_tokens == vision_tokens(place, capsys, first)
    train(place, out, *begins)
    assert most_pixels(out) == FIRST
    if way:
        assert most_pixels(out / "base") == FIRST


def test_a_second_stage_with_limits_of_its_own(place, first, capsys, tmp_path):
    out, limits = tmp_path / "second", ["--max_pixels", SECOND]
    begins = ["--init_adapter", first, "--max_steps", 1, *limits]
    counted = vision_tokens(place, capsys, place / "model", *limits)
    assert prepared(place, tmp_path, *begins).train.ledger.vision_tokens == counted
    train(place, out, *begins)
    assert vision_tokens(place, capsys, out) == counted < vision_tokens(place, capsys, first)
    assert most_pixels(out) == SECOND
    _, processor = FastVisionModel.from_pretrained(str(out), 256, "float32")
    assert processor.image_processor.size["longest_edge"] == SECOND
    assert main(["merge", "--model_name", str(out), "--save_path", str(tmp_path / "merged")]) == 0
    assert most_pixels(tmp_path / "merged") == SECOND

"""The limits of pixels of a run: those of its model, of the adapter that it begins with, or its own."""

import json

import pytest
from image_runs import flags, prepared, refused, train
from tiny_tiles import save_tile_model
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


def test_an_adapter_is_counted_by_its_own_limits(place, first, capsys):
    base, limited = vision_tokens(place, capsys, place / "model"), ["--max_pixels", FIRST]
    assert (
        vision_tokens(place, capsys, first) == vision_tokens(place, capsys, place / "model", *limited) < base
    )


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


def test_a_second_stage_on_text_keeps_the_processor_of_the_first(place, first, tmp_path):
    text = [
        "--dataset",
        place / "text.jsonl",
        "--image_folder=null",
        "--init_adapter",
        first,
        "--max_steps",
        1,
    ]
    train(place, tmp_path / "second", *text)
    assert most_pixels(tmp_path / "second") == FIRST


def test_packs_for_an_adapter_train_on_from_it(place, first, tmp_path, capsys):
    command = flags(place, tmp_path / "packs")[:8]
    command[command.index("--output_dir")] = "--out"
    command[command.index("--model_name") + 1] = str(first)
    capsys.readouterr()
    assert main(["pack", *command, "--max_seq_length=256", "--image_paths"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "unsloth-pack --init_adapter" in said
    assert "--model_name" not in said
    packs = ["--dataset", tmp_path / "packs", "--init_adapter", first, "--max_steps", 1]
    train(place, tmp_path / "second", *packs)
    assert most_pixels(tmp_path / "second") == FIRST


def test_a_family_without_limits_is_limited_as_the_error_says(place, capsys, tmp_path):
    model = save_tile_model(tmp_path / "model", "smolvlm")
    begins = flags(place, tmp_path / "out", "--model_name", model, "--max_pixels", FIRST)
    remedy = "limit them in preprocessor_config.json or processor_config.json of a copy"
    assert f"{remedy} of {model}" in refused(capsys, begins)
    before = vision_tokens(place, capsys, model)
    path = model / "processor_config.json"
    saved = json.loads(path.read_text())
    saved["image_processor"]["size"] = {"longest_edge": 16}
    path.write_text(json.dumps(saved))
    assert vision_tokens(place, capsys, model) < before

"""The bundled model of vision and language: what it knows, what it does not, and what a fine-tune teaches."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tools.build_vision_demo import caption_row
from unsloth_pack import FastVisionModel
from unsloth_pack.cli import main
from unsloth_pack.demo import VISION_DEMO_DEFAULTS, VISION_MODEL_DIR, pictures
from unsloth_pack.demo.evaluate import exact_match
from unsloth_pack.demo.pictures import DENSE, dense_row, heldout_scenes

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def loaded():
    return FastVisionModel.from_pretrained("vision-demo", dtype="float32")


@pytest.fixture
def few_rows(monkeypatch, tmp_path):
    """The demo with a handful of pictures, in a folder of its own."""
    monkeypatch.setattr(pictures, "_ROWS_OF_SPLIT", {"train": 60, "test": 4})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_of(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_it_names_the_shapes_of_pictures_that_it_has_not_seen(loaded):
    model, processor = loaded
    rows = [caption_row(scene) for scene in heldout_scenes()[:60]]
    assert exact_match(model, processor, rows).score >= 0.95
    dense = exact_match(model, processor, [dense_row(scene) for scene in heldout_scenes()[:20]])
    assert dense.score == 0.0
    assert {made.prompt for made in dense.generations} == {DENSE}
    blank = [row | {"images": rows[place - 1]["images"]} for place, row in enumerate(rows[:20])]
    assert exact_match(model, processor, blank).score <= 0.1  # it looks at the picture


@pytest.mark.draws
def test_the_command_line_trains_it(few_rows, capsys):
    flags = ["--sample_packing", "--max_steps=2", "--logging_steps=1", "--dtype=float32"]
    assert main(["--model_name=vision-demo", "--output_dir=out", *flags]) == 0
    assert "exact match on 4 held-out rows" in capsys.readouterr().out
    (demo,) = lines_of(few_rows / "out", "demo")
    assert len(demo["examples"]) == 3
    assert all(json.loads(example["expected"]) for example in demo["examples"])
    (config,) = lines_of(few_rows / "out", "config")
    assert config["options"]["dataset"] == "vision-demo"
    for name, value in (VISION_DEMO_DEFAULTS | {"logging_steps": 1}).items():
        assert config["options"][name] == value, name
    page = (few_rows / "out" / "report.html").read_text()
    assert "data:image/png" in page
    assert "Held-out rows" in page
    assert "could not be drawn" not in page
    assert main(["generate", "--model_name=out", "--prompt=Hello", "--max_new_tokens=2"]) == 0


def test_two_stages_run_one_after_the_other(few_rows):
    quick = ["--max_steps=2", "--training.warmup_steps=0", "--logging_steps=1", "--dtype=float32"]
    for stage in ("vision-stage1", "vision-stage2"):
        assert main(["recipe", "copy", stage]) == 0
        assert main([f"--config={stage}.yaml", *quick]) == 0
        assert lines_of(few_rows / "outputs" / stage, "demo")
    first, second = (few_rows / "outputs" / f"vision-stage{number}" for number in (1, 2))
    trained = {*load_file(first / "adapter_model.safetensors")}
    assert trained
    assert all(".visual." in name and "merger" in name for name in trained)
    assert all(".language_model." in name for name in load_file(second / "adapter_model.safetensors"))
    base, bundled = (load_file(path / "model.safetensors") for path in (second / "base", VISION_MODEL_DIR))
    differ = {name for name, weight in bundled.items() if not torch.equal(weight.float(), base[name].float())}
    assert differ
    assert all("merger" in name for name in differ)  # the second stage begins with the aligner of the first

"""`train` on rows with images, from the command line to a merged model."""

import json

import pytest
from safetensors.torch import load_file
from tiny_vision import picture, save_vision_model

from unsloth_pack.cli import main


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, ten rows with none to three images, and the images."""
    place = tmp_path_factory.mktemp("images")
    save_vision_model(place / "model", "qwen3_vl")
    (place / "seen").mkdir()
    rows = []
    for i in range(10):
        names = [f"{i}-{n}.{'jpg' if n else 'png'}" for n in range(i % 4)]
        for n, name in enumerate(names):
            picture(40 + 8 * i, 60 + 20 * n, i).save(place / "seen" / name)
        asked = {"role": "user", "content": "<image>" * len(names) + f"What is it? {i}"}
        rows.append({"messages": [asked, {"role": "assistant", "content": f"It is {i}."}], "images": names})
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def train(place, out, *flags, code=0):
    arguments = ["--model_name", place / "model", "--dataset", place / "rows.jsonl", "--output_dir", out]
    arguments += ["--image_folder", place / "seen", "--max_seq_length", 256, "--dtype", "float32", "--r", 4]
    arguments += ["--max_steps", 3, "--gradient_accumulation_steps", 1, "--sample_packing", *flags]
    assert main([str(each) for each in arguments]) == code


def weights(out):
    return load_file(out / "adapter_model.safetensors")


def test_rows_with_images_train(place, tmp_path):
    train(place, tmp_path / "out")
    print(sorted(p.name for p in (tmp_path / "out").iterdir()))

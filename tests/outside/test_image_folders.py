"""Images by another way: their files were copied, or their column has another name."""

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Value
from datasets import Image as HubImage
from PIL import Image

from unsloth_pack.cli import main

pytestmark = pytest.mark.usefixtures("one_thread", "in_tmp_path")
SIZES = ["--model_name=vision-demo", "--max_seq_length=256"]
FLAGS = [*SIZES, "--image_folder=seen", "--max_steps=2", "--dtype=float32", "--gradient_accumulation_steps=1"]


@pytest.fixture
def rows(in_tmp_path):
    os.mkdir("seen")
    made = []
    for number in range(4):
        Image.new("RGB", (32, 32), (60 * number, 0, 90)).save(f"seen/{number}.png")
        turns = [
            {"role": "user", "content": "<image>What?"},
            {"role": "assistant", "content": f"No {number}."},
        ]
        made.append(json.dumps({"messages": turns, "images": [f"{number}.png"]}))
    with open("rows.jsonl", "w") as file:
        file.write("\n".join(made))


def touched():
    for name in os.listdir("seen"):
        os.utime(f"seen/{name}", (1e9, 1e9))


def test_a_run_resumes_with_images_that_were_copied(rows, refused):
    assert main([*FLAGS, "--dataset=rows.jsonl", "--save_steps=1", "--output_dir=out"]) == 0
    whole = Path("out/adapter_model.safetensors").read_bytes()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        os.remove(f"out/{name}")
    shutil.rmtree("out/checkpoint-2")
    with open("out/metrics.jsonl") as file:
        kept = [line for line in file if json.loads(line).get("step", 0) < 2 and '"summary"' not in line]
    with open("out/metrics.jsonl", "w") as file:
        file.writelines(kept)
    touched()
    shutil.copytree("out", "other")
    assert main(["--resume", "--output_dir=out"]) == 0
    assert Path("out/adapter_model.safetensors").read_bytes() == whole
    Image.new("RGB", (32, 32), (1, 2, 3)).save("seen/1.png")
    assert "rows.jsonl is not what the run began with" in refused(["--resume", "--output_dir=other"])


def test_packs_of_paths_take_images_that_were_copied(rows, refused):
    pack = ["pack", *SIZES, "--image_folder=seen", "--dataset=rows.jsonl", "--image_paths", "--out=packs"]
    assert main(pack) == 0
    touched()
    train = [*FLAGS, "--dataset=packs", "--max_steps=1"]
    assert main([*train, "--output_dir=out"]) == 0
    size = os.path.getsize("seen/1.png")
    Image.new("RGB", (32, 32), (60, 1, 90)).save("seen/1.png")
    assert os.path.getsize("seen/1.png") == size
    touched()
    assert "an image that has changed since it was prepared" in refused([*train, "--output_dir=no"])


def test_an_image_under_two_names_is_on_one_side(rows, refused):
    shutil.copy("seen/0.png", "seen/1.png")
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "No."}]
    lines = [json.dumps({"messages": turns, "images": [f"{number}.png"]}) for number in range(2)]
    Path("same.jsonl").write_text("\n".join(lines))
    line = refused([*FLAGS, "--dataset=same.jsonl", "--eval_fraction=0.5", "--output_dir=out"])
    assert "all 2 documents hold the same tokens" in line


@pytest.mark.parametrize("named", [True, False])
def test_the_remedy_for_a_column_of_another_name_trains(rows, refused, named):
    """Image bytes in Parquet, with and without the type that `datasets` writes beside them."""
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "No."}]
    picture = {"bytes": Path("seen/1.png").read_bytes(), "path": None}
    if named:
        kinds = {"messages": [{"role": Value("string"), "content": Value("string")}], "picture": HubImage()}
        row = {"messages": [turns], "picture": [picture]}
        Dataset.from_dict(row, features=Features(kinds)).to_parquet("r.parquet")
    else:
        pq.write_table(pa.Table.from_pylist([{"messages": turns, "picture": picture}]), "r.parquet")
    pack = ["pack", *SIZES, "--dataset=r.parquet"]
    line = refused([*pack, "--out=no"])
    assert "; give --columns picture=image or --columns picture=" in line
    assert main([*pack, "--out=packs", "--columns", "picture=image"]) == 0


@pytest.mark.parametrize("value", ["1.png", ["1.png"]])
def test_a_column_of_paths_beside_the_mark_of_an_image(rows, refused, value):
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "No."}]
    Path("r.jsonl").write_text(json.dumps({"messages": turns, "photo": value}))
    pack = ["pack", *SIZES, "--dataset=r.jsonl", "--image_folder=seen"]
    assert "map 'photo' to it, which holds '1.png'" in refused([*pack, "--out=no"])
    assert main([*pack, "--out=packs", "--columns=photo=image"]) == 0
    Path("r.jsonl").write_text(json.dumps({"caption": "What?", "image": value}))
    assert "; map them with --columns to messages" in refused([*pack, "--out=no"])

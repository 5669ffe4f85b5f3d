"""Runs on rows with images: a model, rows with none to three images, and command lines."""

import json

from command_options import read_options
from prepared_runs import prepare
from safetensors.torch import load_file
from tiny_vision import picture, save_vision_model

from unsloth_pack.cli import main


def make_place(place, save_model=None):
    """A folder of a model, by default a Qwen3-VL, rows with none to three images, and the images."""
    if save_model is None:
        save_vision_model(place / "model", "qwen3_vl")
    else:
        save_model(place / "model")
    (place / "seen").mkdir()
    rows = []
    for i in range(10):
        names = [f"{i}-{n}.{'jpg' if n else 'png'}" for n in range(i % 4)]
        for n, name in enumerate(names):
            picture(40 + 8 * i, 60 + 20 * n, i).save(place / "seen" / name)
        asked = {"role": "user", "content": "<image>" * len(names) + f"What is it? {i}"}
        rows.append({"messages": [asked, {"role": "assistant", "content": f"It is {i}."}], "images": names})
    write(place / "rows.jsonl", rows)
    write(place / "text.jsonl", [{"prompt": f"How are you, {i}?", "completion": "Well."} for i in range(4)])
    return place


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(place):
    return [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]


def flags(place, out, *more):
    has_data = any(str(each).startswith("--dataset") for each in more)
    found = ["--model_name", place / "model", *([] if has_data else ["--dataset", place / "rows.jsonl"])]
    found += ["--output_dir", out]
    found += ["--image_folder", place / "seen", "--max_seq_length", 256, "--dtype", "float32", "--r", 4]
    found += ["--max_steps", 3, "--gradient_accumulation_steps", 1, "--learning_rate", 0.01]
    return [str(each) for each in [*found, "--sample_packing", *more]]


def without_folder(arguments):
    """The words of a command line without the image folder."""
    at = arguments.index("--image_folder")
    return arguments[:at] + arguments[at + 2 :]


def train(place, out, *more):
    assert main(flags(place, out, *more)) == 0
    return load_file(out / "adapter_model.safetensors")


def refused(capsys, arguments):
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Traceback" not in said
    return said


def prepared(place, tmp_path, *more):
    return prepare(read_options(flags(place, tmp_path / "out", *more)))

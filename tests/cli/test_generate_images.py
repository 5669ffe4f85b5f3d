"""`unsloth-pack generate` with images."""

import re

import pytest
import torch
from image_runs import train
from tiny_vision import picture

from unsloth_pack import FastVisionModel
from unsloth_pack.cli import main

ASKED = "What is it?"


@pytest.fixture
def asked(place, tmp_path, capsys):
    """Runs the command on two pictures that lie in `tmp_path`; what it prints, or its error."""
    for number in range(2):
        picture(40 + 20 * number, 64, number).save(tmp_path / f"{number}.png")

    def run(prompt, *images, model=place / "model", code=0):
        more = [flag for image in images for flag in ("--image", str(tmp_path / image))]
        command = ["generate", "--model_name", str(model), "--dtype=float32", "--max_new_tokens=6"]
        assert main([*command, f"--prompt={prompt}", *more]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return run


def expected(folder, content, pictures):
    """What the model answers through its processor and chat template."""
    model, processor = FastVisionModel.from_pretrained(str(folder), 64, "float32")
    turns = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=pictures, return_tensors="pt")
    with torch.no_grad():
        ids = FastVisionModel.for_inference(model).generate(**inputs, max_new_tokens=6, do_sample=False)
    return processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_model_is_asked_about_images(asked, place):
    pictures = [picture(40, 64, 0), picture(60, 64, 1)]
    text, image = {"type": "text", "text": ASKED}, {"type": "image"}
    before = expected(place / "model", [image, text], pictures[:1])
    assert asked(ASKED, "0.png").strip() == before.strip()
    between = [image, {"type": "text", "text": "or"}, image, text]
    both = asked(f"<image>or<image>{ASKED}", "0.png", "1.png")
    assert both.strip() == expected(place / "model", between, pictures).strip()
    assert asked(ASKED).strip() == expected(place / "model", ASKED, None).strip()


def test_an_adapter_is_asked_about_images(asked, place, tmp_path):
    train(place, tmp_path / "out", "--max_steps", 1)
    assert asked(ASKED, "0.png", model=tmp_path / "out")


@pytest.mark.parametrize(
    ("prompt", "images", "says"),
    [
        ("<image>a", [], r"holds 1 times <image>, and --image is given 0 times; give one for each"),
        ("<image>a", ["0.png", "1.png"], "holds 1 times <image>, and --image is given 2 times"),
        ("<|image_pad|>a", ["0.png"], r"holds <\|image_pad\|>, a token of images; write <image>"),
        ("a", ["no.png"], r"--image is .*no\.png', which is no file; correct it"),
        ("a", ["text.png"], r"--image is .*text\.png', which cannot be read as an image; give another"),
        ("a", ["."], "which is no file"),
    ],
)
def test_what_is_refused(prompt, images, says, asked, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    said = asked(prompt, *images, code=2)
    assert re.search(says, said)
    assert said.count("\n") == 1


def test_a_model_of_text_takes_no_image(asked):
    assert re.search("demo takes no images; leave it out", asked("a", "0.png", model="demo", code=2))

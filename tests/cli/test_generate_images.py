"""`unsloth-pack generate` with images."""

import re

import pytest
import torch
from tiny_vision import picture
from tokenizers.processors import TemplateProcessing

from unsloth_pack import FastVisionModel
from unsloth_pack.cli import main
from unsloth_pack.cli.generate import encode, encode_with_images
from unsloth_pack.images.tokens import IMAGE_TOKENS

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


def expected(folder, content):
    """What the model answers to the inputs that transformers' own way makes of these parts."""
    model, processor = FastVisionModel.from_pretrained(str(folder), 64, "float32")
    turns = [{"role": "user", "content": content}]
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(turns, tokenize=True, **options)
    with torch.no_grad():
        ids = FastVisionModel.for_inference(model).generate(**inputs, max_new_tokens=6, do_sample=False)
    return processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_a_model_is_asked_about_images(asked, place):
    one, two = ({"type": "image", "image": picture(40 + 20 * n, 64, n)} for n in range(2))
    text = {"type": "text", "text": ASKED}
    assert asked(ASKED, "0.png").strip() == expected(place / "model", [one, text])
    between = [one, {"type": "text", "text": "or"}, two, text]
    both = asked(f"<image>or<image>{ASKED}", "0.png", "1.png")
    assert both.strip() == expected(place / "model", between)
    assert asked(ASKED).strip() == expected(place / "model", [text])


def test_a_template_that_writes_the_first_token_gets_no_second_one():
    """Of a tokenizer that adds it too, as Gemma 3's and Mistral 3's."""
    _, processor = FastVisionModel.from_pretrained("vision-demo", 64, "float32")
    tokenizer = processor.tokenizer
    tokenizer.bos_token = "<|im_start|>"
    first = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
    )
    assert tokenizer("a")["input_ids"][0] == first
    tokens = IMAGE_TOKENS["qwen3_vl"]
    with_images = encode_with_images(processor, tokens, "a", [picture(32, 32)])["input_ids"][0]
    without = encode(tokenizer, "a")["input_ids"][0]
    for ids in (with_images.tolist(), without.tolist()):
        assert ids[0] == first
        assert ids[1] != first


@pytest.mark.parametrize(
    ("prompt", "images", "says"),
    [
        ("<image><image>a", ["0.png"], r"holds 2 times <image>, and --image is given 1 times; give one"),
        ("<|image_pad|>a", ["0.png"], r"holds <\|image_pad\|>, a token of images; write <image>"),
        ("a", ["no.png"], r"--image is .*no\.png', which is no file with an image"),
        ("a", ["text.png"], r"--image is .*text\.png', which is no file with an image"),
    ],
)
def test_what_is_refused(prompt, images, says, asked, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    said = asked(prompt, *images, code=2)
    assert re.search(says, said)
    assert said.count("\n") == 1

"""`unsloth-pack generate` with images."""

import io
import json
import re
import sys

import pytest
import torch
from tiny_vision import picture
from tokenizers.processors import TemplateProcessing

from unsloth_pack import FastVisionModel
from unsloth_pack.cli import main
from unsloth_pack.cli.answers import Answerer, Conversation

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


def test_a_template_that_writes_the_first_token_gets_no_second_one(tmp_path):
    """Of a tokenizer that adds it too, as Gemma 3's and Mistral 3's."""
    answerer = Answerer("vision-demo", {"max_new_tokens": 1}, "")
    tokenizer = answerer.tokenizer
    tokenizer.bos_token = "<|im_start|>"
    first = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
    )
    assert tokenizer("a")["input_ids"][0] == first
    picture(32, 32).save(tmp_path / "a.png")
    for images in ([], [str(tmp_path / "a.png")]):
        ids = answerer.encode([Conversation([{"role": "user", "content": "a"}], images)])["input_ids"][
            0
        ].tolist()
        assert ids[0] == first
        assert ids[1] != first


@pytest.mark.parametrize(
    ("prompt", "images", "says"),
    [
        ("<image><image>a", ["0.png"], r"holds 2 times <image>, and there are 1 images; give one"),
        ("<|image_pad|>a", ["0.png"], r"holds <\|image_pad\|>, a token of images; write <image>"),
        ("a", ["no.png"], r"no\.png' is no file with an image"),
        ("a", ["text.png"], r"text\.png' is no file with an image"),
    ],
)
def test_what_is_refused(prompt, images, says, asked, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    said = asked(prompt, *images, code=2)
    assert re.search(says, said)
    assert said.count("\n") == 1


def test_a_chat_goes_on_about_its_images(asked, place, tmp_path, monkeypatch, capsys):
    lines = "/image 0.png\nWhat is it?\n/image 1.png\nAnd this?\nSo?\n/save all.jsonl\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["chat", str(place / "model"), "--dtype=float32", "--max_new_tokens=6"]) == 0
    first, second, third = map(str.strip, capsys.readouterr().out.split("\n")[:3])
    saved = json.loads((tmp_path / "all.jsonl").read_text())
    assert saved["images"] == [str(tmp_path / "0.png"), str(tmp_path / "1.png")]
    assert [turn["content"] for turn in saved["messages"]] == [
        *("<image>What is it?", first, "<image>And this?", second, "So?", third)
    ]
    assert asked("What is it?", "0.png").strip() == first
    (tmp_path / "asked.jsonl").write_text(json.dumps(saved | {"messages": saved["messages"][:3]}))
    command = ["generate", f"--model_name={place / 'model'}", "--dtype=float32", "--max_new_tokens=6"]
    assert main([*command, "--prompts=asked.jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["generated_text"] == second
    assert (
        main(["stats", f"--model_name={place / 'model'}", "--dataset=all.jsonl", "--pack_lengths=256"]) == 0
    )

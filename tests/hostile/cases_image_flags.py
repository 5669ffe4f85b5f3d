"""Images from the command line that are refused: flags, parts that train, and rows whose images are wrong."""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import cases_images
from refusals import Case, train
from tiny_vision import save_vision_model

NUMBERS = {
    "max_pixels": "a whole number of at least 1",
    "min_pixels": "a whole number of at least 1",
    "dataloader_num_workers": "a whole number of at least 0",
    "vit_lr": "a number above 0",
    "aligner_lr": "a number above 0",
}
SWITCHES = ("freeze_vit", "freeze_aligner", "freeze_llm", "skip_broken_images", "shrink_images")
FLAGS = [
    Case(f"--{name}={value!r}", f"{name} is .*give {says}", train(**{name: value}))
    for name, says in NUMBERS.items()
    for value in ("-1", "x")
]
FLAGS += [
    Case(f"--{name}={value!r}", f"{name} is .*true or false", train(**{name: value}))
    for name in SWITCHES
    for value in ("", "7")
]
OF_TEXT = [
    Case(f"--{name} for a text model", f"{name} is .*, and model takes no images", train(**{name: value}))
    for name, value in {
        "image_folder": ".",
        "max_pixels": 65536,
        "min_pixels": 1024,
        "skip_broken_images": True,
        "shrink_images": True,
        "dataloader_num_workers": 2,
        "freeze_vit": False,
        "freeze_aligner": True,
        "freeze_llm": True,
        "aligner_lr": 1e-4,
    }.items()
]
OF_TEXT += [
    Case("packs of images of a text model", "image_folder is '.', and model takes no images", [
        "pack", "--model_name=model", "--dataset=few.jsonl", "--max_seq_length=144", "--out=new",
        "--image_folder=.",
    ]),
    Case("paths of images that are not there", "image_paths is true, and the data has no images", [
        "pack", "--model_name=model", "--dataset=few.jsonl", "--max_seq_length=144", "--out=new",
        "--image_paths",
    ]),
    Case("stats of images of a text model", "max_pixels is 4096, and model takes no images", [
        "stats", "--model_name=model", "--dataset=few.jsonl", "--max_pixels=4096",
    ]),
]  # fmt: skip
TOGETHER = [
    Case("a rate of a frozen tower", "vit_lr is 0.1 and freeze_vit is true", train(vit_lr=0.1)),
    Case(
        "a rate of a frozen aligner",
        "aligner_lr is 0.1 and freeze_aligner is true",
        train(aligner_lr=0.1, freeze_aligner=True),
    ),
    Case(
        "nothing but what is frozen", "leaves nothing to train", train(freeze_aligner=True, freeze_llm=True)
    ),
    Case(
        "layers of what is frozen",
        "freeze_llm is true and layers_to_transform",
        train(freeze_llm=True, layers_to_transform=0),
    ),
    Case("sizes that are no range", "give a range", train(min_pixels=4096, max_pixels=2048)),
    Case("images in no folder", "image_folder is 'no/such'", train(image_folder="no/such")),
    Case("images in a file", "image_folder is 'few.jsonl'", train(image_folder="few.jsonl")),
    Case(
        "images of a stream of text",
        "takes no images",
        train(streaming=True, image_folder="."),
    ),
]
TOGETHER = [replace(case, beside="takes no images") for case in TOGETHER]


@functools.cache
def _model() -> Path:
    return save_vision_model(Path(tempfile.mkdtemp()) / "model", "qwen3_vl")


def _asked(text: str, answer: str = "Red.") -> list[dict]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def row(given: dict, says: str, name: str, **flags: object) -> Case:
    """A run on one row of a model that takes images."""

    def prepare(place: Path) -> None:
        cases_images.folder(place)
        (place / "seeing").symlink_to(_model())
        (place / "rows.jsonl").write_text(json.dumps(given))

    given = {"messages": _asked("<image>What?"), **given}
    run = train(model_name="seeing", dataset="rows.jsonl", **{"image_folder": "images", **flags})
    return Case(f"row: {name}", says, run, prepare)


ROWS = [
    row({"images": ["../outside.png"]}, "leads out of the image folder", "a path upwards"),
    row({"images": ["link.png"]}, "leads out of the image folder", "a link outwards"),
    row({"images": ["out/outside.png"]}, "leads out of the image folder", "a folder outwards"),
    row({"images": ["pipe.png"]}, "a path that is no file", "a pipe"),
    row({"images": ["no.png"]}, "is no file", "an image that is gone"),
    row({"images": ["text.png"]}, "no image of a known format", "a text"),
    row({"images": ["empty.png"]}, "no image of a known format|0 bytes", "no bytes"),
    row({"images": ["a.png"]}, "give image_folder", "a relative path and no folder", image_folder=None),
    row({"images": ["http://a/b.png"]}, "lies on the network", "an address"),
    row({"images": []}, "places for images.*: 1, images: 0", "no image for a place"),
    row({"images": ["a.png", "a.png"]}, "places for images.*: 1, images: 2", "no place for an image"),
    row({"images": ["a.png"], "image": "a.png"}, "images in two columns", "two columns"),
    row({"images": ["a.png"], "videos": ["a.mp4"]}, "video or sound", "a video"),
    row(
        {"images": ["a.png"], "messages": _asked("<image>|<|image_pad|>")},
        "the text holds <\\|image_pad\\|>",
        "a token in a text",
    ),
    row(
        {"images": ["a.png"], "messages": _asked("What?", "<image>")},
        "an image in a turn of the assistant",
        "an answer",
    ),
    row({"images": ["a.png"]}, "max_pixels is 9, and one token is 1024", "too few pixels", max_pixels=9),
    row(
        {"images": ["a.png"]},
        "none of the .* tokens in 1 rows would count",
        "no room",
        max_seq_length=10,
        max_token_loss=1,
    ),
    row(
        {"images": ["a.png"]},
        "would lose .* tokens, .* beyond --max_seq_length 13 in 1 rows",
        "no room at all",
        max_seq_length=13,
        shrink_images=True,
    ),
    row(
        {"images": ["no.png"]},
        "each of the 1 rows has an image that cannot be used",
        "nothing but broken images",
        skip_broken_images=True,
    ),
    row(
        {"messages": _asked("<|image_pad|>What?")},
        "stands for an image, and has no images",
        "a token, and no images",
        image_folder=None,
    ),
]
CASES = [*FLAGS, *OF_TEXT, *TOGETHER, *ROWS]

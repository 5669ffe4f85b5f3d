"""Images from the command line that are refused: flags, parts that train, and rows whose images are wrong."""

import functools
import json
import tempfile
from pathlib import Path

import cases_images
from refusals import Case, train
from tiny_vision import save_vision_model

FLAGS = [
    Case("too few pixels", "max_pixels is '-1'; it should be greater", train(max_pixels="-1")),
    Case("no switch", "freeze_vit is '7'; it should be a valid boolean", train(freeze_vit="7")),
    Case("a text model sees", "freeze_vit is false, and model takes no images", train(freeze_vit=False)),
    Case("paths of images that are not there", "image_paths is true, and no image of the data is a file", [
        "pack", "--model_name=model", "--dataset=few.jsonl", "--max_seq_length=144", "--out=new",
        "--image_paths",
    ]),
]  # fmt: skip
TOGETHER = [
    Case(
        "layers of what is frozen",
        "freeze_llm is true and layers_to_transform",
        train(freeze_llm=True, layers_to_transform=0),
    ),
    Case("sizes that are no range", "give a range", train(min_pixels=4096, max_pixels=2048)),
    Case("images in no folder", "image_folder is 'no/such'", train(image_folder="no/such")),
]


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
    row({"images": ["pipe.png"]}, "a path that is no file", "a pipe"),
    row({"images": ["no.png"]}, "is no file", "an image that is gone"),
    row({"images": ["a.png"]}, "give image_folder", "a relative path and no folder", image_folder=None),
    row({"images": ["a.png", "a.png"]}, "places for images.*: 1, images: 2", "no place for an image"),
    row(
        {"images": ["a.png"], "messages": _asked("<image>|<|image_pad|>")},
        "the text holds <\\|image_pad\\|>",
        "a token in a text",
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
        "would lose .* tokens, .* beyond --max_seq_length 13, ",
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
CASES = [*FLAGS, *TOGETHER, *ROWS]

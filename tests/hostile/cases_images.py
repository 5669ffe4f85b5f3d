"""Rows with images that are refused: files, paths, placeholders, and the processor's limits."""

import base64
import functools
import io
import os
import struct
import zlib
from pathlib import Path

from PIL import PngImagePlugin
from refusals import Case
from tiny_vision import encoded, picture, vision_config, vision_model, vision_processor

from unsloth_pack import FastVisionModel, VisionDataCollator

PNG = encoded(picture(64, 64))
JPEG = encoded(picture(64, 64), "JPEG")
OUTSIDE = "outside.png"  # beside the folder of images


@functools.cache
def _parts():
    return vision_config(), vision_processor()


def collate(rows, **options):
    options.setdefault("image_folder", "images")
    return VisionDataCollator(*_parts(), **options)(rows if isinstance(rows, list) else [rows])


def folder(place: Path) -> None:
    """A folder of images, one of them outside, and what is no image."""
    (place / "images" / "in").mkdir(parents=True)
    (place / "images" / "a.png").write_bytes(PNG)
    (place / OUTSIDE).write_bytes(PNG)
    (place / "images" / "empty.png").write_bytes(b"")
    (place / "images" / "text.png").write_text("not an image")
    (place / "images" / "cut.jpg").write_bytes(JPEG[: len(JPEG) // 2])
    (place / "images" / "link.png").symlink_to(place / OUTSIDE)
    (place / "images" / "loop.png").symlink_to("loop.png")
    (place / "images" / "gone.png").symlink_to("no-such.png")
    (place / "images" / "out").symlink_to(place)
    os.mkfifo(place / "images" / "pipe.png")


def of(content, says, name, prepare=folder, **options):
    """An image that is refused, or what makes it."""
    return Case(
        f"images: {name}",
        says,
        lambda: collate(
            asking([{"type": "image", "image": content() if callable(content) else content}]), **options
        ),
        prepare,
    )


def row(given, says, name, prepare=folder, **options):
    return Case(f"images: {name}", says, lambda: collate(given, **options), prepare)


def chunk(name, body):
    crc = zlib.crc32(name + body).to_bytes(4, "big")
    return len(body).to_bytes(4, "big") + name + body + crc


def png_of_size(width, height):
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + pixels + chunk(b"IEND", b"")


def with_text_bomb():
    """A picture with a compressed text of 100 MB."""
    text = PngImagePlugin.PngInfo()
    text.add_text("x", "\0" * 100_000_000, zip=True)
    file = io.BytesIO()
    picture(32, 32).save(file, "PNG", pnginfo=text)
    return file.getvalue()


def asking(text, **columns):
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "It is red."}]
    return {"messages": turns, **columns}


def answering(content, **columns):
    turns = [{"role": "user", "content": "draw"}, {"role": "assistant", "content": content}]
    return {"messages": turns, **columns}


URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
PART = [{"type": "image", "image": PNG}]

CASES = [
    # files
    of("empty.png", "no image of a known format", "an empty file"),
    of("text.png", "no image of a known format.*text.png", "a text"),
    of("cut.jpg", "cannot be read .*truncated.*cut.jpg", "half a JPEG"),
    of(png_of_size(60_000, 60_000), "too large .*60000 by 60000|too large", "a decompression bomb"),
    of(png_of_size(10_000, 9_500), "too large .*10000 by 9500", "a bomb that Pillow would only warn of"),
    of(with_text_bomb, "cannot be read .*too large|too large", "a compressed text of 100 MB"),
    of(picture(4, 1000), "processor refuses .*aspect ratio", "250 times as wide as high"),
    # paths
    of(f"../{OUTSIDE}", "leads out of the image folder", "a path out of the folder"),
    of("link.png", "leads out of the image folder", "a link out of the folder"),
    of("a.png", "give image_folder", "a relative path without a folder", image_folder=None),
    of("https://example.com/a.png", "on the network.*download", "an address"),
    of("data:image/png;base64,@@@", "not base64", "a data URI that is not base64"),
    # what stands for an image
    of(5, "no image, got 5", "a number"),
    row(asking("<image>", images=[PNG, PNG]), "images in column .*: 1, images: 2", "an image too many"),
    row(asking("what?", image=PNG), "images in column .*: 0, images: 1", "an image without a place"),
    row(asking("<image>"), "images in column .*: 1, images: 0", "a place without an image"),
    row(asking([{"type": "image"}]), "images in column .*: 1, images: 0", "a part without an image"),
    row(
        asking([*PART, {"type": "text", "text": "<image>"}]),
        "images in column .*: 1, images: 0",
        "a part and a mark",
    ),
    row(asking("<image>", image=PNG, images=[PNG]), "images in two columns", "two columns"),
    row(answering(PART), "an image in a turn of the assistant", "an image in an answer"),
    row(asking("<|image_pad|>"), r"the text holds <\|image_pad\|>", "the model's token in a text"),
    row(asking([{"type": "video", "video": "a.mp4"}]), "neither text nor an image", "a video in a part"),
    row(asking("what?", videos=["a.mp4"]), "column 'videos': video or sound", "a column of videos"),
    # rows
    row({"image": PNG, "caption": "red"}, "no conversation.*give the columns", "no conversation"),
    row({"messages": [{"content": PART}]}, "turn 0 has no role", "a turn without a role"),
    row({"messages": [{"role": "user", "content": PART}]}, "no assistant turn", "no answer"),
    row(answering(""), "empty response", "an empty answer"),
    # lengths
    of(PNG, "too long .*max_seq_length is 9", "a document above the limit", max_seq_length=9),
    of(PNG, "cut before the end of an image", "a cut in an image", max_seq_length=10, overlong="truncate"),
    of(PNG, "a document that is too long", "a long text", max_seq_length=25, overlong="shrink"),
    # models
    Case("images: a text model", "takes no images", lambda: FastVisionModel.from_pretrained("model")),
    Case(
        "images: an adapter on nothing",
        "leave no layer for an adapter",
        lambda: FastVisionModel.get_peft_model(
            vision_model("qwen2_5_vl"), finetune_language_layers=False, finetune_aligner=False
        ),
    ),
]

"""Images of every kind: the header says the size that decoding gives, and pixels are those that one sees."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps, features
from tiny_vision import encoded, picture

from unsloth_pack.images.reading import ImageSource, UnreadableImage, parse_source, read_pixels, read_size

KINDS = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]
KINDS += ["AVIF"] if features.check("avif") else []
KINDS += ["JPEG2000"] if features.check("jpg_2000") else []


def of(content):
    return ImageSource(0, "image", content)


def with_exif(kind, orientation, size=(40, 72)):
    image = picture(*size)
    exif = image.getexif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif)


@pytest.mark.parametrize("kind", KINDS)
def test_the_header_says_what_decoding_gives(kind):
    data = encoded(picture(40, 72), kind)
    assert read_size(of(data)) == (40, 72) == read_pixels(of(data)).size[::-1]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("GIF", "BMP", "PPM", "JPEG2000")])
def test_images_are_turned_as_their_exif_says(kind, orientation):
    data = with_exif(kind, orientation)
    decoded = read_pixels(of(data))
    assert read_size(of(data)) == decoded.size[::-1]
    theirs = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert decoded.tobytes() == theirs.tobytes()
    if kind != "AVIF":  # Pillow's encoder turns the pixels there
        assert decoded.size[::-1] == ((72, 40) if orientation > 4 else (40, 72))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_that_is_cut_is_refused_by_its_end(kind, monkeypatch):
    """No pixel of a whole one is decoded for that, and what has something behind it is read all the same."""
    data = encoded(picture(400, 720), kind)
    for length in (len(data) * 9 // 10, len(data) // 2):
        with pytest.raises(UnreadableImage, match="truncated"):
            read_size(of(data[:length]))
    assert read_size(of(data + b"more")) == (400, 720)
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    assert read_size(of(data)) == (400, 720)


def test_modes():
    image = picture(24, 40)
    assert read_pixels(of(encoded(image.convert("CMYK"), "TIFF"))).mode == "RGB"
    grey = image.convert("L")
    assert np.asarray(read_pixels(of(encoded(grey))))[..., 1].tolist() == np.asarray(grey).tolist()
    palette = image.quantize(16)
    with_alpha = encoded(palette, "PNG", transparency=3)
    assert read_pixels(of(with_alpha)).tobytes() == palette.convert("RGB").tobytes()
    hidden = image.convert("RGBA")
    hidden.putalpha(0)  # as in transformers' processors, transparency is dropped
    assert read_pixels(of(encoded(hidden))).tobytes() == image.tobytes()
    assert set(np.unique(np.asarray(read_pixels(of(encoded(grey.convert("1"))))))) <= {0, 255}


def test_sixteen_bits_become_eight():
    """Pillow's own conversion cuts all values above 255."""
    wide = np.linspace(0, 65535, 24 * 40).reshape(24, 40).astype(np.uint16)
    data = encoded(Image.fromarray(wide))
    got = np.asarray(read_pixels(of(data)))[..., 0].astype(float)
    assert np.abs(got - wide / 257).max() <= 0.5
    assert (got.min(), got.max()) == (0, 255)


def test_ways_to_name_an_image(tmp_path):
    import base64

    data = encoded(picture(24, 40))
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a b.png"
    path.write_bytes(data)
    folder = tmp_path / "in"
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    for value in (
        *("a b.png", str(path), Path("a b.png"), f"file://{folder}/a%20b.png", uri, data, bytearray(data)),
        *({"bytes": data, "path": None}, {"bytes": None, "path": "a b.png"}, {"bytes": data, "path": "gone"}),
        *({"url": uri}, Image.open(path)),
    ):
        assert read_size(parse_source(0, "image", value, folder)) == (24, 40)
    assert read_size(parse_source(0, "image", str(path), None)) == (24, 40)
    (folder / "link.png").symlink_to(path)
    assert read_size(parse_source(0, "image", "link.png", folder)) == (24, 40)

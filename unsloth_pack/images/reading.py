"""Read images: their size from the header, and their pixels as 8-bit RGB with EXIF orientation applied.

A row names an image as bytes, a path, a data URI, or an image of Pillow.
"""

from __future__ import annotations

import base64
import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

from unsloth_pack.data.rows import KEYS_OF_AN_IMAGE, fail
from unsloth_pack.errors import InputError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")

PART_KEYS = (*KEYS_OF_AN_IMAGE, "image_url")  # of an image in a part of a message
_NETWORK = re.compile(r"(https?|ftp|s3|gs|hf):", re.IGNORECASE)
_NAMED_BYTES = ["bytes", "path"]  # of `datasets.Image`, where the path is only a name
# Formats of pixels alone: Pillow would run programs for others, such as Ghostscript for EPS
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_ORIENTATION = 0x0112  # the EXIF tag
_SIDEWAYS = range(5, 9)  # its values that exchange height and width
_ENDS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9"}  # of complete files
_WIDE_MODES = ("I", "F")  # 32 bits a pixel, with an unknown white level


class UnreadableImage(InputError):
    """An unusable image, whose row `skip_broken_images` skips.

    Every other error means wrong data, such as a path out of the image folder.
    """


@dataclass(frozen=True, eq=False)
class ImageSource:
    """One image of one row, not read yet."""

    index: int  # of the row, for errors
    column: str
    content: bytes | Path | Image  # encoded bytes, a file's path, or an image of Pillow

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raise `UnreadableImage`."""
        content = self.content
        shown = f"{len(content)} bytes" if isinstance(content, bytes) else str(content)
        _refuse(self.index, self.column, problem, shown, remedy)

    def read_file(self, read: Callable[[Path], Result]) -> Result:
        """Return what `read` reads of the image's file; UnreadableImage if it cannot be read."""
        assert isinstance(self.content, Path)
        try:
            return read(self.content)
        except OSError as error:
            self.refuse(f"an image that cannot be read ({error.strerror})", "put it back")


def _refuse(index: int, column: str, problem: str, value: object, remedy: str) -> NoReturn:
    fail(index, column, problem, value, f"{remedy}, or remove the row", UnreadableImage)


def parse_source(index: int, column: str, value: object, folder: Path | None) -> ImageSource:
    """Parse an image in a row. Nothing is read from the network.

    It is bytes, a path below `folder`, a `file:` address, a data URI, an image of Pillow, or an object with
    one of `KEYS_OF_AN_IMAGE`, or with bytes and path, as from `datasets.Image` without decoding.

    Raises:
        UnreadableImage: it is no file, or not base64.
        InputError: it is no image, or its path leads out of the folder, or is relative without one.
    """
    keys: list[str] = []
    if isinstance(value, Mapping):
        keys = [key for key in PART_KEYS if value.get(key) is not None]
        if len(keys) > 1 and keys != _NAMED_BYTES:
            fail(index, column, f"an image under {' and '.join(keys)}", value, "keep one of them")
        value = value[keys[0]] if keys else value
    if isinstance(value, bytes | bytearray):
        return ImageSource(index, column, bytes(value))
    if isinstance(value, require_pillow().Image):
        return ImageSource(index, column, value)
    text = str(value).strip() if isinstance(value, str | os.PathLike) else ""
    if not text:
        remedy = "give a path, bytes or an image of Pillow, or remove the row"
        fail(index, column, "no image", value, remedy)
    if keys == ["base64"] or text.lower().startswith("data:"):
        return ImageSource(index, column, _decode(index, column, text))
    if _NETWORK.match(text):
        remedy = "download the images first, and give their paths"
        fail(index, column, "an image that lies on the network", text, remedy)
    path = unquote(urlsplit(text).path) if text.startswith("file:") else text
    return ImageSource(index, column, _resolve(index, column, path, folder))


def _decode(index: int, column: str, text: str) -> bytes:
    """Decode base64, or a data URI of it."""
    head, _, body = text.rpartition(",")
    try:
        if head and not head.lower().endswith(";base64"):
            raise ValueError("its head names another encoding")
        return base64.b64decode("".join(unquote(body).split()), validate=True)
    except ValueError as error:
        _refuse(index, column, f"an image that is not base64 ({error})", text, "encode the image anew")


def _resolve(index: int, column: str, path: str, folder: Path | None) -> Path:
    """Resolve a path to a file, following links."""
    if folder is None and not os.path.isabs(path):
        fail(index, column, "a relative path", path, "give image_folder, in which the images lie")
    real = Path(os.path.realpath(Path(folder or "", path)))
    if folder is not None and not real.is_relative_to(os.path.realpath(folder)):
        remedy = f"put the image into image_folder, {folder}"
        fail(index, column, "a path that leads out of the image folder", path, remedy)
    if not real.is_file():
        remedy = "put it back, or correct the path or image_folder"
        _refuse(index, column, "a path that is no file", str(real), remedy)
    return real


def require_pillow() -> Any:
    """Return the module `PIL.Image`; InputError without Pillow."""
    try:
        import PIL.Image
    except ImportError:
        raise InputError("images need Pillow, which is not installed; pip install pillow") from None
    return PIL.Image


def read_size(source: ImageSource) -> tuple[int, int]:
    """Read height and width of an image from its header, with EXIF orientation applied.

    A PNG or JPEG without its usual end is decoded too: it may be truncated.

    Raises:
        UnreadableImage: it is no image, of an unsupported format, too large, or truncated.
    """
    with _open(source) as image:
        if (file := getattr(image, "fp", None)) and (end := _ENDS.get(image.format or "")):
            place = file.tell()
            file.seek(-len(end), io.SEEK_END)
            is_cut = file.read() != end
            file.seek(place)
            if is_cut:
                image.load()
        # `getexif` of a PNG would decode all pixels to search after them
        has_exif = image.format != "PNG" or getattr(image, "fp", None) is None or "exif" in image.info
        # Pillow rotates TIFF itself, and reports the rotated size
        is_turned = has_exif and image.format != "TIFF" and image.getexif().get(_ORIENTATION) in _SIDEWAYS
        return image.size if is_turned else image.size[::-1]


def read_pixels(source: ImageSource) -> Image:
    """Decode an image to RGB with EXIF orientation applied; the first frame of an animation.

    Transparency is dropped, as in transformers' processors. Sixteen bits become eight.

    Raises:
        UnreadableImage: as for `read_size`, or the file is truncated or broken.
    """
    from PIL import ImageOps

    with _open(source) as opened:
        opened.load()
        image = ImageOps.exif_transpose(opened)
        if image.mode in _WIDE_MODES:
            source.refuse(f"an image of mode {image.mode}, with 32 bits a pixel", "save it with 8 bits")
        if image.mode.startswith("I;16"):
            import numpy as np

            # Pillow would clip all values above 255
            eight_bits = (np.asarray(image).astype(np.uint32) + 128) // 257
            image = require_pillow().fromarray(eight_bits.astype(np.uint8))
        return image.convert("RGB")


@contextmanager
def _open(source: ImageSource) -> Iterator[Image]:
    """Open an image; its errors become `UnreadableImage`."""
    pillow, content = require_pillow(), source.content
    try:
        if not isinstance(content, bytes | Path):
            yield content
            return
        pillow.init()
        formats = [name for name in _FORMATS if name in pillow.OPEN]  # some builds of Pillow lack one
        file = io.BytesIO(content) if isinstance(content, bytes) else content
        with pillow.open(file, formats=formats) as image:
            if math.prod(image.size) > (pillow.MAX_IMAGE_PIXELS or math.inf):
                raise pillow.DecompressionBombError(f"{image.width} by {image.height} pixels")
            yield image
    except InputError:
        raise
    except pillow.UnidentifiedImageError:
        source.refuse("no image of a known format", f"save it as one of {', '.join(_FORMATS)}")
    except (pillow.DecompressionBombError, MemoryError) as error:
        remedy = "make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
        source.refuse(f"an image that is too large ({first_line(error)})", remedy)
    except Exception as error:
        source.refuse(f"an image that cannot be read ({first_line(error)[:200]})", "replace it")

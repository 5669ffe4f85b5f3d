"""Read images: their size from the header, and their pixels as 8-bit RGB with EXIF orientation applied.

A row names an image as bytes, a path, a data URI, or an image of Pillow.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from unsloth_pack.data.rows import KEYS_OF_AN_IMAGE, fail
from unsloth_pack.errors import InputError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: `C:` is a drive
PART_KEYS = (*KEYS_OF_AN_IMAGE, "image_url")  # of an image in a part of a message
_NAMED_BYTES = ["bytes", "path"]  # of `datasets.Image`, where the path is only a name
# Formats of pixels alone: Pillow would run programs for others, such as Ghostscript for EPS
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_ORIENTATION = 0x0112  # the EXIF tag
_SIDEWAYS = range(5, 9)  # its values that exchange height and width
_ENDS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9"}  # of complete files
_WIDE_MODES = ("I", "F")  # 32 bits a pixel, with an unknown white level
# Pillow's errors on truncated or broken files
_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError),
    *(ArithmeticError, AttributeError, RecursionError, struct.error),
)


@dataclass(frozen=True, eq=False)
class ImageSource:
    """One image of one row, not read yet.

    Args:
        index, column: of the row, for errors.
        content: encoded bytes, a file's path, or an image of Pillow.
    """

    index: int
    column: str
    content: bytes | Path | Image

    @property
    def shown(self) -> str:
        """The image's name in errors."""
        if isinstance(self.content, bytes):
            return f"{len(self.content)} bytes"
        return str(self.content) if isinstance(self.content, Path) else repr(self.content)


class UnreadableImage(InputError):
    """An unusable image, whose row `skip_broken_images` skips.

    Every other error means wrong data, such as a path out of the image folder.
    """


def refuse_image(index: int, column: str, problem: str, value: Any, remedy: str) -> NoReturn:
    """Raise `UnreadableImage` for row `index`, with the value shortened."""
    try:
        fail(index, column, problem, value, f"{remedy}, or remove the row")
    except InputError as error:
        raise UnreadableImage(str(error)) from None


def refuse_lost(source: ImageSource, error: OSError) -> NoReturn:
    """Raise `UnreadableImage` for an unreadable file."""
    problem = f"an image that cannot be read ({error.strerror})"
    refuse_image(source.index, source.column, problem, source.shown, "put it back")


def stat_file(source: ImageSource, path: Path) -> os.stat_result:
    """Return the stat of an image's file; UnreadableImage if it is gone."""
    try:
        return path.stat()
    except OSError as error:
        refuse_lost(source, error)


def parse_source(index: int, column: str, value: Any, folder: Path | None) -> ImageSource:
    """Parse an image in a row. Nothing is read from the network.

    Args:
        value: bytes, a path, a `file:` address, a data URI, an image of Pillow, or an object with one of
            `KEYS_OF_AN_IMAGE`, or with bytes and path, as from `datasets.Image` without decoding.
        folder: the root of relative paths. No path may lead out of it.

    Raises:
        InputError: names the row and the column.
    """
    if isinstance(value, Mapping):
        value = _from_mapping(index, column, value)
    if isinstance(value, bytes | bytearray | memoryview):
        content: Any = bytes(value)
    elif _is_pillow(value):
        content = value
    elif isinstance(value, str) and value.strip():
        content = _from_text(index, column, value.strip(), folder)
    elif isinstance(value, os.PathLike):
        content = resolve_file(index, column, os.fspath(value), folder)
    else:
        fail(index, column, "no image", value, "give a path, bytes or an image of Pillow, or remove the row")
    if content == b"":
        refuse_image(index, column, "an image of 0 bytes", value, "replace it")
    return ImageSource(index, column, content)


def _from_mapping(index: int, column: str, value: Mapping[str, Any]) -> Any:
    keys = [key for key in PART_KEYS if value.get(key) is not None]
    if len(keys) > 1 and keys != _NAMED_BYTES:
        fail(index, column, f"an image under {' and '.join(keys)}", dict(value), "keep one of them")
    image = value[keys[0]] if keys else None
    if image is None or isinstance(image, Mapping):
        remedy = f"give one of {', '.join(KEYS_OF_AN_IMAGE)}, or remove the row"
        fail(index, column, "no image", dict(value), remedy)
    if keys == ["base64"] and isinstance(image, str) and not image.lstrip().lower().startswith("data:"):
        return _decode_base64(index, column, image, "an image under base64 that is not base64")
    return image


def _is_pillow(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # loaded, if there is an image of Pillow
    return pillow is not None and isinstance(value, pillow.Image)


def _from_text(index: int, column: str, text: str, folder: Path | None) -> bytes | Path:
    scheme = _SCHEME.match(text)
    match scheme[1].lower() if scheme else "":
        case "data":
            return _decode_data_uri(index, column, text)
        case "file":
            return resolve_file(index, column, _parse_file_uri(index, column, text), folder)
        case "http" | "https" | "ftp" | "s3" | "gs" | "hf":
            remedy = "download the images first, and give their paths"
            fail(index, column, "an image that lies on the network", text, remedy)
    return resolve_file(index, column, text, folder)


def _decode_data_uri(index: int, column: str, text: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        refuse_image(index, column, "a data URI without a comma", text, "write data:image/png;base64,...")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    return _decode_base64(index, column, unquote(body), "a data URI that is not base64")


def _decode_base64(index: int, column: str, text: str, problem: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        refuse_image(index, column, f"{problem} ({error})", text, "encode the image anew")


def _parse_file_uri(index: int, column: str, text: str) -> str:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        fail(index, column, "a file of another host", text, "write file:///path, or the path alone")
    return unquote(parts.path)


def resolve_file(index: int, column: str, path: str, folder: Path | None) -> Path:
    """Resolve a path to a file, following links.

    Args:
        folder: the root of relative paths; no path may lead out of it.

    Raises:
        UnreadableImage: it is no file, or missing.
        InputError: the path leads out of the folder, or is relative without one.
    """
    if folder is None and not os.path.isabs(path):
        fail(index, column, "a relative path", path, "give image_folder, in which the images lie")
    whole = Path(folder, path) if folder is not None else Path(path)
    try:
        real = Path(os.path.realpath(whole))
        is_inside = folder is None or real.is_relative_to(os.path.realpath(folder))
        mode = os.stat(real).st_mode if is_inside else None
    except (OSError, ValueError) as error:  # a null byte is a ValueError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = "put it back, correct the path" + ("" if folder is None else " or image_folder")
        refuse_image(index, column, f"an image that cannot be read ({reason})", str(whole), remedy)
    if mode is None:
        remedy = f"put the image into image_folder, {folder}"
        fail(index, column, "a path that leads out of the image folder", path, remedy)
    if not stat.S_ISREG(mode):
        refuse_image(index, column, "a path that is no file", str(whole), "name the file of an image")
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

    def read(image: Image) -> tuple[int, int]:
        if _may_be_truncated(image):
            image.load()
        width, height = image.size
        # Pillow rotates TIFF itself, and reports the rotated size
        is_sideways = image.format != "TIFF" and _read_orientation(image) in _SIDEWAYS
        return (width, height) if is_sideways else (height, width)

    return _open(source, read)


def read_pixels(source: ImageSource) -> Image:
    """Decode an image to RGB with EXIF orientation applied; the first frame of an animation.

    Transparency is dropped, as in transformers' processors. Sixteen bits become eight.

    Raises:
        UnreadableImage: as for `read_size`, or the file is truncated or broken.
    """
    from PIL import ImageOps

    def decode(image: Image) -> Image:
        image.load()
        return _to_rgb(source, ImageOps.exif_transpose(image))

    return _open(source, decode)


def _to_rgb(source: ImageSource, image: Image) -> Image:
    if image.mode in _WIDE_MODES:
        _refuse(source, f"an image of mode {image.mode}, with 32 bits a pixel", "save it with 8 bits")
    if image.mode.startswith("I;16"):
        import numpy as np

        # Pillow would clip all values above 255
        eight_bits = (np.asarray(image).astype(np.uint32) + 128) // 257
        return require_pillow().fromarray(eight_bits.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _may_be_truncated(image: Image) -> bool:
    end, file = _ENDS.get(image.format or ""), getattr(image, "fp", None)
    if end is None or file is None:
        return False
    place = file.tell()
    try:
        file.seek(-len(end), io.SEEK_END)
        return bool(file.read() != end)
    finally:
        file.seek(place)


def _read_orientation(image: Image) -> int:
    file = getattr(image, "fp", None)  # None if the pixels are decoded already
    if image.format == "PNG" and file is not None and "exif" not in image.info and not _has_late_chunks(file):
        return 1  # `getexif` would decode all pixels to search after them
    return image.getexif().get(_ORIENTATION, 1)


def _has_late_chunks(file: Any) -> bool:
    """True if a PNG has an `eXIf` or a text, which may hold EXIF too, after its pixels."""
    place, has_pixels = file.tell(), False
    try:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            has_pixels = has_pixels or name == b"IDAT"
            if has_pixels and name in (b"eXIf", b"iTXt", b"zTXt", b"tEXt"):
                return True
            file.seek(length + 4, io.SEEK_CUR)
        return False
    finally:
        file.seek(place)


def _open(source: ImageSource, work: Callable[[Image], Result]) -> Result:
    """Open the image and call `work` with it."""
    pillow = require_pillow()
    content = source.content
    if not isinstance(content, bytes | Path):
        _check_pixels(source, content)
        return _guard(source, lambda: work(content))

    def run() -> Result:
        file = io.BytesIO(content) if isinstance(content, bytes) else content
        pillow.init()
        formats = [name for name in _FORMATS if name in pillow.OPEN]  # some builds of Pillow lack one
        with _quietly(), pillow.open(file, formats=formats) as image:
            _check_pixels(source, image)
            return work(image)

    return _guard(source, run)


def _guard(source: ImageSource, work: Callable[[], Result]) -> Result:
    """Call `work` and turn its errors into `UnreadableImage`."""
    from PIL import Image, UnidentifiedImageError

    try:
        return work()
    except InputError:
        raise
    except UnidentifiedImageError:
        _refuse(source, "no image of a known format", f"save it as one of {', '.join(_FORMATS)}")
    except Image.DecompressionBombError as error:
        _refuse_bomb(source, first_line(error))
    except MemoryError:
        _refuse_bomb(source, "its pixels do not fit into memory")
    except _UNREADABLE as error:
        _refuse(source, f"an image that cannot be read ({first_line(error)[:200]})", "replace it")


def _check_pixels(source: ImageSource, image: Image) -> None:
    """Refuse a file that would take too much memory, before it is decoded."""
    most = require_pillow().MAX_IMAGE_PIXELS
    width, height = image.size
    if width < 1 or height < 1:
        _refuse(source, f"an image of {width} by {height} pixels", "replace it")
    if most is not None and width * height > most:
        _refuse_bomb(source, f"{width} by {height} pixels, above the limit of {most}")


def _refuse_bomb(source: ImageSource, why: str) -> NoReturn:
    remedy = "make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
    _refuse(source, f"an image that is too large ({why})", remedy)


def _refuse(source: ImageSource, problem: str, remedy: str) -> NoReturn:
    refuse_image(source.index, source.column, problem, source.shown, remedy)


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress Pillow's warnings about large or odd files, in the main thread only.

    The filters are global: threads would reset each other's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

"""Images read: their size from the header alone, and their pixels as 8-bit RGB, the right way up."""

from __future__ import annotations

import io
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from unsloth_pack.errors import InputError, first_line
from unsloth_pack.images.sources import ImageSource, refuse_image

if TYPE_CHECKING:
    from PIL.Image import Image

Result = TypeVar("Result")

# Formats of pixels alone: Pillow would run programs for others, such as Ghostscript for EPS
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_ORIENTATION = 0x0112  # the EXIF tag
_SIDEWAYS = range(5, 9)  # its values that exchange height and width
_ENDS = {"PNG": b"IEND\xaeB`\x82", "JPEG": b"\xff\xd9"}  # of files that are whole, with nothing behind
_WIDE_MODES = ("I", "F")  # 32 bits a pixel, whose white is nowhere said
# What Pillow raises over files that are cut or broken
_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError),
    *(ArithmeticError, AttributeError, RecursionError, struct.error),
)


def require_pillow() -> Any:
    """The module `PIL.Image`.

    Raises:
        InputError: Pillow is not installed.
    """
    try:
        import PIL.Image
    except ImportError:
        raise InputError("images need Pillow, which is not installed; pip install pillow") from None
    return PIL.Image


def size_of(source: ImageSource) -> tuple[int, int]:
    """Height and width of an image as it is seen, from its header.

    A PNG or JPEG that does not end as such files do is decoded too: it is cut, or has something behind.

    Raises:
        UnreadableImage: it is no image, of a format that is not taken, has too many pixels, or is cut.
    """

    def seen(image: Image) -> tuple[int, int]:
        if _may_be_cut(image):
            image.load()
        width, height = image.size
        # Pillow turns TIFF itself, and gives its size as it will be
        is_sideways = image.format != "TIFF" and _orientation(image) in _SIDEWAYS
        return (width, height) if is_sideways else (height, width)

    return _with_image(source, seen)


def pixels_of(source: ImageSource) -> Image:
    """An image in RGB, turned as its EXIF tag says: of an animation the first frame, without transparency.

    Transparency is dropped, as transformers' processors drop it. Sixteen bits become eight.

    Raises:
        UnreadableImage: as `size_of`, and where the file is cut or broken.
    """
    from PIL import ImageOps

    def decoded(image: Image) -> Image:
        image.load()
        return _in_rgb(source, ImageOps.exif_transpose(image))

    return _with_image(source, decoded)


def _in_rgb(source: ImageSource, image: Image) -> Image:
    if image.mode in _WIDE_MODES:
        _refuse(source, f"an image of mode {image.mode}, with 32 bits a pixel", "save it with 8 bits")
    if image.mode.startswith("I;16"):
        import numpy as np

        # Pillow would cut all values above 255
        eight_bits = (np.asarray(image).astype(np.uint32) + 128) // 257
        return require_pillow().fromarray(eight_bits.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _may_be_cut(image: Image) -> bool:
    end, file = _ENDS.get(image.format or ""), getattr(image, "fp", None)
    if end is None or file is None:
        return False
    place = file.tell()
    try:
        file.seek(-len(end), io.SEEK_END)
        return bool(file.read() != end)
    finally:
        file.seek(place)


def _orientation(image: Image) -> int:
    file = getattr(image, "fp", None)  # None if the pixels are decoded already
    if image.format == "PNG" and file is not None and "exif" not in image.info and not _has_late_chunks(file):
        return 1  # `getexif` would decode all pixels to look behind them
    return image.getexif().get(_ORIENTATION, 1)


def _has_late_chunks(file: Any) -> bool:
    """Whether a PNG has an `eXIf` or a text, which may hold EXIF too, behind its pixels."""
    return any(name in (b"eXIf", b"iTXt", b"zTXt", b"tEXt") for name in _chunks_behind_pixels(file))


def _chunks_behind_pixels(file: Any) -> Iterator[bytes]:
    place = file.tell()
    try:
        file.seek(8)
        is_behind = False
        while len(head := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", head)
            is_behind = is_behind or name == b"IDAT"
            if is_behind:
                yield name
            file.seek(length + 4, io.SEEK_CUR)
    finally:
        file.seek(place)


def _with_image(source: ImageSource, work: Callable[[Image], Result]) -> Result:
    """What `work` makes of the opened image."""
    pillow = require_pillow()
    content = source.content
    if not isinstance(content, bytes | Path):
        _check_pixels(source, content)
        return _tried(source, lambda: work(content))

    def opened() -> Result:
        file = io.BytesIO(content) if isinstance(content, bytes) else content
        pillow.init()
        formats = [name for name in _FORMATS if name in pillow.OPEN]  # some builds of Pillow lack one
        with _quietly(), pillow.open(file, formats=formats) as image:
            _check_pixels(source, image)
            return work(image)

    return _tried(source, opened)


def _tried(source: ImageSource, work: Callable[[], Result]) -> Result:
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
    """Refuse a file that would take much memory, before it is decoded."""
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
    """Without Pillow's warnings about large or odd files: large ones are refused here.

    Warnings are switched off for the whole process, and threads would switch each other's on and off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

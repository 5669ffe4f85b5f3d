"""Where the bytes of one image come from, as a row names it: bytes, a path, a data URI, or a Pillow image."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from unsloth_pack.data.fields import KEYS_OF_AN_IMAGE
from unsloth_pack.data.refusals import fail
from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # two letters at least: `C:` is a drive
OF_PARTS = (*KEYS_OF_AN_IMAGE, "image_url")  # one of which holds the image, in a part of a message
_NAMED_BYTES = ["bytes", "path"]  # of `datasets.Image`: the path is a name alone


@dataclass(frozen=True, eq=False)
class ImageSource:
    """One image of one row, not read yet.

    Args:
        index, column: of the row, by which errors name it.
        content: encoded bytes, the path of a file, or an image of Pillow.
    """

    index: int
    column: str
    content: bytes | Path | Image

    @property
    def shown(self) -> str:
        """The image in an error."""
        if isinstance(self.content, bytes):
            return f"{len(self.content)} bytes"
        return str(self.content) if isinstance(self.content, Path) else repr(self.content)


class UnreadableImage(InputError):
    """One image that cannot be used: `skip_broken_images` leaves out its row.

    Every other error means that the data is wrong in itself, such as a path out of the image folder.
    """


def refuse_image(index: int, column: str, problem: str, value: Any, remedy: str) -> NoReturn:
    """Raise the `UnreadableImage` for row `index`, with the value shortened."""
    try:
        fail(index, column, problem, value, f"{remedy}, or remove the row")
    except InputError as error:
        raise UnreadableImage(str(error)) from None


def refuse_lost(source: ImageSource, error: OSError) -> NoReturn:
    """Raise the `UnreadableImage` for an image whose file cannot be read."""
    problem = f"an image that cannot be read ({error.strerror})"
    refuse_image(source.index, source.column, problem, source.shown, "put it back")


def stat_of(source: ImageSource, path: Path) -> os.stat_result:
    """What the file system says of the file of an image.

    Raises:
        UnreadableImage: it is gone.
    """
    try:
        return path.stat()
    except OSError as error:
        refuse_lost(source, error)


def source_of(index: int, column: str, value: Any, folder: Path | None) -> ImageSource:
    """The image that a value of a row names.

    Args:
        value: bytes, a path, a `file:` address, a data URI, an image of Pillow, or an object with one of
            `KEYS_OF_AN_IMAGE`, or with bytes and path, as `datasets.Image` gives when it does not decode.
        folder: where relative paths begin. No path may lead out of it.

    Raises:
        InputError: names the row and the column. Nothing is read from the network.
    """
    if isinstance(value, Mapping):
        value = _of_mapping(index, column, value)
    if isinstance(value, bytes | bytearray | memoryview):
        content: Any = bytes(value)
    elif _is_pillow(value):
        content = value
    elif isinstance(value, str) and value.strip():
        content = _of_text(index, column, value.strip(), folder)
    elif isinstance(value, os.PathLike):
        content = file_of(index, column, os.fspath(value), folder)
    else:
        fail(index, column, "no image", value, "give a path, bytes or an image of Pillow, or remove the row")
    if content == b"":
        refuse_image(index, column, "an image of 0 bytes", value, "replace it")
    return ImageSource(index, column, content)


def _of_mapping(index: int, column: str, value: Mapping[str, Any]) -> Any:
    keys = [key for key in OF_PARTS if value.get(key) is not None]
    if len(keys) > 1 and keys != _NAMED_BYTES:
        fail(index, column, f"an image under {' and '.join(keys)}", dict(value), "keep one of them")
    given = value[keys[0]] if keys else None
    if given is None or isinstance(given, Mapping):
        fail(
            index,
            column,
            "no image",
            dict(value),
            f"give one of {', '.join(KEYS_OF_AN_IMAGE)}, or remove the row",
        )
    if keys == ["base64"] and isinstance(given, str) and not given.lstrip().lower().startswith("data:"):
        return _of_base64(index, column, given, "an image under base64 that is not base64")
    return given


def _is_pillow(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # an image of Pillow cannot be there without it
    return pillow is not None and isinstance(value, pillow.Image)


def _of_text(index: int, column: str, text: str, folder: Path | None) -> bytes | Path:
    scheme = _SCHEME.match(text)
    match scheme[1].lower() if scheme else "":
        case "data":
            return _of_data_uri(index, column, text)
        case "file":
            return file_of(index, column, _of_file_uri(index, column, text), folder)
        case "http" | "https" | "ftp" | "s3" | "gs" | "hf":
            remedy = "download the images first, and give their paths"
            fail(index, column, "an image that lies on the network", text, remedy)
    return file_of(index, column, text, folder)


def _of_data_uri(index: int, column: str, text: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        refuse_image(index, column, "a data URI without a comma", text, "write data:image/png;base64,...")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    return _of_base64(index, column, unquote(body), "a data URI that is not base64")


def _of_base64(index: int, column: str, text: str, problem: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        refuse_image(index, column, f"{problem} ({error})", text, "encode the image anew")


def _of_file_uri(index: int, column: str, text: str) -> str:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        fail(index, column, "a file of another host", text, "write file:///path, or the path alone")
    return unquote(parts.path)


def file_of(index: int, column: str, path: str, folder: Path | None) -> Path:
    """The file that a path leads to, links followed.

    Args:
        folder: where relative paths begin, and out of which none may lead.

    Raises:
        UnreadableImage: it is no file, or not there.
        InputError: the path leads out of the folder, or is relative without one.
    """
    if folder is None and not os.path.isabs(path):
        fail(index, column, "a relative path", path, "give image_folder, in which the images lie")
    whole = Path(folder, path) if folder is not None else Path(path)
    try:
        real = Path(os.path.realpath(whole))
        mode = os.stat(real).st_mode if folder is None or _is_inside(real, folder) else None
    except (OSError, ValueError) as error:  # a null byte is a ValueError
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        remedy = "put it back, correct the path" + ("" if folder is None else " or image_folder")
        refuse_image(index, column, f"an image that cannot be read ({said})", str(whole), remedy)
    if mode is None:
        remedy = f"put the image into image_folder, {folder}"
        fail(index, column, "a path that leads out of the image folder", path, remedy)
    if not stat.S_ISREG(mode):
        refuse_image(index, column, "a path that is no file", str(whole), "name the file of an image")
    return real


def _is_inside(real: Path, folder: Path) -> bool:
    return real.is_relative_to(os.path.realpath(folder))

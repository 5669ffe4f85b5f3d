"""Images in the columns of documents and of packed rows: what a loader's worker needs to decode them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.data.image_columns import image_field
from unsloth_pack.data.kept import digest
from unsloth_pack.images.documents import PlacedImage
from unsloth_pack.images.sources import ImageSource, file_of, refuse_image, refuse_lost, stat_of

if TYPE_CHECKING:
    import pyarrow as pa


def image_document_schema() -> pa.Schema:
    """The types of tokenised rows with images."""
    from unsloth_pack.data.tokenize import document_schema

    return document_schema().append(image_field())


def stored(image: PlacedImage, folder: Path | None, *, keep_bytes: bool = False) -> dict[str, Any]:
    """An image as a row holds it.

    Args:
        folder: where its path begins.
        keep_bytes: store what its file holds, instead of its path.

    Raises:
        UnreadableImage: its file cannot be read.
    """
    content = image.source.content
    if keep_bytes and isinstance(content, Path):
        content = _bytes_of(image.source, content)
    found: dict[str, Any] = {
        "height": image.height,
        "width": image.width,
        "tokens": image.cut.tokens,
        "most_pixels": image.most_pixels,
        "row": image.source.index,
        "column": image.source.column,
    }
    if isinstance(content, Path):
        about = stat_of(image.source, content)
        path = os.fspath(content)
        path = path if folder is None else os.path.relpath(path, os.path.realpath(folder))
        found |= {"path": path, "size": about.st_size, "mtime_ns": about.st_mtime_ns}
        return found | {"sha256": _sha256_of(image.source, content)}
    if not isinstance(content, bytes):
        raise TypeError(f"an image of Pillow, {content!r}, came out of a data set that does not decode")
    return found | {"bytes": content, "sha256": hashlib.sha256(content).hexdigest()}


def source_of_stored(image: Mapping[str, Any], folder: Path | None) -> ImageSource:
    """Where the image of a row comes from.

    Args:
        folder: where its path begins, and out of which it may not lead.

    Raises:
        UnreadableImage: its file is gone, or it is not what it was when the row was made.
        InputError: its path leads out of the folder, or is relative without one.
    """
    row, column = image["row"], image["column"]
    if image["bytes"] is not None:
        source = ImageSource(row, column, image["bytes"])
        said = image.get("sha256")
        if said is not None and hashlib.sha256(image["bytes"]).hexdigest() != said:
            problem = "an image that has changed since it was prepared (its SHA-256 is another)"
            refuse_image(row, column, problem, source.shown, "prepare it anew")
        return source
    path = file_of(row, column, image["path"], folder)
    source = ImageSource(row, column, path)
    about = stat_of(source, path)
    is_same = about.st_size == image["size"] and (
        about.st_mtime_ns == image["mtime_ns"] or _sha256_of(source, path) == image.get("sha256")
    )
    if not is_same:
        problem = "an image that has changed since it was prepared"
        refuse_image(row, column, problem, str(path), "prepare it anew")
    return source


def _sha256_of(source: ImageSource, path: Path) -> str:
    try:
        return digest(path)
    except OSError as error:
        refuse_lost(source, error)


def _bytes_of(source: ImageSource, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        refuse_lost(source, error)

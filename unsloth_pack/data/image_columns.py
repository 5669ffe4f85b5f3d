"""The column of documents and of packed rows that holds their images, as Arrow has it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES = "images"  # a list of objects, one for each image
DOCUMENT = "document"  # of an image in a packed row: the number of its document in the row
# A hash stands for the bytes, a copy of a file is the same image, and the last two are for errors
_NOT_HASHED = {"bytes", "path", "size", "mtime_ns", "row", "column"}


def image_type(is_packed: bool = False) -> pa.DataType:
    """The Arrow type of an image.

    path: of its file, below the image folder where there is one. size, mtime_ns: of that file.
    bytes: the encoded image, where it is no file. sha256: of the encoded image.
    height, width: in pixels, as it is seen. tokens: that it takes. most_pixels: to which it is shrunk.
    row, column: in the data, for errors.

    Args:
        is_packed: whether it is in a packed row, and so in one of several documents.
    """
    import pyarrow as pa

    fields: dict[str, pa.DataType] = {DOCUMENT: pa.int32()} if is_packed else {}
    fields |= {"path": pa.string(), "size": pa.int64(), "mtime_ns": pa.int64()}
    fields |= {"bytes": pa.large_binary(), "sha256": pa.string()}
    fields |= {"height": pa.int32(), "width": pa.int32(), "tokens": pa.int32(), "most_pixels": pa.int64()}
    return pa.struct(fields | {"row": pa.int64(), "column": pa.string()})


def image_field(is_packed: bool = False) -> pa.Field:
    """The column of images."""
    import pyarrow as pa

    return pa.field(IMAGES, pa.list_(image_type(is_packed)))


def update_with_images(digest: Any, column: pa.Array | pa.ChunkedArray) -> None:
    """Feed a column of images to a hash: how many each row has, and all that their pixels depend on."""
    array = column.combine_chunks() if hasattr(column, "chunks") else column
    digest.update(array.value_lengths().to_numpy())
    images = array.flatten()
    for name, values in zip(images.type.names, images.flatten(), strict=True):
        if name not in _NOT_HASHED:
            digest.update(json.dumps([name, *values.to_pylist()]).encode())

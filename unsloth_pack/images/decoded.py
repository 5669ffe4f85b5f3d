"""An image of a document, decoded as its header said, or grey in the place of one that cannot be."""

from __future__ import annotations

from typing import Any

from unsloth_pack.images.maker import ImageMaker
from unsloth_pack.images.sources import ImageSource, UnreadableImage

_GREY = (128, 128, 128)


def decoded(
    make: ImageMaker[Any],
    source: ImageSource,
    size: tuple[int, int],
    most_pixels: int | None,
    of_document: int,
) -> Any:
    """What `make` makes of an image.

    Args:
        size: height and width in pixels, as its header said.
        most_pixels, of_document: as its tokens were counted, see `ImageMaker.cut`.

    Raises:
        UnreadableImage: the image cannot be read, or has another size.
    """
    made = make(source, most_pixels, of_document)
    found, said = make.cut_of(made), make.cut(source, size, most_pixels, of_document)
    if found != said:
        raise UnreadableImage(
            f"row {source.index}, column {source.column!r}: {source.shown} has {found.tokens} tokens, and "
            f"its header said {said.tokens}; let nothing change it, or remove the row"
        )
    return made


def grey(make: ImageMaker[Any], height: int, width: int, most_pixels: int | None, of_document: int) -> Any:
    """What `make` makes of a grey image of this size, in pixels."""
    from PIL import Image

    source = ImageSource(0, "", Image.new("RGB", (width, height), _GREY))
    return make(source, most_pixels, of_document)

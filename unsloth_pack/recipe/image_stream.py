"""Rows with images in a stream, and rows of text for a model that takes images."""

from collections.abc import Callable

from datasets import Dataset
from pyarrow import Table

from unsloth_pack.data.tokenize import SpanMaker
from unsloth_pack.images.prepared import (
    ImageDocumentMaker,
    holds_images,
    image_document_schema,
    without_images,
)
from unsloth_pack.images.tokens import ImageTokenIds
from unsloth_pack.recipe.image_data import ImagePreparation, refuse_image_tokens


class PreparedStream:
    """Makes documents of rows with images, as `data.streamed.StreamedImages` says.

    Args:
        images: how they are prepared.
        max_length: tokens of the longest document.
        responses_only: only answers count in the loss.

    Raises:
        InputError: images are to be shrunk, and the model's cannot.
    """

    def __init__(self, images: ImagePreparation, max_length: int, responses_only: bool):
        self.schema = image_document_schema()
        self._images, self._max_length = images, max_length
        self._encode = images.encoder(max_length, responses_only)

    def are_in(self, rows: Dataset) -> bool:
        return holds_images(rows)

    def maker(self, rows: Dataset, numbers: range) -> SpanMaker:
        return ImageDocumentMaker(rows, self._encode, self._max_length, self._images.folder, numbers=numbers)

    def unused_columns(self, rows: Dataset) -> tuple[str, ...]:
        return self._images.unused_columns(rows)

    def beside(self, table: Table) -> Table:
        return without_images(Dataset(table)).data.table.cast(self.schema)


def refusing(token_ids: ImageTokenIds) -> Callable[[Table, str], None]:
    """What refuses documents of text that hold tokens of images, as `data.streamed` calls it."""

    def check(table: Table, what: str) -> None:
        refuse_image_tokens(Dataset(table), token_ids, what, "take it out of the text")

    return check

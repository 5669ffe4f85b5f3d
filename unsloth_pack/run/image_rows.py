"""The images of a run: whether its rows have some, how they are prepared, and what is checked of them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from pyarrow import Table
from transformers import PreTrainedTokenizerBase

from unsloth_pack.checkpoints.loading import find_model, load_config
from unsloth_pack.config.options import ImageOptions
from unsloth_pack.data.cache import scan
from unsloth_pack.data.rows import IMAGES
from unsloth_pack.data.tokenize import SpanMaker
from unsloth_pack.errors import InputError
from unsloth_pack.images.prepared import (
    ImageDocumentMaker,
    holds_images,
    image_document_schema,
    source_from_record,
    without_images,
)
from unsloth_pack.images.processor import VisionProcessor, find_processor_folder
from unsloth_pack.images.reading import UnreadableImage
from unsloth_pack.images.tokens import IMAGE_TOKENS, ImageTokenIds
from unsloth_pack.packing import PackManifest
from unsloth_pack.run.images import (
    ImagePreparation,
    image_preparation,
    preparation_of,
    preparation_of_packs,
    refuse_image_tokens,
)

_BATCH = 1000  # rows whose images are looked at at a time
_OF_A_FILE = ("path", "size", "mtime_ns", "sha256", "row", "column")


def images_of_run(
    model_name: str,
    tokenizer: PreTrainedTokenizerBase,
    options: ImageOptions,
    rows: Sequence[Dataset],
    packs: Mapping[Path, PackManifest],
    is_stream: bool,
) -> ImagePreparation | None:
    """How the images of all data sets, or of packs, are prepared; None where there are none."""
    images = preparation_of_packs(model_name, tokenizer, options, packs)
    if images is None or any(map(holds_images, rows)):
        settings = options if images is None else images.options
        is_said = is_stream and options.image_folder is not None
        images = image_preparation(model_name, tokenizer, settings, rows, are_expected=is_said)
    return images


def saved_with_model(
    tokenizer: PreTrainedTokenizerBase,
    images: ImagePreparation | None,
    options: ImageOptions,
    init_adapter: str | None,
) -> PreTrainedTokenizerBase | VisionProcessor:
    """The processor of a run on images, else the tokenizer, to save beside the model.

    A run on text that begins with an adapter keeps the processor of that adapter.
    """
    if images is None and init_adapter is not None and find_processor_folder(init_adapter) == init_adapter:
        config = load_config(find_model(init_adapter)[0])
        if config.model_type in IMAGE_TOKENS:
            images = preparation_of(init_adapter, config, tokenizer, options)
    return tokenizer if images is None else images.processor


def check_files_of_packs(packs: Path, rows: Dataset, images: ImagePreparation) -> None:
    """Refuse packs whose images are files that the image folder does not hold as they were packed.

    Where broken images are skipped, files may be missing or changed.
    """
    for table in scan(rows, [IMAGES], _BATCH):
        for image in _files_in(table):
            try:
                source_from_record(image, images.folder)
            except InputError as error:
                if not (isinstance(error, UnreadableImage) and images.options.skip_broken_images):
                    raise InputError(f"{packs}: {error}") from None


def _files_in(table: Table) -> list[dict[str, Any]]:
    """The images of rows that are files, each file once."""
    files: dict[str, dict[str, Any]] = {}
    for chunk in table[IMAGES].chunks:
        images = chunk.flatten()
        images = images.filter(images.field("path").is_valid())
        columns = (images.field(name).to_pylist() for name in _OF_A_FILE)
        for values in zip(*columns, strict=True):
            files[values[0]] = {"bytes": None, **dict(zip(_OF_A_FILE, values, strict=True))}
    return [*files.values()]


# Rows with images in a stream, and rows of text for a model that takes images.


class StreamedImageRows:
    """Makes documents of rows with images, see `data.streaming.StreamedImages`."""

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


def check_of_text(token_ids: ImageTokenIds) -> Callable[[Table, str], None]:
    """Make a check that refuses documents of text that hold tokens of images."""

    def check(table: Table, what: str) -> None:
        refuse_image_tokens(Dataset(table), token_ids, what, "take it out of the text")

    return check

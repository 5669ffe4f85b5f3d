"""The images of a run: whether its rows have some, how they are prepared, and what is checked of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from pyarrow import Table
from transformers import PreTrainedTokenizerBase

from unsloth_pack.checkpoints.loading import find_model, load_config
from unsloth_pack.config.options import ImageOptions
from unsloth_pack.data.cache import scan
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.data.rows import IMAGES
from unsloth_pack.data.streaming import Place, Share
from unsloth_pack.data.tokenize import SpanMaker
from unsloth_pack.errors import InputError, raise_together
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
    takes_images,
)
from unsloth_pack.run.validate import image_options_left_out
from unsloth_pack.training.image_rows import COLUMN, ImageRowCollator
from unsloth_pack.training.streaming import RowStream

_BATCH = 1000  # rows whose images are looked at at a time
_FIRST_DOCUMENTS = 1000  # of a stream, one of which has to have images that can be decoded
_OF_A_FILE = ("path", "size", "mtime_ns", "sha256", "row", "column")


def images_of_run(
    model_name: str,
    tokenizer: PreTrainedTokenizerBase,
    options: ImageOptions,
    rows: Sequence[Dataset],
    packs: Mapping[Path, PackManifest],
    is_stream: bool,
) -> ImagePreparation | None:
    """How the images of all data sets are prepared; None where there are none.

    Args:
        model_name: of a model, or an adapter, which has the limits of pixels that it was trained with.
        rows: of the data sets; the first ones of those that stream.
        packs: the folders of packed rows.

    Raises:
        InputError: they cannot be prepared; or options of images are given and there are none.
    """
    images = preparation_of_packs(model_name, tokenizer, options, packs)
    if images is None or any(map(holds_images, rows)):
        settings = options if images is None else images.options
        is_said = is_stream and options.image_folder is not None
        images = image_preparation(model_name, tokenizer, settings, rows, are_expected=is_said)
    if images is None:
        why = "the data has no images"
        if is_stream:
            why = "the first rows have no images (if later ones do, give --image_folder)"
        if not takes_images(model_name):
            why = f"{model_name} takes no images"
        raise_together(image_options_left_out(options, why))
    return images


def saved_with_model(
    tokenizer: PreTrainedTokenizerBase,
    images: ImagePreparation | None,
    options: ImageOptions,
    init_adapter: str | None,
) -> PreTrainedTokenizerBase | VisionProcessor:
    """The processor of a run on images, else the tokenizer, to save beside the model.

    A run on text that begins with an adapter keeps the processor of that adapter.

    Raises:
        InputError: the processor of the adapter cannot be loaded.
    """
    if images is None and init_adapter is not None and find_processor_folder(init_adapter) == init_adapter:
        config = load_config(find_model(init_adapter)[0])
        if config.model_type in IMAGE_TOKENS:
            images = preparation_of(init_adapter, config, tokenizer, options)
    return tokenizer if images is None else images.processor


# Check the files of images, and that one of the images can be decoded.


def refuse_unused_folder(options: ImageOptions, has_files: bool) -> None:
    """Refuse an image folder where no image of the data is a file.

    Raises:
        InputError: names the folder.
    """
    if options.image_folder is not None and not has_files:
        raise InputError(
            f"image_folder is {options.image_folder!r}, and no image of the data is a file; leave out "
            "--image_folder (null in a config file)"
        )


def check_files_of_packs(packs: Path, rows: Dataset, images: ImagePreparation) -> bool:
    """Refuse packs whose images are files that the image folder does not hold as they were packed.

    Where broken images are skipped, files may be missing or changed.

    Returns:
        Whether an image is a file.

    Raises:
        InputError: names the packs, the row of the data, the file and the remedy.
    """
    has_files = False
    for table in scan(rows, [IMAGES], _BATCH):
        for image in _files_in(table):
            has_files = True
            try:
                source_from_record(image, images.folder)
            except UnreadableImage as error:
                if not images.options.skip_broken_images:
                    raise UnreadableImage(f"{packs}: {error}") from None
            except InputError as error:
                raise InputError(f"{packs}: {error}") from None
    return has_files


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


def check_one_can_be_decoded(images: ImagePreparation, rows: Dataset | RowStream, what: str) -> None:
    """Refuse rows of which nothing is left without the documents whose images cannot be decoded.

    Mostly the first row has a whole image, and is the only one that is decoded.

    Raises:
        InputError: names the first broken image.
    """
    is_stream, skipping, first = isinstance(rows, RowStream), images.collator(), None
    documents: Any = islice(_documents(rows), _FIRST_DOCUMENTS) if isinstance(rows, RowStream) else rows
    for document in documents:
        row: dict[str, Any] = {**document, COLUMN: document[IMAGES]}
        if (skipping([row])["labels"] != IGNORE_INDEX).any():
            return
        first = first or row
    if first is None:
        return
    try:
        ImageRowCollator(images.make_images, images.token_ids, images.folder)([first])
    except UnreadableImage as error:
        which = "each of the first documents" if is_stream else "each document"
        raise InputError(
            f"nothing would be {what}, since {which} has an image that cannot be used, such as {error}"
        ) from None


def _documents(stream: RowStream) -> Iterator[Mapping[str, Any]]:
    """The documents of the first pass over a stream."""
    for block in stream.documents.blocks(Place(), Share()):
        yield from block.documents()
        if block.ends_pass:
            return


# Rows with images in a stream, and rows of text for a model that takes images.


class StreamedImageRows:
    """Makes documents of rows with images, see `data.streaming.StreamedImages`.

    Args:
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


def check_of_text(token_ids: ImageTokenIds) -> Callable[[Table, str], None]:
    """Make a check that refuses documents of text that hold tokens of images."""

    def check(table: Table, what: str) -> None:
        refuse_image_tokens(Dataset(table), token_ids, what, "take it out of the text")

    return check

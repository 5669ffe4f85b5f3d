"""The images of a run: whether its data has some, how they are prepared, and what that decides."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from pyarrow import Table
from trl import SFTConfig

from unsloth_pack.checkpoints.loading import load_config, resolve
from unsloth_pack.config import TrainOptions, changed
from unsloth_pack.data.cache import cores
from unsloth_pack.data.tokenize import SpanMaker
from unsloth_pack.images.prepared import (
    ImageDocumentMaker,
    holds_images,
    image_document_schema,
    without_images,
)
from unsloth_pack.images.processor import find_processor_folder
from unsloth_pack.images.tokens import IMAGE_TOKENS, ImageTokenIds
from unsloth_pack.packing import read_manifest
from unsloth_pack.run.documents import RowsOfSet
from unsloth_pack.run.images import (
    ImagePreparation,
    image_ids_of,
    image_preparation,
    preparation_of,
    preparation_of_packs,
    refuse_image_tokens,
    takes_images,
)
from unsloth_pack.run.validate import check_run_with_images, refuse_image_options

_MOST_WORKERS = 8  # that decode images, unless the options say how many


def images_of_run(
    options: TrainOptions,
    tokenizer: Any,
    train_rows: list[RowsOfSet] | Path | None,
    eval_rows: list[RowsOfSet] | Path | None,
    first_of_stream: Sequence[Dataset] = (),
) -> ImagePreparation | None:
    """How the images of all data sets are prepared; None where there are none.

    Args:
        first_of_stream: the first rows of each data set that streams.

    Raises:
        InputError: they cannot be prepared; or options of images are given and there are none.
    """
    # An adapter that the run begins with has the limits of pixels that it was trained with
    model_name = options.adapter.init_adapter or options.model.model_name
    given = (train_rows, eval_rows)
    sets = [each.rows for rows in given if isinstance(rows, list) for each in rows] + [*first_of_stream]
    packs = {folder: read_manifest(folder) for folder in given if isinstance(folder, Path)}
    images = preparation_of_packs(model_name, tokenizer, options.images, packs)
    if images is None or any(map(holds_images, sets)):
        settings = options.images if images is None else images.options
        is_said = options.data.streaming and options.images.image_folder is not None
        images = image_preparation(model_name, tokenizer, settings, sets, are_expected=is_said)
    if images is not None:
        check_run_with_images(options)
        return images
    why = "the data has no images"
    if options.data.streaming:
        why = "the first rows have no images (if later ones do, give --image_folder)"
    if not takes_images(model_name):
        why = f"{options.model.model_name} takes no images"
    refuse_image_options(options.images, why)
    return None


def saved_beside_run(options: TrainOptions, tokenizer: Any, images: ImagePreparation | None) -> Any:
    """What is saved beside the model: where rows have images its processor, else its tokenizer.

    A run on text that begins with an adapter keeps the processor of that adapter.

    Raises:
        InputError: the processor of the adapter cannot be loaded.
    """
    first = options.adapter.init_adapter
    if images is None and first is not None and find_processor_folder(first) == first:
        config = load_config(resolve(first)[0])
        if config.model_type in IMAGE_TOKENS:
            images = preparation_of(first, config, tokenizer, options.images)
    return tokenizer if images is None else images.processor


def with_images(options: TrainOptions, config: SFTConfig) -> TrainOptions:
    """The options as rows with images decide them: the documents of a batch always share one row."""
    workers = options.images.dataloader_num_workers
    if workers is None:
        workers = min(_MOST_WORKERS, cores()) if config.device.type == "cuda" else 0
    config.dataloader_num_workers, config.padding_free = workers, True
    config.remove_unused_columns = False  # that of the images is none that TRL knows
    return changed(options, {"padding_free": True})


def packs_of_text(
    rows: Dataset, folder: Path, tokenizer: Any, options: TrainOptions, images: ImagePreparation | None
) -> Dataset:
    """Rows of packs that hold no images, as those that stand beside rows with images.

    Raises:
        InputError: they have lost their images.
    """
    refuse_lost_images(rows, tokenizer, options, f"{folder} row", "pack the data anew, with its images")
    return rows if images is None else without_images(rows, is_packed=True)


def refuse_lost_images(rows: Dataset, tokenizer: Any, options: TrainOptions, what: str, remedy: str) -> None:
    """Refuse tokens of images in rows without any, of a model that takes some: `refuse_image_tokens`."""
    token_ids = image_ids_of(options.model.model_name, tokenizer)
    if token_ids is not None:
        refuse_image_tokens(rows, token_ids, what, remedy)


# Rows with images in a stream, and rows of text for a model that takes images.


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

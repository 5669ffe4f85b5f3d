"""What is checked of a run's images before it begins: their files, and that one of them can be decoded."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from unsloth_pack.config.options import ImageOptions
from unsloth_pack.data.cache import scan
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.data.rows import IMAGES
from unsloth_pack.data.streaming import Place, Share
from unsloth_pack.errors import InputError
from unsloth_pack.images.prepared import source_from_record
from unsloth_pack.images.reading import UnreadableImage
from unsloth_pack.recipe.image_data import ImagePreparation
from unsloth_pack.training.image_rows import COLUMN, ImageRowCollator
from unsloth_pack.training.streaming import RowStream

if TYPE_CHECKING:
    from unsloth_pack.recipe.prepare import PreparedRows

_BATCH = 1000  # rows whose images are looked at at a time
_FIRST_DOCUMENTS = 1000  # of a stream, one of which has to have images that can be decoded
_OF_A_FILE = ("path", "size", "mtime_ns", "sha256", "row", "column")


def check_images(
    images: ImagePreparation, train: "PreparedRows", evaluation: "PreparedRows | None", is_resumed: bool
) -> None:
    """Refuse an image folder in which no image lies, and rows of which every image is broken.

    Args:
        is_resumed: the run was started as it is, so its folder stays.

    Raises:
        InputError: names the option, or the first broken image, and the remedy.
    """
    if not is_resumed:
        refuse_unused_folder(images.options, train.has_files or bool(evaluation and evaluation.has_files))
    if images.options.skip_broken_images:
        _check_one_can_be_decoded(images, train.rows, "learned")
        if evaluation is not None:
            _check_one_can_be_decoded(images, evaluation.rows, "evaluated")


def refuse_unused_folder(options: ImageOptions, has_files: bool) -> None:
    """Refuse an image folder where no image of the data is a file.

    Raises:
        InputError: names the folder.
    """
    if options.image_folder is not None and not has_files:
        raise InputError(
            f"image_folder is {options.image_folder!r}, and no image of the data is a file; leave out "
            "--image_folder (null in a config file)",
            about="image_folder",
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


def _files_in(table: Any) -> Sequence[dict[str, Any]]:
    """The images of some rows that are files, each file once."""
    found: dict[str, dict[str, Any]] = {}
    for chunk in table[IMAGES].chunks:
        images = chunk.flatten()
        images = images.filter(images.field("path").is_valid())
        columns = (images.field(name).to_pylist() for name in _OF_A_FILE)
        for values in zip(*columns, strict=True):
            found[values[0]] = {"bytes": None, **dict(zip(_OF_A_FILE, values, strict=True))}
    return [*found.values()]


def _check_one_can_be_decoded(images: ImagePreparation, rows: Dataset | RowStream, what: str) -> None:
    """Refuse rows of which nothing is left without the documents whose images cannot be decoded.

    Mostly the first row has a whole image, and is the only one that is decoded.
    """
    skipping = images.collator()
    looked_at: Any = islice(_documents(rows), _FIRST_DOCUMENTS) if isinstance(rows, RowStream) else rows
    first = None
    for row in looked_at:
        given: dict[str, Any] = {**row, COLUMN: row[IMAGES]}
        if (skipping([given])["labels"] != IGNORE_INDEX).any():
            return
        first = first or given
    if first is None:
        return
    try:
        ImageRowCollator(images.make_images, images.token_ids, images.folder)([first])
    except UnreadableImage as error:
        which = "each of the first documents" if isinstance(rows, RowStream) else "each document"
        raise InputError(
            f"nothing would be {what}, since {which} has an image that cannot be used, such as {error}"
        ) from None


def _documents(stream: RowStream) -> Iterator[Mapping[str, Any]]:
    """The documents of the first pass over a stream."""
    for block in stream.documents.blocks(Place(), Share()):
        yield from block.documents()
        if block.ends_pass:
            return

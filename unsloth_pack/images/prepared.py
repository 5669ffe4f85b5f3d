"""Rows with images as tokenised documents: lengths from the headers of images, no pixel decoded."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.data.cache import digest, in_order, spans_of
from unsloth_pack.data.columns import IMAGE_COLUMNS
from unsloth_pack.data.encoding import IGNORE_INDEX, Encoded
from unsloth_pack.data.formats import detect_format
from unsloth_pack.data.rows import IMAGES, KEYS_OF_IMAGES, OF_TURNS, image_field, unread_keys
from unsloth_pack.data.token_counts import FILES, SpanCounts
from unsloth_pack.data.tokenize import SpanMaker, table_of
from unsloth_pack.data.unsupported_columns import refuse_acting_columns
from unsloth_pack.errors import InputError
from unsloth_pack.images.encoding import PlacedImage, VisionDocument, VisionEncoder
from unsloth_pack.images.family import ImageFamily
from unsloth_pack.images.reading import (
    ImageSource,
    UnreadableImage,
    file_of,
    refuse_image,
    refuse_lost,
    stat_of,
)
from unsloth_pack.images.rows import MARK, hide_images

# Images in the columns of documents and of packed rows: what a loader's worker needs to decode them.

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


if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

_USED = {
    *IMAGE_COLUMNS,
    *OF_TURNS,
    "instruction",
    "input",
    "output",
    "system",
    "tools",
    "chat_template_kwargs",
}
_IN_JSON = '"type": "image'  # as `data.exact` writes parts
_FILE = re.compile(r"\.(png|jpe?g|webp|gif|bmp|tiff?)$", re.IGNORECASE)
_A_KEY = f'"({"|".join(KEYS_OF_IMAGES)})": '


def holds_images(dataset: datasets.Dataset) -> bool:
    """Whether the rows of a data set may have images: in a column, or in parts of their messages."""
    import pyarrow.compute as pc

    from unsloth_pack.data.lossless_json import ExactJson

    if {*dataset.column_names} & {*IMAGE_COLUMNS}:
        return True
    for name in {*dataset.column_names} & {*OF_TURNS}:
        feature = dataset.features[name]
        if _holds_text_alone(feature):
            continue
        if not isinstance(feature, ExactJson):
            return True
        for table in dataset.select_columns(name).with_format("arrow").iter(batch_size=1000):
            texts = table[name].combine_chunks().storage
            if pc.any(pc.match_substring(texts, _IN_JSON)).as_py():
                return True
            # An image in a part that says it is text: rows with images are refused with its key and remedy
            suspects = texts.filter(pc.match_substring_regex(texts, _A_KEY))
            if any(hide_images(json.loads(text)) for text in suspects.to_pylist()):
                return True
    return False


def refuse_unmapped(dataset: datasets.Dataset) -> None:
    """Refuse a first row whose text has `<image>`, and whose file a column of another name holds.

    Raises:
        InputError: names that column.
    """
    row = _not_decoding(dataset)[0] if len(dataset) else {}
    texts = [row.get(name) for name in (*OF_TURNS, "instruction", "input")]
    for name, value in row.items():
        first = value[0] if isinstance(value, list) and value else value
        if name not in _USED and isinstance(first, str) and _FILE.search(first) and MARK in str(texts):
            raise InputError(
                f"row 0: {MARK} in the text, and no column image; map {name!r} to it, which holds {first!r}",
                about="columns",
            )


def _holds_text_alone(feature: Any) -> bool:
    """Whether a column holds strings, or turns of strings."""
    import datasets

    inner = getattr(feature, "feature", feature)  # of a list
    fields = inner.values() if isinstance(inner, dict) else [inner]
    return all(isinstance(field, datasets.Value) for field in fields)


def unused_columns(dataset: datasets.Dataset, template: str) -> tuple[str, ...]:
    """The columns that nothing is made of, and the keys of turns that a chat template does not read."""
    unused = tuple(name for name in dataset.column_names if name not in _USED)
    turns = [name for name in OF_TURNS if name in dataset.column_names]
    return unused + unread_keys(dataset, turns, template)


class ImageDocumentMaker(SpanMaker):
    """Makes the documents of a data set with images.

    Args:
        encode: makes a document of a row.
        folder: where paths of images begin.
        keep_bytes: documents hold the content of image files, instead of their paths.
        settings: all that the documents depend on beside the rows and the files of their images, as JSON has
            it; None where that cannot be told.
        numbers: of the rows, by which errors name them; None to count from 0.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        encode: VisionEncoder,
        max_length: int,
        folder: Path | None,
        keep_bytes: bool = False,
        settings: Sequence[Any] | None = None,
        numbers: range | None = None,
    ):
        super().__init__(_not_decoding(dataset), max_length, image_document_schema())
        detect_format(dataset.column_names, [self.dataset[i] for i in range(min(8, len(dataset)))])
        self._encode, self._folder, self._keep_bytes = encode, folder, keep_bytes
        self._settings = settings
        self._numbers = range(len(dataset)) if numbers is None else numbers

    def key(self, num_proc: int | None) -> list[Any] | None:
        """With size and time of every file of an image, so that none is read for those that stay the same.

        None where documents hold the content of files: the cache would hold all of them once more.
        """
        if self._settings is None or self._keep_bytes:
            return None
        tasks = spans_of(len(self.dataset), self.dataset.data.nbytes)
        return [self.of_data, [*self._settings], [*in_order(self._files_of, tasks, num_proc)]]

    def _files_of(self, span: tuple[int, int]) -> str:
        """SHA-256 of what is known of the images of these rows without reading a file."""
        found = hashlib.sha256()
        for number in range(*span):
            try:
                known: Any = self._encode.files(number, self.dataset[number])
            except UnreadableImage as error:
                known = str(error)
            found.update(json.dumps([number, known]).encode())
        return found.hexdigest()

    def documents(self, first: int, end: int) -> Iterator[tuple[SpanCounts, pa.Table]]:
        size = self.batch_size
        for start in range(first, end, size):
            rows = self.dataset.select(range(start, min(start + size, end)))
            numbers = self._numbers[start : start + size]
            refuse_acting_columns(rows, numbers, are_text=False)
            yield self._made([*self._encode.each(rows, numbers)])

    def _made(self, documents: list[VisionDocument | None]) -> tuple[SpanCounts, pa.Table]:
        import pyarrow as pa

        made = [document for document in documents if document is not None]
        encoded = _encoded(made)
        tally = SpanCounts.of(encoded)
        kept = [document for document in made if document.is_learnable]
        n_broken = len(documents) - len(made)
        n_left_out = sum(len(document.ids) < min(document.read, 1) for document in made)
        n_files = sum(isinstance(image.source.content, Path) for each in made for image in each.images)
        tally.sums[FILES] = n_files + n_broken + n_left_out
        tally.sums += Counter(
            rows_read=n_broken,
            rows_broken=n_broken,
            rows_left_out=n_left_out,
            rows_shrunk=sum(document.saved > 0 for document in made),
            tokens_shrunk=sum(document.saved for document in made),
            images=sum(len(document.images) for document in kept),
            vision_tokens=sum(image.tokens for document in kept for image in document.images),
        )
        images = [
            [stored(image, self._folder, keep_bytes=self._keep_bytes) for image in document.images]
            for document in kept
        ]
        kind = self.schema.field(IMAGES).type
        return tally, table_of(encoded).append_column(self.schema.field(IMAGES), pa.array(images, kind))


def _encoded(documents: list[VisionDocument]) -> Encoded:
    kept = np.array([len(document.ids) for document in documents], np.int64)
    masked = np.array([(document.labels == IGNORE_INDEX).sum() for document in documents], np.int64)
    counted = np.array([(document.labels[1:] != IGNORE_INDEX).sum() for document in documents], np.int64)
    nothing = np.zeros(0, np.int32)
    return Encoded(
        ids=np.concatenate([nothing, *(document.ids for document in documents)]),
        labels=np.concatenate([nothing, *(document.labels for document in documents)]),
        read=np.array([document.read for document in documents], np.int64),
        kept=kept,
        masked=masked,
        counted=counted,
        rerendered=np.zeros(len(documents), bool),
    )


def without_images(rows: datasets.Dataset, is_packed: bool = False) -> datasets.Dataset:
    """Tokenised rows of text with the column of images, which is empty, so that others may follow them."""
    import datasets
    import pyarrow as pa

    kind = image_field(is_packed).type.value_type
    offsets = pa.array(np.zeros(len(rows) + 1, np.int32))
    none = pa.ListArray.from_arrays(offsets, pa.array([], kind))
    return datasets.concatenate_datasets([rows, datasets.Dataset(pa.table({IMAGES: none}))], axis=1)


def _not_decoding(dataset: datasets.Dataset) -> datasets.Dataset:
    """The same rows, whose images come as bytes and paths."""
    import datasets

    plain = dataset.with_format(None)  # a copy that has its own types
    plain.info.features = datasets.Features(
        {name: _undecoded(kind) for name, kind in dataset.features.items()}
    )
    return plain


def _undecoded(feature: Any) -> Any:
    from dataclasses import replace

    import datasets

    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_undecoded(feature.feature))
    return datasets.Image(decode=False) if isinstance(feature, datasets.Image) else feature


# An image of a document, decoded as its header said, or grey in the place of one that cannot be.

_GREY = (128, 128, 128)


def decoded(
    make: ImageFamily[Any],
    source: ImageSource,
    size: tuple[int, int],
    most_pixels: int | None,
    of_document: int,
) -> Any:
    """What `make` makes of an image.

    Args:
        size: height and width in pixels, as its header said.
        most_pixels, of_document: as its tokens were counted, see `ImageFamily.cut`.

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


def grey(make: ImageFamily[Any], height: int, width: int, most_pixels: int | None, of_document: int) -> Any:
    """What `make` makes of a grey image of this size, in pixels."""
    from PIL import Image

    source = ImageSource(0, "", Image.new("RGB", (width, height), _GREY))
    return make(source, most_pixels, of_document)

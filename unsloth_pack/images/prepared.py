"""Tokenise rows with images. Lengths come from image headers; no pixel is decoded before training.

The columns of documents and of packed rows hold what a loader's worker needs to decode the images.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unsloth_pack.data.cache import digest, in_order, spans_of
from unsloth_pack.data.columns import IMAGE_COLUMNS
from unsloth_pack.data.encoding import IGNORE_INDEX, Encoded
from unsloth_pack.data.formats import detect_format
from unsloth_pack.data.lossless_json import ExactJson, read_as
from unsloth_pack.data.rows import IMAGES, OF_TURNS, image_field, unread_keys
from unsloth_pack.data.token_counts import FILES, SpanCounts
from unsloth_pack.data.tokenize import SpanMaker, document_schema, table_of
from unsloth_pack.errors import InputError
from unsloth_pack.images.encoding import PlacedImage, VisionDocument, VisionEncoder
from unsloth_pack.images.family import ImageFamily, PreparedImage
from unsloth_pack.images.reading import ImageSource, UnreadableImage, parse_source
from unsloth_pack.images.rows import MARK

_USED = {
    *IMAGE_COLUMNS,
    *OF_TURNS,
    *("instruction", "input", "output", "system", "tools", "chat_template_kwargs"),
}
_IN_JSON = '"type": "image'  # as in `data.lossless_json`; `image_url` too
_FILE = re.compile(r"\.(png|jpe?g|webp|gif|bmp|tiff?)$", re.IGNORECASE)


def image_document_schema() -> pa.Schema:
    """Return the schema of tokenised rows with images."""
    return document_schema().append(image_field())


def stored(image: PlacedImage, folder: Path | None, *, keep_bytes: bool = False) -> dict[str, Any]:
    """Return an image as a column's record, with its path below `folder` or the file's content."""
    content = image.source.content
    if keep_bytes and isinstance(content, Path):
        content = image.source.read_file(Path.read_bytes)
    record: dict[str, Any] = {"height": image.height, "width": image.width, "tokens": image.cut.tokens}
    record |= {"row": image.source.index, "column": image.source.column, "most_pixels": image.most_pixels}
    if isinstance(content, Path):
        about = image.source.read_file(Path.stat)
        path = str(content) if folder is None else os.path.relpath(content, os.path.realpath(folder))
        record |= {"path": path, "size": about.st_size, "mtime_ns": about.st_mtime_ns}
        return record | {"sha256": image.source.read_file(digest)}
    assert isinstance(content, bytes)  # the data set does not decode
    return record | {"bytes": content, "sha256": hashlib.sha256(content).hexdigest()}


def source_from_record(image: Mapping[str, Any], folder: Path | None) -> ImageSource:
    """Return the source of a record, see `parse_source`; UnreadableImage if its file has changed since."""
    row, column, recorded = image["row"], image["column"], image.get("sha256")
    if image["bytes"] is not None:
        source = ImageSource(row, column, image["bytes"])
        is_same = recorded in (None, hashlib.sha256(image["bytes"]).hexdigest())
    else:
        source = parse_source(row, column, Path(image["path"]), folder)
        about = source.read_file(Path.stat)
        is_same = about.st_size == image["size"] and (
            about.st_mtime_ns == image["mtime_ns"] or source.read_file(digest) == recorded
        )
    if not is_same:
        source.refuse("an image that has changed since it was prepared", "prepare it anew")
    return source


def holds_images(dataset: datasets.Dataset) -> bool:
    """True if the rows of a data set may have images: in a column, or in parts of their messages."""
    if {*dataset.column_names} & {*IMAGE_COLUMNS}:
        return True
    for name in {*dataset.column_names} & {*OF_TURNS}:
        feature = dataset.features[name]
        inner = getattr(feature, "feature", feature)  # of a list
        fields = inner.values() if isinstance(inner, dict) else [inner]
        if all(isinstance(field, datasets.Value) for field in fields):  # strings, or turns of strings
            continue
        if not isinstance(feature, ExactJson):
            return True
        for table in dataset.select_columns(name).with_format("arrow").iter(batch_size=1000):
            texts = table[name].combine_chunks().storage
            if pc.any(pc.match_substring(texts, _IN_JSON)).as_py():
                return True
    return False


def refuse_unmapped(dataset: datasets.Dataset) -> None:
    """Raise InputError if the first text has `<image>` and another column than `image` names a file."""
    row = _without_decoding(dataset)[0] if len(dataset) else {}
    texts = [row.get(name) for name in (*OF_TURNS, "instruction", "input")]
    for name, value in row.items():
        first = value[0] if isinstance(value, list) and value else value
        if name not in _USED and isinstance(first, str) and _FILE.search(first) and MARK in str(texts):
            raise InputError(
                f"row 0: {MARK} in the text, and no column image; map {name!r} to it, which holds {first!r}"
            )


def unused_columns(dataset: datasets.Dataset, template: str) -> tuple[str, ...]:
    """List the unused columns, and the keys of turns that a chat template does not read."""
    unused = tuple(name for name in dataset.column_names if name not in _USED)
    turns = [name for name in OF_TURNS if name in dataset.column_names]
    return unused + unread_keys(dataset, turns, template)


class ImageDocumentMaker(SpanMaker):
    """Encode the documents of a data set with images.

    Args:
        keep_bytes: store the content of image files instead of their paths below `folder`.
        settings: everything else that the documents depend on, as JSON; None if unknown.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        encode: VisionEncoder,
        max_length: int,
        folder: Path | None,
        keep_bytes: bool = False,
        settings: Sequence[object] | None = None,
        numbers: range | None = None,
    ):
        super().__init__(_without_decoding(dataset), max_length, image_document_schema())
        detect_format(dataset.column_names, [self.dataset[i] for i in range(min(8, len(dataset)))])
        self._encode, self._folder, self._keep_bytes = encode, folder, keep_bytes
        self._settings, self._numbers = settings, numbers or range(len(dataset))

    def key(self, num_proc: int | None) -> list[Any] | None:
        """Return the cache key with size and time of every image file, so that unchanged files are not read.

        None if documents hold the content of files: the cache would store all of them again.
        """
        if self._settings is None or self._keep_bytes:
            return None
        tasks = spans_of(len(self.dataset), self.dataset.data.nbytes)
        return [self.of_data, [*self._settings], [*in_order(self._hash_files, tasks, num_proc)]]

    def _hash_files(self, span: tuple[int, int]) -> str:
        """Hash path, size and time of the images of these rows."""
        total = hashlib.sha256()
        for number in range(*span):
            try:
                known: Any = self._encode.files(number, self.dataset[number])
            except UnreadableImage as error:
                known = str(error)
            total.update(json.dumps([number, known]).encode())
        return total.hexdigest()

    def documents(self, first: int, end: int) -> Iterator[tuple[SpanCounts, pa.Table]]:
        size = self.batch_size
        for start in range(first, end, size):
            rows = self.dataset.select(range(start, min(start + size, end)))
            numbers = self._numbers[start : start + size]
            yield self._tabulate([*self._encode.each(rows, numbers)])

    def _tabulate(self, results: list[VisionDocument | None]) -> tuple[SpanCounts, pa.Table]:
        documents = [document for document in results if document is not None]
        ids, labels = ([getattr(each, name) for each in documents] for name in ("ids", "labels"))
        nothing = np.zeros(0, np.int32)
        encoded = Encoded(
            ids=np.concatenate([nothing, *ids]),
            labels=np.concatenate([nothing, *labels]),
            read=np.array([document.read for document in documents], np.int64),
            kept=np.array([*map(len, ids)], np.int64),
            masked=np.array([(each == IGNORE_INDEX).sum() for each in labels], np.int64),
            counted=np.array([(each[1:] != IGNORE_INDEX).sum() for each in labels], np.int64),
            rerendered=np.zeros(len(documents), bool),
        )
        tally = SpanCounts.of(encoded)
        learnable = [document for document in documents if document.is_learnable]
        n_broken = len(results) - len(documents)
        n_left_out = sum(len(document.ids) < min(document.read, 1) for document in documents)
        n_files = sum(isinstance(image.source.content, Path) for each in documents for image in each.images)
        tally.sums[FILES] = n_files + n_broken + n_left_out
        tally.sums += Counter(
            rows_read=n_broken,
            rows_broken=n_broken,
            rows_left_out=n_left_out,
            rows_shrunk=sum(document.saved > 0 for document in documents),
            tokens_shrunk=sum(document.saved for document in documents),
            images=sum(len(document.images) for document in learnable),
            vision_tokens=sum(image.tokens for document in learnable for image in document.images),
        )
        images = [
            [stored(image, self._folder, keep_bytes=self._keep_bytes) for image in document.images]
            for document in learnable
        ]
        kind = self.schema.field(IMAGES).type
        return tally, table_of(encoded).append_column(self.schema.field(IMAGES), pa.array(images, kind))


def without_images(rows: datasets.Dataset, is_packed: bool = False) -> datasets.Dataset:
    """Add an empty column of images to tokenised rows of text, to join them with rows with images."""
    kind = image_field(is_packed).type.value_type
    offsets = pa.array(np.zeros(len(rows) + 1, np.int32))
    none = pa.ListArray.from_arrays(offsets, pa.array([], kind))
    return datasets.concatenate_datasets([rows, datasets.Dataset(pa.table({IMAGES: none}))], axis=1)


def _without_decoding(dataset: datasets.Dataset) -> datasets.Dataset:
    """Return the same rows, with images as bytes and paths."""
    return read_as(dataset, datasets.Image, datasets.Image(decode=False))


def decoded(
    make: ImageFamily, source: ImageSource, size: tuple[int, int], most_pixels: int | None, of_document: int
) -> PreparedImage:
    """Decode and prepare an image; UnreadableImage if it has other tokens than its header said."""
    image = make(source, most_pixels, of_document)
    actual, expected = image.cut, make.cut(source, size, most_pixels, of_document)
    if actual != expected:
        problem = f"an image of {actual.tokens} tokens, and its header said {expected.tokens}"
        source.refuse(problem, "let nothing change it")
    return image


def grey(
    make: ImageFamily, height: int, width: int, most_pixels: int | None, of_document: int
) -> PreparedImage:
    """Prepare a grey image of this size in pixels, in place of one that cannot be decoded."""
    from PIL import Image

    source = ImageSource(0, "", Image.new("RGB", (width, height), (128, 128, 128)))
    return make(source, most_pixels, of_document)

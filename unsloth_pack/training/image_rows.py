"""Batches of packed rows with images, decoded in the loader's workers. Pixels are bytes until the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.images.family import ImageFamily
from unsloth_pack.images.packed_rows import RowWithImages
from unsloth_pack.images.prepared import decoded, grey, source_from_record
from unsloth_pack.images.reading import UnreadableImage
from unsloth_pack.images.tokens import ImageTokenIds

COLUMN = "packed_images"  # TRL takes rows with a column `images` for its own kind
PIXELS = "pixel_values"
BROKEN = "broken_images"


class ImageRowCollator:
    """Makes one packed row of some rows, each of one document or several, with their images.

    The batch holds `input_ids` and `labels` `[1, T]`; `position_ids` `[1, T]`, which restart at every
    document, for trainers that count by them; `packed_row`, which a patched model takes as it is;
    and with images `pixel_values` uint8, which `on_device` makes what a tower takes, and what describes them,
    as lists on the host.

    Args:
        make_images: prepares images for the model.
        token_ids: that stand for images.
        folder: where paths of images begin.
        skip_broken: of a document with an image that cannot be decoded, count no token; a grey image takes
            its place. `broken_images` in the batch says how many there are.
    """

    def __init__(
        self,
        make_images: ImageFamily,
        token_ids: ImageTokenIds,
        folder: Path | None,
        *,
        skip_broken: bool = False,
    ):
        self.make_images, self._token_ids, self._folder = make_images, token_ids, folder
        self.skip_broken = skip_broken

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of some rows.

        Raises:
            UnreadableImage: an image cannot be decoded, or is not what it was when the rows were made.
            InputError: the rows have other images than their tokens stand for.
        """
        ids: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        images: list[list[Any]] = []
        n_broken = 0
        for row in rows:
            first = len(ids)
            for begin, end in _spans(row):
                ids.append(np.asarray(row["input_ids"][begin:end], dtype=np.int64))
                labels.append(np.asarray(row["labels"][begin:end], dtype=np.int64))
                images.append([])
            counts = Counter(map(_document_of, row[COLUMN]))
            for image in row[COLUMN]:
                document = _document_of(image)
                made = self._decoded(image, counts[document])
                if made is None:
                    labels[first + document][:] = IGNORE_INDEX
                    size = (image["height"], image["width"], image["most_pixels"])
                    made = grey(self.make_images, *size, counts[document])
                    n_broken += 1
                images[first + document].append(made)
        made_row = RowWithImages.pack(ids, labels, images, self._token_ids.placeholder, self.make_images)
        batch: dict[str, Any] = {
            "input_ids": made_row.ids,
            "labels": made_row.labels,
            "position_ids": made_row.along_text,
            "packed_row": made_row.row,
        }
        batch |= made_row.on_host(self.make_images.described)
        return batch | ({BROKEN: n_broken} if n_broken else {})

    def on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with `pixel_values` as numbers, made where they lie."""
        pixels = batch.get(PIXELS)
        if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
            return batch
        return batch | {PIXELS: self.make_images.normalised(pixels)}

    def _decoded(self, image: Mapping[str, Any], of_document: int) -> Any:
        """The image; None for a broken one that may be skipped."""
        try:
            source = source_from_record(image, self._folder)
            size = (image["height"], image["width"])
            return decoded(self.make_images, source, size, image["most_pixels"], of_document)
        except UnreadableImage:
            if not self.skip_broken:
                raise
            return None


def _document_of(image: Mapping[str, Any]) -> int:
    """Which document of its row an image is in; a row of one document does not say."""
    return image.get("document") or 0


def _spans(row: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """The first token of every document of a row, and the one behind its last."""
    lengths = row.get("seq_lengths") or [len(row["input_ids"])]
    return pairwise(accumulate(lengths, initial=0))

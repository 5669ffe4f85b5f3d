"""Batches of packed rows with images, decoded in the loader's workers. Pixels are bytes until the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    document, for trainers that count by them; `packed_row` for a patched model; and with images their
    `pixel_values` uint8, and their description as lists on the host.
    """

    def __init__(
        self,
        make_images: ImageFamily,
        token_ids: ImageTokenIds,
        folder: Path | None,  # where paths of images begin
        *,
        # Put a grey image in place of one that cannot be decoded, and count no token of its document. The
        # batch has their number as `broken_images`.
        skip_broken: bool = False,
    ):
        self.make_images, self._token_ids, self._folder = make_images, token_ids, folder
        self.skip_broken = skip_broken

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make the batch of some rows; refuse images that have changed, or do not match their tokens."""
        ids: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        images: list[list[Any]] = []
        n_broken = 0
        for row in rows:
            first = len(ids)
            lengths = row.get("seq_lengths") or [len(row["input_ids"])]
            for begin, end in pairwise(accumulate(lengths, initial=0)):
                ids.append(np.asarray(row["input_ids"][begin:end], dtype=np.int64))
                labels.append(np.asarray(row["labels"][begin:end], dtype=np.int64))
                images.append([])
            documents = [record.get("document") or 0 for record in row[COLUMN]]  # no number if there is one
            counts = Counter(documents)
            for record, document in zip(row[COLUMN], documents, strict=True):
                image = self._decoded(record, counts[document])
                if image is None:
                    labels[first + document][:] = IGNORE_INDEX
                    size = (record["height"], record["width"], record["most_pixels"])
                    image = grey(self.make_images, *size, counts[document])
                    n_broken += 1
                images[first + document].append(image)
        packed = RowWithImages.pack(ids, labels, images, self._token_ids.placeholder, self.make_images)
        batch: dict[str, Any] = {
            "input_ids": packed.ids,
            "labels": packed.labels,
            "position_ids": packed.along_text,
            "packed_row": packed.row,
            **packed.on_host(self.make_images.described),
        }
        return batch | ({BROKEN: n_broken} if n_broken else {})

    def on_device(self, batch: dict[str, object]) -> dict[str, Any]:
        """Normalise the `pixel_values` of a batch on their device."""
        pixels = batch.get(PIXELS)
        if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
            return batch
        return batch | {PIXELS: self.make_images.normalised(pixels)}

    def _decoded(self, image: Mapping[str, Any], of_document: int) -> Any:
        """Decode an image; None for a broken one that may be skipped."""
        try:
            source = source_from_record(image, self._folder)
            size = (image["height"], image["width"])
            return decoded(self.make_images, source, size, image["most_pixels"], of_document)
        except UnreadableImage:
            if not self.skip_broken:
                raise
            return None

"""Batches of packed rows with images, decoded in the loader's workers. Pixels are bytes until the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.images.pictured_row import PicturedRow
from unsloth_pack.images.pixels import Patches, PatchMaker
from unsloth_pack.images.sources import UnreadableImage
from unsloth_pack.images.stored import source_of_stored
from unsloth_pack.images.tokens import ImageTokenIds

COLUMN = "packed_images"  # TRL takes rows with a column `images` for its own kind
PIXELS = "pixel_values"
BROKEN = "broken_images"


class ImageRowCollator:
    """Makes one packed row of some rows, each of one document or several, with their images.

    The batch holds `input_ids` and `labels` `[1, T]`; `position_ids` `[1, T]`, which restart at every
    document, for trainers that count by them; `packed_row`, which a patched model takes as it is;
    and with images `pixel_values` `[patches, numbers]` uint8, which `on_device` makes what a tower takes, and
    `image_grid_thw`, a list on the host.

    Args:
        make_patches: cuts images into patches.
        token_ids: that stand for images.
        folder: where paths of images begin.
        skip_broken: of a document with an image that cannot be decoded, count no token; its patches are
            grey. `broken_images` in the batch says how many there are.
        always_seeing: add to a row without images a document of a grey one, in which no token counts. What
            sees images then has a gradient, of 0: a loss needs one where nothing else trains, and
            processes that train together wait for one.
    """

    def __init__(
        self,
        make_patches: PatchMaker,
        token_ids: ImageTokenIds,
        folder: Path | None,
        *,
        skip_broken: bool = False,
        always_seeing: bool = False,
    ):
        self._make_patches, self._token_ids, self._folder = make_patches, token_ids, folder
        self._skip_broken, self._always_seeing = skip_broken, always_seeing

    def of_evaluation(self) -> ImageRowCollator:
        """The same for rows that nothing learns from."""
        return ImageRowCollator(
            self._make_patches, self._token_ids, self._folder, skip_broken=self._skip_broken
        )

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of some rows.

        Raises:
            UnreadableImage: an image cannot be decoded, or is not what it was when the rows were made.
            InputError: the rows have other images than their tokens stand for.
        """
        ids: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        patches: list[Patches] = []
        n_broken = 0
        for row in rows:
            first = len(ids)
            for begin, end in _spans(row):
                ids.append(np.asarray(row["input_ids"][begin:end], dtype=np.int64))
                labels.append(np.asarray(row["labels"][begin:end], dtype=np.int64))
            for image in row[COLUMN]:
                made = self._decoded(image)
                if made is None:
                    labels[first + (image.get("document") or 0)][:] = IGNORE_INDEX
                    made = self._make_patches.grey(image["tokens"])
                    n_broken += 1
                patches.append(made)
        tokens = self._token_ids
        if self._always_seeing and not patches:
            ids.append(np.array([tokens.start, tokens.placeholder, tokens.end]))
            labels.append(np.full(len(ids[-1]), IGNORE_INDEX))
            patches.append(self._make_patches.grey(1))
        made_row = PicturedRow.of(ids, labels, patches, tokens.placeholder, self._make_patches.merge_size)
        batch: dict[str, Any] = {
            "input_ids": made_row.ids,
            "labels": made_row.labels,
            "position_ids": torch.from_numpy(made_row.row.positions)[None],
            "packed_row": made_row.row,
        }
        if made_row.values is not None:
            batch |= {PIXELS: made_row.values, "image_grid_thw": [[*grid] for grid in made_row.grids]}
        return batch | ({BROKEN: n_broken} if n_broken else {})

    def on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with `pixel_values` as numbers, made where they lie."""
        pixels = batch.get(PIXELS)
        if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
            return batch
        return batch | {PIXELS: self._make_patches.normalised(pixels)}

    def _decoded(self, image: Mapping[str, Any]) -> Patches | None:
        try:
            source = source_of_stored(image, self._folder)
            return self._make_patches.of_size(source, image["tokens"], image["most_pixels"])
        except UnreadableImage:
            if not self._skip_broken:
                raise
            return None


def _spans(row: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """The first token of every document of a row, and the one behind its last."""
    lengths = row.get("seq_lengths") or [len(row["input_ids"])]
    return pairwise(accumulate(lengths, initial=0))

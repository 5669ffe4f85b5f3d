"""A packed row of documents with images: tokens, places of images, and pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.images.family import ImageFamily, PreparedImage
from unsloth_pack.packed_row.describe import add_axes
from unsloth_pack.packed_row.images import RowImages
from unsloth_pack.packed_row.row import PackedRow


@dataclass(frozen=True, eq=False)
class RowWithImages:
    """Documents that share a row, T tokens long."""

    row: PackedRow  # boundaries, image tokens, and positions on three axes if the model has them
    ids: Tensor  # `[1, T]` int64
    labels: Tensor  # `[1, T]` int64; the first label of every document is -100
    position_ids: Tensor  # `[1, T]`, or `[4, 1, T]`, the last three for time, height and width
    arguments: dict[str, Tensor]  # of a call, for its images; `pixel_values` are uint8

    @classmethod
    def pack(
        cls,
        ids: Sequence[np.ndarray],
        labels: Sequence[np.ndarray],
        images: Sequence[Sequence[PreparedImage]],
        placeholder: int,
        make: ImageFamily,
    ) -> RowWithImages:
        """Pack ids, labels and images of documents into a row; `placeholder` is the id of an image token."""
        row = PackedRow.of_lengths(tuple(map(len, ids)), torch.device("cpu"))
        all_ids, all_labels = np.concatenate(ids), np.concatenate(labels)
        all_labels[row.starts] = IGNORE_INDEX
        every = [image for document in images for image in document]
        positions, grids = row.positions[None], make.grids(every)
        if grids is not None:
            located = RowImages.locate(all_ids == placeholder, grids.prod(axis=1), row)
            axes = located.axes(row, grids)
            positions = np.stack([row.positions, *axes])[:, None]
            row = add_axes(row, axes) if every else row  # a row of text is described by its lengths
        arguments: dict[str, Tensor] = {}
        if every:
            visual = np.flatnonzero(all_ids == placeholder)
            row = replace(row, visual=visual, both_ways=make.both_ways, _built={})
            arguments = make.arguments(every, [*map(len, images)])
        return cls(row, _row(all_ids), _row(all_labels), torch.from_numpy(positions), arguments)

    @property
    def along_text(self) -> Tensor:
        """The positions `[1, T]` for a model that takes `row`, which has the three axes."""
        return torch.from_numpy(self.row.positions)[None]

    def on_host(self, described: Sequence[str]) -> dict[str, object]:
        """Return the arguments; those in `described` as lists, which a trainer leaves on the host."""
        return {n: value.tolist() if n in described else value for n, value in self.arguments.items()}


def _row(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))[None]

"""A packed row of documents with images, as a model takes it: tokens, where images stand, and patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.images.pixels import Patches
from unsloth_pack.row.images import RowImages
from unsloth_pack.row.packed_row import PackedRow


@dataclass(frozen=True, eq=False)
class PicturedRow:
    """Documents that share a row, T tokens long.

    Args:
        row: its boundaries, its positions on three axes, and which tokens stand for images.
        ids, labels: `[1, T]` int64; the first label of every document is -100.
        axes: `[3, T]` int64, the positions in time, height and width.
        values: `[patches, numbers]` uint8, of all images; None without images.
        grids: patches of every image in time, height and width.
    """

    row: PackedRow
    ids: Tensor
    labels: Tensor
    axes: np.ndarray
    values: Tensor | None
    grids: list[tuple[int, int, int]]

    @classmethod
    def of(
        cls,
        ids: Sequence[np.ndarray],
        labels: Sequence[np.ndarray],
        patches: Sequence[Patches],
        placeholder: int,
        merge: int,
    ) -> PicturedRow:
        """The row of some documents.

        Args:
            ids, labels: of every document.
            patches: of every image, in the order of their tokens.
            placeholder: the token that stands for images.
            merge: patches a side that become one token.

        Raises:
            InputError: the row has other images than its tokens stand for.
        """
        row = PackedRow.of_lengths(tuple(map(len, ids)), torch.device("cpu"))
        all_ids, all_labels = np.concatenate(ids), np.concatenate(labels)
        all_labels[row.starts] = IGNORE_INDEX
        grids = [patch.grid for patch in patches]
        of_tokens = np.array(grids, dtype=np.int64).reshape(-1, 3) // [1, merge, merge]
        found = RowImages.of(all_ids == placeholder, of_tokens.prod(axis=1), row)
        axes = found.axes(row, of_tokens)
        values = None
        if patches:  # a row of text alone is described by its lengths
            row = replace(row, axes=axes, visual=found.places, _built={})
            values = torch.from_numpy(np.concatenate([patch.values for patch in patches]))
        return cls(row, _row(all_ids), _row(all_labels), axes, values, grids)


def _row(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))[None]

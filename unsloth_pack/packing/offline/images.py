"""Images in packs on disk: what the manifest says of them, and the check of every row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unsloth_pack.data.image_columns import DOCUMENT, IMAGES

if TYPE_CHECKING:
    import pyarrow as pa

Refuse = Callable[[np.ndarray, Callable[[int], str]], None]


@dataclass(frozen=True)
class PackedImages:
    """The images of packs.

    Args:
        images, vision_tokens: in all rows.
        are_paths: whether files of images are referred to by their paths, not held.
        placeholder: the token that stands for images.
        least_pixels, most_pixels: to which smaller and larger images are resized; None where the model's
            images have no such limits.
        processor: SHA-256 of all settings of the image processor that made the tokens.
    """

    images: int
    vision_tokens: int
    are_paths: bool
    placeholder: int
    least_pixels: int | None
    most_pixels: int | None
    processor: str


def check_images(
    batch: pa.RecordBatch, ids: np.ndarray, lengths: pa.ListArray, placeholder: int, refuse: Refuse
) -> None:
    """Refuse rows whose images are not those that their tokens stand for.

    Args:
        ids: of all rows, one after the other.
        lengths: of the documents of every row.
        refuse: takes what is wrong, a flag for every row, and says so of the first.
    """
    column = batch[IMAGES]
    of_row = np.repeat(np.arange(len(batch)), np.diff(column.offsets))
    images = column.flatten()
    names = (DOCUMENT, "tokens", "height", "width")
    document, tokens, height, width = (images.field(name).fill_null(-1).to_numpy() for name in names)
    n_documents = lengths.value_lengths().to_numpy()
    is_held = images.field("bytes").is_valid().to_numpy(zero_copy_only=False)
    is_named = images.field("path").is_valid().to_numpy(zero_copy_only=False)
    is_wrong = (tokens < 1) | (height < 1) | (width < 1) | (is_held == is_named)
    is_wrong |= (document < 0) | (document >= n_documents[of_row])
    same_row = np.diff(of_row, prepend=-1) == 0
    is_wrong |= same_row & (np.diff(document, prepend=0) < 0)
    refuse(
        _by_row(is_wrong, of_row, len(batch)), lambda row: "an image without its size, content or document"
    )
    first = np.cumsum(n_documents) - n_documents
    sizes = lengths.flatten().to_numpy()
    starts = np.cumsum(sizes) - sizes
    found = np.add.reduceat(ids == placeholder, starts, dtype=np.int64)
    made = np.bincount(first[of_row] + document, weights=tokens, minlength=len(sizes)).astype(np.int64)
    row_of_document = np.repeat(np.arange(len(batch)), n_documents)

    def complaint(row: int) -> str:
        number = int(np.flatnonzero((found != made) & (row_of_document == row))[0])
        return (
            f"document {number - first[row]} holds {found[number]} image tokens, and its images make "
            f"{made[number]}"
        )

    refuse(_by_row(found != made, row_of_document, len(batch)), complaint)


def _by_row(is_wrong: np.ndarray, of_row: np.ndarray, n_rows: int) -> np.ndarray:
    return np.bincount(of_row[is_wrong], minlength=n_rows) > 0

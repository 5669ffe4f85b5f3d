"""A packed row as a figure: its documents, their boundaries, the tokens that count, and its images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.data.encoding import IGNORE_INDEX

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_IMAGES = 16  # that fit side by side
_MARGIN = 0.08  # of the place of an image, on each side


@dataclass(frozen=True, eq=False)
class ImageSeen:
    """An image of a packed row.

    Args:
        first: its first token in the row.
        tokens: that it takes.
        pixels: `[height, width, 3]` bytes.
    """

    first: int
    tokens: int
    pixels: np.ndarray


@dataclass(frozen=True)
class PackedRowSeen:
    """One packed row, to be drawn.

    Args:
        lengths: of its documents, in tokens.
        is_counted: `[tokens]` whether a token's label counts in the loss.
        capacity: tokens that the row has room for.
        images: in the order of their tokens.
    """

    lengths: Sequence[int]
    is_counted: np.ndarray
    capacity: int
    images: Sequence[ImageSeen] = ()


def row_of_batch(batch: Mapping[str, Any], processor: Any, images: Sequence[Any]) -> PackedRowSeen:
    """A batch of `VisionDataCollator` for a model of the Qwen-VL family, to be drawn.

    Args:
        processor: that the collator has.
        images: of the batch, of Pillow, in the order of their tokens.
    """
    is_image = batch["input_ids"][0].numpy() == processor.image_token_id
    grids = np.asarray(batch.get("image_grid_thw", ()), np.int64).reshape(-1, 3)
    tokens = [int(grid.prod()) // processor.image_processor.merge_size**2 for grid in grids]
    pixels = [np.asarray(image.convert("RGB")) for image in images]
    is_counted = batch["labels"][0].numpy() != IGNORE_INDEX
    lengths = batch["packed_seq_lengths"]
    return PackedRowSeen(lengths, is_counted, sum(lengths), placed(is_image, tokens, pixels))


def placed(is_image: np.ndarray, tokens: Sequence[int], pixels: Sequence[np.ndarray]) -> list[ImageSeen]:
    """The images of a row.

    Args:
        is_image: `[tokens]` where images stand.
        tokens: of each image.
    """
    places = np.flatnonzero(is_image)
    firsts = places[np.cumsum([0, *tokens])[:-1]].tolist()
    return [ImageSeen(*each) for each in zip(firsts, tokens, pixels, strict=True)]


def draw_row(row: PackedRowSeen) -> Figure:
    """Documents side by side, dark where a token counts in the loss, with a line at every boundary.

    Images stand above, each tied to its tokens, up to the sixteenth.
    """
    import matplotlib
    from matplotlib.figure import Figure

    images = row.images[:_MOST_IMAGES]
    figure = Figure(figsize=(10, 2.8 if images else 1.6), layout="constrained")
    axes = figure.add_subplot(xlabel="token", yticks=[], xlim=(0, row.capacity), ylim=(0, 2 if images else 1))
    ends = np.cumsum(row.lengths)
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    whole = 0.5 if images else 1.0  # of the height
    for number, (end, length) in enumerate(zip(ends, row.lengths, strict=True)):
        colour = colours[number % len(colours)]
        axes.axvspan(end - length, end, ymax=whole, color=colour, alpha=0.3, linewidth=0)
        for first, last in _runs(row.is_counted[end - length : end]):
            axes.axvspan(end - length + first, end - length + last, ymax=whole, color=colour, linewidth=0)
        axes.axvline(end, ymax=whole, color="black", linewidth=1, gid=f"boundary-{number}")
    axes.axvspan(ends[-1], row.capacity, ymax=whole, color="0.85", linewidth=0)
    for number, image in enumerate(images):
        _draw_image(axes, image, number / len(images), 1 / len(images), row.capacity)
    return figure


def _draw_image(axes: Any, image: ImageSeen, left: float, width: float, capacity: int) -> None:
    """An image above the row, in the place from `left` on, in shares of the width."""
    inset = axes.inset_axes((left + width * _MARGIN, 0.62, width * (1 - 2 * _MARGIN), 0.36))
    inset.imshow(image.pixels, interpolation="nearest")
    inset.set(xticks=[], yticks=[])
    axes.axvspan(image.first, image.first + image.tokens, ymin=0.5, ymax=0.52, color="black", linewidth=0)
    middle = image.first + image.tokens / 2
    axes.plot([middle, (left + width / 2) * capacity], [1.04, 1.22], color="0.4", linewidth=0.8)


def _runs(marks: np.ndarray) -> list[tuple[int, int]]:
    """The first place of each run of true marks, and the first behind it."""
    edges = np.diff(np.concatenate([[0], marks.astype(np.int8), [0]]))
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))

"""Where the images of a packed row stand, and the positions that they give its tokens.

An image is a run of placeholder tokens, one for each token that the tower makes of it. Where there are three
axes, in time, height and width, text counts up on all of them. The tokens of an image stand in a grid, which
begins where the text before it ends. The text behind it goes on after the longer side of the grid:

    tokens  a  i  i  i  i  i  i  b      an image of 2 x 3
    time    0  1  1  1  1  1  1  4
    height  0  1  1  1  2  2  2  4
    width   0  1  2  3  1  2  3  4
"""

from dataclasses import dataclass

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.row.packed_row import PackedRow


@dataclass(frozen=True)
class RowImages:
    """The images of a row, in the order of their tokens.

    Args:
        places: `[V]` int64; the tokens that stand for images.
        sizes: `[images]` int64; how many of them each image has.
    """

    places: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, is_placeholder: np.ndarray, sizes: np.ndarray, row: PackedRow) -> "RowImages":
        """The images of a row.

        Args:
            is_placeholder: `[N]` bool.
            sizes: `[images]`, the tokens that the tower makes of each image.

        Raises:
            InputError: the row has another number of placeholders than the images have tokens; those of one
                image do not stand side by side in one document.
        """
        places = np.flatnonzero(is_placeholder)
        if len(places) != sizes.sum():
            raise InputError(
                f"a row holds {len(places)} image tokens, its {len(sizes)} images make {sizes.sum()}; give "
                "it the images of this very row, in their order"
            )
        images = cls(places, sizes)
        document_of = np.repeat(np.arange(len(row.lengths)), row.lengths)
        first, last = images.starts, images.starts + sizes - 1
        is_one_run = (places[np.cumsum(sizes) - 1] == last) if len(sizes) else np.ones(0, dtype=bool)
        is_inside = is_one_run & (document_of[first] == document_of[np.minimum(last, row.n_tokens - 1)])
        if not is_inside.all():
            number = int(np.flatnonzero(~is_inside)[0])
            raise InputError(
                f"image {number} of a row has {sizes[number]} tokens, which do not stand side by side in one "
                f"document from token {first[number]} on; check the boundaries, and the order of the images"
            )
        return images

    @property
    def starts(self) -> np.ndarray:
        """`[images]` int64: the first token of every image."""
        return self.places[np.cumsum(self.sizes) - self.sizes]

    def axes(self, row: PackedRow, grids: np.ndarray) -> np.ndarray:
        """`[3, N]` int64: positions in time, height and width, from 0 in every document.

        Args:
            grids: `[images, 3]`, the tokens of every image in time, height and width.

        Source: Qwen2-VL (Wang et al. 2024), section 2.1, as `get_rope_index` of transformers.
        """
        advances = np.maximum(grids[:, 1], grids[:, 2])
        behind = np.zeros(row.n_tokens + 1, dtype=np.int64)  # how much later a token stands than it would
        np.add.at(behind, self.starts + self.sizes, advances - self.sizes)
        shifted = np.cumsum(behind[:-1])
        along = np.concatenate([np.arange(n) for n in row.lengths])
        axes = np.tile(along + shifted - np.repeat(shifted[row.starts], row.lengths), (3, 1))
        if len(grids):
            within = np.concatenate([np.indices(grid).reshape(3, -1) for grid in grids], axis=1)
            axes[:, self.places] = np.repeat(axes[0, self.starts], self.sizes) + within
        return axes


def images_by_document(row: PackedRow, places: np.ndarray, sizes: np.ndarray, hint: str = "") -> list[int]:
    """How many images every document of a row has, where their tokens need not stand side by side.

    Markers may stand between the lines of an image, and between its tiles.

    Args:
        places: `[V]`, the tokens that stand for images.
        sizes: `[images]`, the tokens that the tower has made of each image or tile.
        hint: what else may be wrong, for the error.

    Raises:
        InputError: the row has another number of placeholders than the images have tokens; a document ends
            inside an image.
    """
    if len(places) != sizes.sum():
        raise InputError(
            f"a row holds {len(places)} image tokens, its {len(sizes)} images make {sizes.sum()}; give it "
            f"the images of this very row, in their order{hint}"
        )
    document_ends = np.searchsorted(places, np.cumsum(row.lengths))
    image_ends = np.concatenate([[0], np.cumsum(sizes)])
    images_before = np.searchsorted(image_ends, document_ends)
    is_cut = image_ends[images_before] != document_ends
    if is_cut.any():
        document = int(np.flatnonzero(is_cut)[0])
        image = int(images_before[document]) - 1
        raise InputError(
            f"document {document} of a row ends inside image {image}, which has {sizes[image]} tokens; check "
            f"the boundaries, and the order of the images{hint}"
        )
    return np.diff(images_before, prepend=0).tolist()

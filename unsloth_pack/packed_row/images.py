"""Place the images of a packed row, and compute the positions that they give its tokens.

An image is a run of placeholder tokens, one for each token that the tower makes of it. With three axes (time,
height, width), text counts up on all of them, an image stands in a grid that begins where the text before it
ends, and the text behind it goes on after the longer side of the grid:

    tokens  a  i  i  i  i  i  i  b      an image of 2 x 3
    time    0  1  1  1  1  1  1  4
    height  0  1  1  1  2  2  2  4
    width   0  1  2  3  1  2  3  4

`BlockRows` serves images whose tokens see each other in both directions. Its queries are the tokens of the
images. The keys of each image are its document up to the image's end, or what a sliding window leaves of
that:

    row      a a i i i b j j | c k k     the images i, j and k of two documents
    queries      i i i   j j     k k
    keys     a a i i i                   copies: those of several images in a document overlap
             a a i i i b j j
                               c k k

Shapes: N tokens of the row, V placeholders, Q queries in blocks, M keys of all blocks.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.packed_row.row import PackedRow, power_of_2, round_up


@dataclass(frozen=True)
class RowImages:
    """The images of a row, in the order of their tokens."""

    places: np.ndarray  # `[V]` int64; the placeholder tokens
    sizes: np.ndarray  # `[images]` int64; the tokens of each image

    @classmethod
    def locate(cls, is_placeholder: np.ndarray, sizes: np.ndarray, row: PackedRow) -> "RowImages":
        """Locate the images of a row, by `[N]` bool and `[images]` tokens that the tower makes of each.

        Raises:
            InputError: placeholders and image tokens differ in number, or those of one image do not stand
                side by side in one document.
        """
        places = np.flatnonzero(is_placeholder)
        _refuse_other_count(places, sizes)
        images = cls(places, sizes)
        first, last = images.starts, images.starts + sizes - 1
        is_one_run = places[np.cumsum(sizes, dtype=np.int64) - 1] == last
        begins, ends = (np.searchsorted(row.starts, each, side="right") for each in (first, last))
        for number in np.flatnonzero(~is_one_run | (begins != ends)):
            raise InputError(
                f"image {number} of a row has {sizes[number]} tokens, which do not stand side by side in one "
                f"document from token {first[number]} on; check the boundaries, and the order of the images"
            )
        return images

    @property
    def starts(self) -> np.ndarray:
        """Return `[images]` int64: the first token of every image."""
        starts: np.ndarray = self.places[np.cumsum(self.sizes) - self.sizes]
        return starts

    def axes(self, row: PackedRow, grids: np.ndarray) -> np.ndarray:
        """Compute `[3, N]` int64: positions in time, height and width, from 0 in every document.

        `grids` `[images, 3]` are the tokens of every image in time, height and width.

        Source: Qwen2-VL (Wang et al. 2024), section 2.1, as `get_rope_index` of transformers.
        """
        advances = np.maximum(grids[:, 1], grids[:, 2])
        behind = np.zeros(row.n_tokens + 1, dtype=np.int64)  # how far each image moves the tokens after it
        np.add.at(behind, self.starts + self.sizes, advances - self.sizes)
        shifted = np.cumsum(behind[:-1])
        along = np.concatenate([np.arange(n) for n in row.lengths])
        axes = np.tile(along + shifted - np.repeat(shifted[row.starts], row.lengths), (3, 1))
        if len(grids):
            within = np.concatenate([np.indices(grid).reshape(3, -1) for grid in grids], axis=1)
            axes[:, self.places] = np.repeat(axes[0, self.starts], self.sizes) + within
        return axes


def images_by_document(row: PackedRow, places: np.ndarray, sizes: np.ndarray) -> list[int]:
    """Count the images of every document where markers may stand between an image's lines and tiles.

    `places` `[V]` are the placeholders, `sizes` `[images]` the tokens of each image or tile from the tower.

    Raises:
        InputError: placeholders and image tokens differ in number, or a document ends inside an image.
    """
    _refuse_other_count(places, sizes)
    document_ends = np.searchsorted(places, np.cumsum(row.lengths))
    image_ends = np.concatenate([[0], np.cumsum(sizes)])
    images_before = np.searchsorted(image_ends, document_ends)
    for document in np.flatnonzero(image_ends[images_before] != document_ends):
        image = images_before[document] - 1
        raise InputError(
            f"document {document} of a row ends inside image {image}, which has {sizes[image]} tokens; check "
            "the boundaries, and the number and order of the images"
        )
    per_document: list[int] = np.diff(images_before, prepend=0).tolist()
    return per_document


def _refuse_other_count(places: np.ndarray, sizes: np.ndarray) -> None:
    if len(places) != sizes.sum():
        raise InputError(
            f"a row holds {len(places)} image tokens, its {len(sizes)} images make {sizes.sum()}; give it "
            "the images of this very row, in their order, and one number of images for each document"
        )


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Queries and keys of the blocks of a row, for one kind of layer."""

    queries: PackedRow  # a segment for each block
    keys: PackedRow  # a segment for the keys of each block
    query_places: Tensor  # `[Q]` int64; where the queries stand in the row
    key_places: Tensor  # `[M]` int64; likewise for the keys

    @classmethod
    def from_row(cls, row: PackedRow, window: int | None) -> "BlockRows":
        """Return the blocks of a row, which all layers with this window share; None sees all keys."""

        def build() -> BlockRows:
            runs = _runs(row, window)
            queries, keys = (PackedRow.of_lengths(tuple(r.lengths.tolist()), row.device) for r in runs)
            return cls(queries, keys, *(row.upload(r.places) for r in runs))

        return row.once(("blocks", window), build)

    @classmethod
    def static(cls, row: PackedRow, window: int | None, bucket: "BlockShape") -> "BlockRows":
        """Make blocks of fixed sizes for the layers of a static row with this window, to `fill` anew."""
        padding = bucket.padding(row.longest)
        n_queries, n_segments = bucket.queries + padding, bucket.blocks + padding
        n_keys = bucket.earlier_within(window) + n_queries
        queries, keys = (
            PackedRow.static(n_tokens, n_segments, longest, row.device)
            for n_tokens, longest in ((n_queries, bucket.longest), (n_keys, row.longest))
        )
        places = torch.zeros(n_queries + n_keys, dtype=torch.int64, device=row.device)
        build = partial(cls, queries, keys, places[:n_queries], places[n_queries:])
        return row.once(("blocks", window), build)

    def fill(self, row: PackedRow, window: int | None, spare: int, padding: int) -> None:
        """Make these static blocks describe those of `row`, followed by `padding` runs of a `spare` token.

        Every run has a query, and as many keys or more, so that a kernel writes its whole output.
        """
        for static, places, runs in zip(
            (self.queries, self.keys), (self.query_places, self.key_places), _runs(row, window), strict=True
        ):
            tail = static.n_tokens - len(runs.places)
            too_many = tail // padding + (np.arange(padding) < tail % padding)
            static.fill_ends(np.concatenate([runs.lengths, too_many]))
            filled = row.pinned(np.concatenate([runs.places, np.full(tail, spare)]))
            places.copy_(filled, non_blocking=True)


class BlockShape(NamedTuple):
    """The sizes of blocks, rounded up."""

    blocks: int  # in a row
    queries: int  # tokens in blocks
    earlier: int  # keys before their blocks, without a window
    longest: int  # tokens of the longest block

    @classmethod
    def from_row(cls, row: PackedRow) -> "BlockShape":
        """Round up: tokens in steps of a sixteenth of the power of 2 above, the others to powers of 2."""
        blocks, queries, earlier, longest = _sizes(row)
        tokens = round_up(queries, 64), round_up(max(earlier, 1), 64)
        return cls(power_of_2(max(blocks, 8)), *tokens, power_of_2(max(longest, 16)))

    def widened(self, other: "BlockShape") -> "BlockShape":
        """Return the shape that is as large as either."""
        return BlockShape(*map(max, self, other))

    def holds(self, row: PackedRow) -> bool:
        return all(size <= most for size, most in zip(_sizes(row), self, strict=True))

    def earlier_within(self, window: int | None) -> int:
        """Return how many keys before the blocks a window leaves at most."""
        return self.earlier if window is None else min(self.earlier, self.blocks * (window - 1))

    def padding(self, longest: int) -> int:
        """Return how many runs of padding, none longer than a block or `longest` keys, fill the shape up."""
        for_queries = -(-self.queries // (self.longest - 1))
        return max(1, for_queries, -(-(self.queries + self.earlier) // (longest - 1)))


class _Runs(NamedTuple):
    lengths: np.ndarray  # `[runs]`
    places: np.ndarray  # `[tokens]` int64; where each token stands in the row


def _runs(row: PackedRow, window: int | None) -> tuple[_Runs, _Runs]:
    """Return the blocks of a row, and the keys of each."""
    begins, ends = row.blocks.T
    firsts = _starts(row)
    if window is not None:
        firsts = np.maximum(firsts, begins - window + 1)
    queries, keys = (_Runs(ends - each, _places(each, ends)) for each in (begins, firsts))
    return queries, keys


def _places(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """List the tokens of runs, one run behind the other."""
    lengths = ends - begins
    before = np.cumsum(lengths) - lengths
    places: np.ndarray = np.arange(lengths.sum()) + np.repeat(begins - before, lengths)
    return places


def _starts(row: PackedRow) -> np.ndarray:
    """Return `[blocks]` int64: the first token of the document of each block."""
    return row.starts[np.searchsorted(row.starts, row.blocks[:, 0], side="right") - 1]


def _sizes(row: PackedRow) -> list[int]:
    """Return what a `BlockShape` holds of a row with blocks."""
    begins, ends = row.blocks.T
    lengths = ends - begins
    sizes = len(lengths), lengths.sum(), (begins - _starts(row)).sum(), lengths.max()
    return [int(size) for size in sizes]

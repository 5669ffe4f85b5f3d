"""A model of vision and language under test, and random documents with images for it.

Shapes: T tokens of a row or L of a document, V words of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.errors import InputError, first_line
from unsloth_pack.layers.vision.vision_lm import PIXELS, Images, encode_images
from unsloth_pack.models.spec import TOKEN_TYPES, VisionSpec
from unsloth_pack.packed_row.images import RowImages
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.verification.subject import Subject

# Random images in the forms in which models of vision and language take them.
#
# Shapes: P patches of all images, S the side of an image or tile in pixels.

Size = tuple[int, int]  # tokens of an image in height and width, where its size is free

_TILES_OF_ONE = (
    2  # a model that cuts the only image of a document sees the whole and one tile of the smallest
)


@dataclass(frozen=True)
class Drawn:
    """The images of one document.

    Args:
        pixels: float32; the entries of `pixel_values` in the first dimension: patches, tiles or images.
        described: numbers that describe them, one entry an image, by the arguments of a call.
    """

    pixels: Tensor
    described: Mapping[str, Sequence[Any]]

    @property
    def n_images(self) -> int:
        """How many there are, where they are described one by one; else how many entries."""
        return max((len(numbers) for numbers in self.described.values()), default=len(self.pixels))


def drawn(
    spec: VisionSpec, config: Any, documents: Sequence[Sequence[Size]], generator: torch.Generator
) -> list[Drawn]:
    """Random images for every document.

    Args:
        config: of the whole model.
        documents: the sizes of the images of each.
    """
    draw = {"grids": _patches, "sizes": _padded, "batch": _of_one_size}[spec.attends]
    every = [size for sizes in documents for size in sizes]
    largest = max(height for height, _ in every), max(width for _, width in every)
    return [draw(spec, config, sizes, largest, generator) for sizes in documents]


def _patches(
    spec: VisionSpec, config: Any, sizes: Sequence[Size], largest: Size, generator: torch.Generator
) -> Drawn:
    """`[P, numbers of a patch]`."""
    vision = config.vision_config
    merge = getattr(vision, spec.merge)
    grids = [[1, merge * height, merge * width] for height, width in sizes]
    n_patches = sum(height * width for _, height, width in grids)
    numbers = _channels(vision) * vision.temporal_patch_size * vision.patch_size**2
    assert spec.grid is not None
    return Drawn(torch.randn(n_patches, numbers, generator=generator), {spec.grid: grids})


def _padded(
    spec: VisionSpec, config: Any, sizes: Sequence[Size], largest: Size, generator: torch.Generator
) -> Drawn:
    """`[images, channels, height, width]`, as large as the largest image of all documents."""
    vision = config.vision_config
    unit = vision.patch_size * getattr(config, spec.merge)
    shape = (len(sizes), _channels(vision), *(unit * side for side in largest))
    assert spec.sizes is not None
    in_pixels = [[unit * height, unit * width] for height, width in sizes]
    return Drawn(torch.randn(shape, generator=generator), {spec.sizes: in_pixels})


def _of_one_size(
    spec: VisionSpec, config: Any, sizes: Sequence[Size], largest: Size, generator: torch.Generator
) -> Drawn:
    """`[images, channels, S, S]`, or `[images, tiles, channels, S, S]` where images are cut into tiles."""
    vision = config.vision_config
    side = vision.image_size
    height, width = (side, side) if isinstance(side, int) else side
    tiles = [] if spec.sizes is None else [_TILES_OF_ONE]
    pixels = torch.randn(len(sizes), *tiles, _channels(vision), height, width, generator=generator)
    return Drawn(pixels, {} if spec.sizes is None else {spec.sizes: [[height, width]] * len(sizes)})


def _channels(vision: Any) -> int:
    names = ("in_channels", "in_chans", "num_channels")
    return next(int(n) for name in names if (n := getattr(vision, name, None)))


# Text and images, an image as its tokens in height and width: last and first, so that those of two documents
# stand side by side; none; three of unequal size
_DOCUMENTS: tuple[tuple[int | Size, ...], ...] = (
    (7, (4, 2)),
    ((2, 3), 5),
    (9,),
    (3, (1, 1), 2, (2, 4), 1, (3, 1), 6),
)
_WITH_A_MEANING = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class Pictured:
    """A document with images.

    Args:
        ids: `[L]` int64, a placeholder for each token of an image.
        images: what stands behind the placeholders.
    """

    ids: Tensor
    images: Drawn

    def negative(self) -> "Pictured":
        """The document with other images of the same form."""
        return replace(self, images=replace(self.images, pixels=-self.images.pixels))


class ImageSubject:
    """A model of vision and language, and how its packed rows are described to it.

    Args:
        subject: the model, described as it is with text alone.
        spec: how it takes images.

    Where tokens have positions on three axes, the description "position_ids" means those along the text, then
    in time, height and width. A function that takes `axes`, too, gets `[3, 1, T]`, the latter three.
    """

    def __init__(self, subject: Subject, spec: VisionSpec):
        self.subject, self.spec = subject, spec
        self.config = subject.model.config

    def documents(self, generator: torch.Generator) -> list[Pictured]:
        """Random ones. How many tokens an image has is asked of the model."""
        sizes = [[part for part in parts if isinstance(part, tuple)] for parts in _DOCUMENTS]
        images = drawn(self.spec, self.config, sizes, generator)
        token = getattr(self.config, self.spec.token)
        made = []
        for parts, of_document in zip(_DOCUMENTS, images, strict=True):
            lengths = iter(self._tokens_of(of_document))
            ids = [
                torch.full((next(lengths),), token)
                if isinstance(part, tuple)
                else torch.randint(*self._ids_of_text, (part,), generator=generator)
                for part in parts
            ]
            made.append(Pictured(torch.cat(ids), of_document))
        return made

    def _tokens_of(self, images: Drawn) -> list[int]:
        """The tokens of every image of a document."""
        if not len(images.pixels):
            return []
        given = self._described_images([images])
        pixels = self._formed(images.pixels)
        with torch.no_grad():
            found = encode_images(self._base, self.spec, Images(pixels, given))
        return found.sizes.tolist()

    @property
    def _base(self) -> Any:
        model = self.subject.model
        return (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model

    @property
    def _ids_of_text(self) -> tuple[int, int]:
        """The first and the end of the longest run of token ids without those of images and around them."""
        n_ids = self.subject.vocab_size
        special = {getattr(self.config, name, None) for name in _WITH_A_MEANING}
        edges = sorted({-1, n_ids, *(n for n in special if isinstance(n, int) and n < n_ids)})
        before, behind = max(pairwise(edges), key=lambda edge: edge[1] - edge[0])
        return before + 1, behind

    def logits(self, documents: Sequence[Pictured], pixels: Tensor | None = None) -> tuple[Tensor, ...]:
        """`[L, V]` of every document in one row of all.

        Raises:
            InputError: the model does not take a row that is described so.
        """
        lengths = [len(document.ids) for document in documents]
        given = self._images(documents, pixels) | self._described(documents, lengths)
        ids = torch.cat([document.ids for document in documents])[None].to(self.subject.device)
        try:
            return self.subject.model(input_ids=ids, **given).logits[0].split(lengths)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(
                f"the model takes no row of images that is described so: {first_line(error)}; describe it as "
                "the model asks"
            ) from error

    def logits_alone(self, document: Pictured) -> Tensor:
        """`[L, V]` of a document in a row of its own."""
        ids = document.ids[None].to(self.subject.device)
        given = self._images([document], None)
        if self.spec.grid is not None:
            given["position_ids"] = self._axes([document])
        return self.subject.model(input_ids=ids, use_cache=False, **given).logits[0]

    def pixels(self, documents: Sequence[Pictured]) -> Tensor:
        """The entries of `pixel_values` of all documents."""
        joined = torch.cat([document.images.pixels for document in documents])
        return joined.to(self.subject.device, self.subject.dtype)

    def _images(self, documents: Sequence[Pictured], pixels: Tensor | None) -> dict[str, Any]:
        pixels = self.pixels(documents) if pixels is None else pixels
        if not len(pixels):
            return {}
        described = self._described_images([document.images for document in documents])
        given = {name: torch.tensor(numbers) for name, numbers in described.items()}
        if self.spec.both_ways:
            ids = torch.cat([document.ids for document in documents])[None]
            given[TOKEN_TYPES] = (ids == getattr(self.config, self.spec.token)).int()
        on_device = {name: numbers.to(self.subject.device) for name, numbers in given.items()}
        return {PIXELS: self._formed(pixels), **on_device}

    def _formed(self, pixels: Tensor) -> Tensor:
        """`pixel_values` of these entries: some models take those of a row of a batch."""
        is_by_row = pixels.ndim < min(self.spec.dimensions)
        return pixels[None] if is_by_row else pixels

    def _described_images(self, images: Sequence[Drawn]) -> dict[str, list[Any]]:
        """The arguments of a call beside the pixels of these documents."""
        names = images[0].described
        described = {name: [n for one in images for n in one.described[name]] for name in names}
        if self.spec.of_documents is not None:
            described[self.spec.of_documents] = [one.n_images for one in images]
        return described

    def _described(self, documents: Sequence[Pictured], lengths: list[int]) -> dict[str, Any]:
        if self.spec.grid is None:
            return self.subject.described(lengths)
        axes = self._axes(documents)
        if self.subject.description == "position_ids":
            along = torch.cat([torch.arange(length) for length in lengths])[None, None]
            return {"position_ids": torch.cat([along.to(axes.device), axes])}
        return self.subject.described(lengths, axes)

    def _axes(self, documents: Sequence[Pictured]) -> Tensor:
        """`[3, 1, T]`."""
        row = PackedRow.of_lengths(tuple(len(d.ids) for d in documents), torch.device("cpu"))
        merge = getattr(self.config.vision_config, self.spec.merge)
        described = self._described_images([document.images for document in documents])
        grids = np.array(described[self.spec.grid or ""], dtype=np.int64).reshape(-1, 3)
        of_tokens = grids // [1, merge, merge]
        is_placeholder = torch.cat([d.ids for d in documents]) == getattr(self.config, self.spec.token)
        images = RowImages.locate(is_placeholder.numpy(), of_tokens.prod(axis=1), row)
        return torch.from_numpy(images.axes(row, of_tokens))[:, None].to(self.subject.device)

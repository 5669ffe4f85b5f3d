"""A model of vision and language under test, and random documents with images for it.

Shapes: T tokens of a row or L of a document, V words of the vocabulary, P patches of all images, S the side
of an image or tile in pixels.
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

Size = tuple[int, int]  # tokens of an image in height and width, for models with free sizes

_MIN_TILES = 2  # of the only image of a document, if a model cuts it: the whole image and one tile


@dataclass(frozen=True)
class Drawn:
    """The images of one document.

    Args:
        pixels: float32; entries of `pixel_values` in the first dimension: patches, tiles or images.
        described: further arguments of a call, one entry for each image.
    """

    pixels: Tensor
    described: Mapping[str, Sequence[Any]]

    @property
    def n_images(self) -> int:
        """The number of described images, else of entries."""
        return max((len(numbers) for numbers in self.described.values()), default=len(self.pixels))


def draw_images(
    spec: VisionSpec, config: Any, documents: Sequence[Sequence[Size]], generator: torch.Generator
) -> list[Drawn]:
    """Draw random images for every document.

    Args:
        config: of the whole model.
        documents: the sizes of the images of each.
    """
    draw = {"grids": _draw_patches, "sizes": _draw_padded, "batch": _draw_uniform}[spec.attends]
    every = [size for sizes in documents for size in sizes]
    largest = max(height for height, _ in every), max(width for _, width in every)
    return [draw(spec, config, sizes, largest, generator) for sizes in documents]


def _draw_patches(
    spec: VisionSpec, config: Any, sizes: Sequence[Size], largest: Size, generator: torch.Generator
) -> Drawn:
    """Draw `[P, numbers of a patch]`."""
    vision = config.vision_config
    merge = getattr(vision, spec.merge)
    grids = [[1, merge * height, merge * width] for height, width in sizes]
    n_patches = sum(height * width for _, height, width in grids)
    numbers = _channels(vision) * vision.temporal_patch_size * vision.patch_size**2
    assert spec.grid is not None
    return Drawn(torch.randn(n_patches, numbers, generator=generator), {spec.grid: grids})


def _draw_padded(
    spec: VisionSpec, config: Any, sizes: Sequence[Size], largest: Size, generator: torch.Generator
) -> Drawn:
    """Draw `[images, channels, height, width]`, padded to the largest image of all documents."""
    vision = config.vision_config
    unit = vision.patch_size * getattr(config, spec.merge)
    shape = (len(sizes), _channels(vision), *(unit * side for side in largest))
    assert spec.sizes is not None
    in_pixels = [[unit * height, unit * width] for height, width in sizes]
    return Drawn(torch.randn(shape, generator=generator), {spec.sizes: in_pixels})


def _draw_uniform(
    spec: VisionSpec, config: Any, sizes: Sequence[Size], largest: Size, generator: torch.Generator
) -> Drawn:
    """Draw `[images, channels, S, S]`, or `[images, tiles, channels, S, S]` for images in tiles."""
    vision = config.vision_config
    side = vision.image_size
    height, width = (side, side) if isinstance(side, int) else side
    tiles = [] if spec.sizes is None else [_MIN_TILES]
    pixels = torch.randn(len(sizes), *tiles, _channels(vision), height, width, generator=generator)
    return Drawn(pixels, {} if spec.sizes is None else {spec.sizes: [[height, width]] * len(sizes)})


def _channels(vision: Any) -> int:
    names = ("in_channels", "in_chans", "num_channels")
    return next(int(n) for name in names if (n := getattr(vision, name, None)))


# Text, and images as tokens in height and width: last and first, so that images of two documents are
# neighbours; none; three of unequal size
_DOCUMENTS: tuple[tuple[int | Size, ...], ...] = (
    (7, (4, 2)),
    ((2, 3), 5),
    (9,),
    (3, (1, 1), 2, (2, 4), 1, (3, 1), 6),
)
_SPECIAL_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True)
class Pictured:
    """A document with images.

    Args:
        ids: `[L]` int64, a placeholder for each token of an image.
        images: of the placeholders.
    """

    ids: Tensor
    images: Drawn

    def negative(self) -> "Pictured":
        """Return the document with inverted images."""
        return replace(self, images=replace(self.images, pixels=-self.images.pixels))


class ImageSubject:
    """A model of vision and language, and the description of its packed rows.

    With positions on three axes, the description "position_ids" means those along the text, then in time,
    height and width. A function with an argument `axes` gets the latter three, `[3, 1, T]`.

    Args:
        subject: the model with text only.
        spec: of its images.
    """

    def __init__(self, subject: Subject, spec: VisionSpec):
        self.subject, self.spec = subject, spec
        self.config = subject.model.config

    def documents(self, generator: torch.Generator) -> list[Pictured]:
        """Draw random documents. The model counts the tokens of images."""
        sizes = [[part for part in parts if isinstance(part, tuple)] for parts in _DOCUMENTS]
        images = draw_images(self.spec, self.config, sizes, generator)
        token = getattr(self.config, self.spec.token)
        documents = []
        for parts, drawn in zip(_DOCUMENTS, images, strict=True):
            lengths = iter(self._count_tokens(drawn))
            ids = [
                torch.full((next(lengths),), token)
                if isinstance(part, tuple)
                else torch.randint(*self._text_ids, (part,), generator=generator)
                for part in parts
            ]
            documents.append(Pictured(torch.cat(ids), drawn))
        return documents

    def _count_tokens(self, images: Drawn) -> list[int]:
        """Count the tokens of every image of a document."""
        if not len(images.pixels):
            return []
        arguments = self._described_images([images])
        pixels = self._shape_pixels(images.pixels)
        with torch.no_grad():
            return encode_images(self._base, self.spec, Images(pixels, arguments)).sizes.tolist()

    @property
    def _base(self) -> Any:
        model = self.subject.model
        return (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model

    @property
    def _text_ids(self) -> tuple[int, int]:
        """The first and the end of the longest run of token ids without those of images."""
        n_ids = self.subject.vocab_size
        special = {getattr(self.config, name, None) for name in _SPECIAL_IDS}
        edges = sorted({-1, n_ids, *(n for n in special if isinstance(n, int) and n < n_ids)})
        before, after = max(pairwise(edges), key=lambda edge: edge[1] - edge[0])
        return before + 1, after

    def logits(self, documents: Sequence[Pictured], pixels: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the logits `[L, V]` of every document in one row.

        Raises:
            InputError: the model does not accept the description of the row.
        """
        lengths = [len(document.ids) for document in documents]
        arguments = self._images(documents, pixels) | self._described(documents, lengths)
        ids = torch.cat([document.ids for document in documents])[None].to(self.subject.device)
        try:
            return self.subject.model(input_ids=ids, **arguments).logits[0].split(lengths)
        except InputError:
            raise
        except ValueError as error:
            problem = f"the model takes no row of images that is described so: {first_line(error)}"
            raise InputError(f"{problem}; describe it as the model asks") from error

    def logits_alone(self, document: Pictured) -> Tensor:
        """Return the logits `[L, V]` of a document alone."""
        ids = document.ids[None].to(self.subject.device)
        arguments = self._images([document], None)
        if self.spec.grid is not None:
            arguments["position_ids"] = self._axes([document])
        return self.subject.model(input_ids=ids, use_cache=False, **arguments).logits[0]

    def pixels(self, documents: Sequence[Pictured]) -> Tensor:
        """Join the entries of `pixel_values` of all documents."""
        joined = torch.cat([document.images.pixels for document in documents])
        return joined.to(self.subject.device, self.subject.dtype)

    def _images(self, documents: Sequence[Pictured], pixels: Tensor | None) -> dict[str, Any]:
        pixels = self.pixels(documents) if pixels is None else pixels
        if not len(pixels):
            return {}
        described = self._described_images([document.images for document in documents])
        arguments = {name: torch.tensor(numbers) for name, numbers in described.items()}
        if self.spec.both_ways:
            ids = torch.cat([document.ids for document in documents])[None]
            arguments[TOKEN_TYPES] = (ids == getattr(self.config, self.spec.token)).int()
        on_device = {name: numbers.to(self.subject.device) for name, numbers in arguments.items()}
        return {PIXELS: self._shape_pixels(pixels), **on_device}

    def _shape_pixels(self, pixels: Tensor) -> Tensor:
        """Add the dimension of rows, if the model has one."""
        return pixels[None] if pixels.ndim < min(self.spec.dimensions) else pixels

    def _described_images(self, images: Sequence[Drawn]) -> dict[str, list[Any]]:
        """Return the arguments of a call beside pixels."""
        names = images[0].described
        described = {name: [n for drawn in images for n in drawn.described[name]] for name in names}
        if self.spec.of_documents is not None:
            described[self.spec.of_documents] = [drawn.n_images for drawn in images]
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
        """Compute positions in time, height and width, `[3, 1, T]`."""
        row = PackedRow.of_lengths(tuple(len(d.ids) for d in documents), torch.device("cpu"))
        merge = getattr(self.config.vision_config, self.spec.merge)
        described = self._described_images([document.images for document in documents])
        grids = np.array(described[self.spec.grid or ""], dtype=np.int64).reshape(-1, 3)
        token_grids = grids // [1, merge, merge]
        is_placeholder = torch.cat([d.ids for d in documents]) == getattr(self.config, self.spec.token)
        images = RowImages.locate(is_placeholder.numpy(), token_grids.prod(axis=1), row)
        return torch.from_numpy(images.axes(row, token_grids))[:, None].to(self.subject.device)

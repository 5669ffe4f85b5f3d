"""Random images in the forms in which models of vision and language take them.

Shapes: P patches of all images, S the side of an image or tile in pixels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.models.vision_spec import VisionSpec

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

"""Images in tiles, for most families.

The number of tokens depends only on height and width. The arithmetic is that of the image processor's
resizing, since some of transformers' own counts differ from its output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.errors import require_whole
from unsloth_pack.images.family import ImageFamily
from unsloth_pack.images.tokens import Cut

if TYPE_CHECKING:
    from torch import Tensor

_MAX_SIDE = 4096  # pixels, above which Idefics' processors shrink every image


@dataclass(frozen=True, eq=False)
class Tiles:
    """One image for its tower.

    Args:
        values: `[tiles, 3, height, width]` uint8.
        size: height and width for the model's `image_sizes`.
        cut: its tokens.
    """

    values: np.ndarray
    size: tuple[int, int]
    cut: Cut


class TiledImages(ImageFamily[Tiles]):
    """The common part of the families below."""

    def get_cut(self, image: Tiles) -> Cut:
        return image.cut

    def seen(self, tokens: int, size: tuple[int, int], of_document: int) -> tuple[int, int]:
        patches = self._grid_side**2
        return self._count_tiles(tokens, size, of_document) * patches, patches

    def _count_tiles(self, tokens: int, size: tuple[int, int], of_document: int) -> int:
        """Count the tiles of an image; arguments as for `seen`."""
        return tokens // self._of_tile

    @property
    def _of_tile(self) -> int:
        """Tokens of a tile."""
        return self._grid_side**2

    def _take_first(self, output: Any, of_document: int) -> Tiles:
        values = output["pixel_values"]
        return Tiles(values.astype(np.uint8), (0, 0), self.cut_from_output(output, 0))

    def arguments(self, images: Sequence[Tiles], by_document: Sequence[int]) -> dict[str, Any]:
        import torch

        return {"pixel_values": torch.cat([torch.from_numpy(image.values) for image in images])}

    def normalised(self, values: Tensor) -> Tensor:
        return self._scaled(values.flatten(0, -4)).view(values.shape)

    @property
    def _vision(self) -> Any:
        return self._config.vision_config

    @property
    def _grid_side(self) -> int:
        """Patches a side of a tile."""
        return side_of(self._vision.image_size) // side_of(self._vision.patch_size)


class SplitImages(TiledImages):
    """Idefics3 and SmolVLM: an image is enlarged to the longest edge, and cut into full tiles."""

    needed = ("do_image_splitting", "max_image_size", "do_resize")
    own_limit = "size={'longest_edge': pixels}"

    @property
    def most_pixels(self) -> int:
        return self._longest**2

    def pixels_of_tokens(self, tokens: int) -> int:
        return tokens * self._tile**2 // self._of_tile

    def saved(self) -> dict[str, Any]:
        return {"image_seq_len": self._of_tile}

    def cut_from_output(self, output: Any, place: int) -> Cut:
        lines, columns = ([n for row in output[name] for n in row][place] for name in ("rows", "cols"))
        return self._cut_into(int(lines), int(columns))

    def arguments(self, images: Sequence[Tiles], by_document: Sequence[int]) -> dict[str, Any]:
        import torch

        # Every tile is full: no mask of padding inside tiles
        return {"pixel_values": torch.cat([torch.from_numpy(image.values) for image in images])[None]}

    def _sizes(self) -> list[tuple[str, Any, str, Any]]:
        longest_edge(self._processor)
        return [("max_image_size", self._tile, "image_size", side_of(self._vision.image_size))]

    def _options(self, most_pixels: int | None) -> dict[str, Any]:
        size = {} if most_pixels is None else {"size": {"longest_edge": self._edge(most_pixels)}}
        return {"return_row_col_info": True} | size

    def _take_first(self, output: Any, of_document: int) -> Tiles:
        return Tiles(output["pixel_values"][0].astype(np.uint8), (0, 0), self.cut_from_output(output, 0))

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        if not self._processor.do_image_splitting:
            return self._cut_into(0, 0)
        if self._processor.do_resize:
            height, width = _to_longest(height, width, self._edge(most_pixels))
            height, width = _at_most(height, width, _MAX_SIDE)
        tile, ratio = self._tile, width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        is_one = max(height, width) <= tile
        return self._cut_into(*((0, 0) if is_one else (height // tile, width // tile)))

    def _cut_into(self, lines: int, columns: int) -> Cut:
        return Cut(lines, columns, self._of_tile, self._of_tile)

    def _edge(self, most_pixels: int | None) -> int:
        """Return the longest edge; whole tiles if it is limited."""
        if most_pixels is None:
            return self._longest
        return min(self._longest, max(1, math.isqrt(most_pixels) // self._tile) * self._tile)

    @property
    def _longest(self) -> int:
        return longest_edge(self._processor)

    @property
    def _tile(self) -> int:
        return self._processor.max_image_size["longest_edge"]

    @property
    def _of_tile(self) -> int:
        return (self._grid_side // self._config.scale_factor) ** 2


class CanvasImages(TiledImages):
    """InternVL: an image fills the canvas of tiles closest to its shape, and then one whole tile."""

    needed = ("min_patches", "max_patches", "get_number_of_image_patches")
    own_limit = "max_patches, tiles of an image,"

    @property
    def most_pixels(self) -> int:
        return self._processor.max_patches * self._tile**2

    def pixels_of_tokens(self, tokens: int) -> int:
        return tokens * self._tile**2 // self._of_tile

    def saved(self) -> dict[str, Any]:
        return {"image_seq_length": self._of_tile}

    def cut_from_output(self, output: Any, place: int) -> Cut:
        return Cut(whole=int(output["num_patches"][place]) * self._of_tile)

    def _sizes(self) -> list[tuple[str, Any, str, Any]]:
        least, most = self._processor.min_patches, self._processor.max_patches
        require_whole("the image processor's max_patches", most, 1)
        require_whole("the image processor's min_patches", least, 1, most)
        return [size_of_tiles(self._processor, self._vision)]

    def _options(self, most_pixels: int | None) -> dict[str, Any]:
        options: dict[str, Any] = {"crop_to_patches": True}  # as always in transformers' processor
        if most_pixels is None:
            return options
        most = min(self._processor.max_patches, max(1, most_pixels // self._tile**2))
        return options | {"min_patches": min(self._processor.min_patches, most), "max_patches": most}

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        tiles = self._processor.get_number_of_image_patches(height, width, self._options(most_pixels))
        return Cut(whole=tiles * self._of_tile)

    @property
    def _tile(self) -> int:
        return side_of(self._vision.image_size)

    @property
    def _of_tile(self) -> int:
        return int(self._grid_side**2 * self._config.downsample_ratio**2)


class AnyresImages(TiledImages):
    """LLaVA-OneVision: the only image of a document is cut into tiles; several are one tile each.

    A newline feature ends each line of features, and an image of one tile.
    """

    needed = ("image_grid_pinpoints",)
    own_limit = "image_grid_pinpoints, as in config.json,"
    described = ("image_sizes", "batch_num_images")
    shrinks = False

    @property
    def most_pixels(self) -> int:
        return max(height * width for height, width in self._processor.image_grid_pinpoints)

    def pixels_of_tokens(self, tokens: int) -> int:
        return tokens * side_of(self._vision.patch_size) ** 2

    def saved(self) -> dict[str, Any]:
        strategy = self._config.vision_feature_select_strategy
        return {
            "num_image_tokens": self._grid_side**2 + (strategy == "default"),  # without the class token
            "vision_feature_select_strategy": strategy,
            "vision_aspect_ratio": self._config.vision_aspect_ratio,
        }

    def cut_from_output(self, output: Any, place: int) -> Cut:
        counts = [int(n) for n in output["batch_num_images"]]
        of_document = np.repeat(counts, counts)[place]
        height, width = (int(n) for n in output["image_sizes"][place])
        return self._cut(height, width, None, int(of_document))

    def _count_tiles(self, tokens: int, size: tuple[int, int], of_document: int) -> int:
        from transformers.image_processing_utils import select_best_resolution

        if of_document != 1:
            return 1
        tile = side_of(self._vision.image_size)
        height, width = select_best_resolution(size, self._processor.image_grid_pinpoints)
        return 1 + (height // tile) * (width // tile)

    def arguments(self, images: Sequence[Tiles], by_document: Sequence[int]) -> dict[str, Any]:
        import torch

        # Tiles of all images, concatenated: the model also takes one row for each image, with padding
        return {
            "pixel_values": torch.cat([torch.from_numpy(image.values) for image in images]),
            "image_sizes": torch.tensor([image.size for image in images]),
            "batch_num_images": torch.tensor([n for n in by_document if n]),
        }

    def _sizes(self) -> list[tuple[str, Any, str, Any]]:
        name = "image_grid_pinpoints"
        has, needs = (_as_lists(getattr(part, name)) for part in (self._processor, self._config))
        return [size_of_tiles(self._processor, self._vision), (name, has, name, needs)]

    def _options(self, most_pixels: int | None) -> dict[str, Any]:
        return {}

    def _list_inputs(self, image: Any, of_document: int) -> list[Any]:
        # The processor cuts no image of a list with two; the second one is small
        return [[image] if of_document == 1 else [image, image.crop((0, 0, 8, 8))]]

    def _take_first(self, output: Any, of_document: int) -> Tiles:
        height, width = (int(n) for n in output["image_sizes"][0])
        cut = self.cut_from_output(output, 0)
        return Tiles(output["pixel_values"][0].astype(np.uint8), (height, width), cut)

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        from transformers.image_processing_utils import select_best_resolution

        side = self._grid_side
        if of_document != 1:
            return Cut(whole=side**2 + 1)
        best = select_best_resolution((height, width), self._processor.image_grid_pinpoints)
        tile = side_of(self._vision.image_size)
        lines, columns = (side * (edge // tile) for edge in best)
        if width / height > columns / lines:
            lines -= (lines - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (lines / height), 7))) // 2 * 2
        most_tiles = int(self._config.vision_aspect_ratio.removeprefix("anyres_max_"))
        if (shrink := math.sqrt(lines * columns / (most_tiles * side**2))) > 1.1:
            lines, columns = int(lines // shrink), int(columns // shrink)
        return Cut(whole=side**2 + lines * (columns + 1))


def side_of(size: Any) -> int:
    """Return the side of a square in pixels; size may be one number or both sides."""
    return size if isinstance(size, int) else size[0]


def longest_edge(processor: Any) -> int:
    """Return an image processor's limit on the longest side in pixels; InputError if it is no number."""
    size = processor.size
    edge: Any = size.get("longest_edge") if isinstance(size, dict) else getattr(size, "longest_edge", None)
    require_whole("the image processor's size['longest_edge']", edge, 1)
    return edge


def _as_lists(value: Any) -> Any:
    return [*map(_as_lists, value)] if isinstance(value, list | tuple) else value


def size_of_tiles(processor: Any, vision: Any) -> tuple[str, Any, str, Any]:
    side = side_of(vision.image_size)
    size = processor.size
    has = {key: size[key] for key in ("height", "width") if key in size} if hasattr(size, "keys") else size
    return "size", has, "tiles", {"height": side, "width": side}


def _to_longest(height: int, width: int, edge: int) -> tuple[int, int]:
    """Scale the longest side to `edge`, and the other one to an even number."""
    ratio = width / height
    other = int(edge / ratio) if width >= height else int(edge * ratio)
    other = max(other + other % 2, 1)
    return (other, edge) if width >= height else (edge, other)


def _at_most(height: int, width: int, edge: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > edge:
        height, width = int(edge / ratio), edge
    elif height > width and height > edge:
        height, width = edge, int(edge * ratio)
    return max(height, 1), max(width, 1)

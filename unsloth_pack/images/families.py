"""The image families, one class each, and the choice among them by model type.

The number of tokens depends only on height and width. The arithmetic is that of the image processor's
resizing, since some of transformers' own counts differ from its output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.images.family import RGB, ImageFamily, PreparedImage, Sizes, side_of
from unsloth_pack.images.tokens import Cut, get_image_tokens
from unsloth_pack.models.spec import MODALITIES, TOKEN_TYPES

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig

_MAX_SIDE = 4096  # pixels, above which Idefics' processors shrink every image


class QwenVLImages(ImageFamily):
    """Qwen-VL: patches of an image in a size of its own, cut on the host and normalised on the device."""

    needed = ("patch_size", "merge_size", "temporal_patch_size", "get_number_of_image_patches")
    described = ("image_grid_thw",)
    token_types = MODALITIES  # from which transformers' models compute positions on three axes
    _of_tile = 1

    @property
    def _tile(self) -> int:
        return int(self._processor.patch_size * self._processor.merge_size)

    @property
    def most_pixels(self) -> int:
        return int(self._processor.size["longest_edge"])

    @property
    def pixel_limits(self) -> tuple[int, int]:
        return self._processor.size["shortest_edge"], self.most_pixels

    @property
    def _of_token(self) -> int:
        """Patches of one token."""
        return int(self._processor.merge_size**2)

    def seen(self, tokens: int, size: tuple[int, int], of_document: int) -> tuple[int, int]:
        return tokens * self._of_token, tokens * self._of_token

    def saved(self) -> dict[str, object]:
        return {}

    def normalised(self, values: Tensor) -> Tensor:
        """Normalise `[patches, 3 * patch * patch]` to `[patches, 3 * frames * patch * patch]`."""
        pixels = self._scaled(values.reshape(len(values), RGB, 1, -1))
        return pixels.expand(-1, -1, self._processor.temporal_patch_size, -1).reshape(len(values), -1)

    def cut_from_output(self, output: Mapping[str, Any], place: int) -> Cut:
        return Cut(whole=int(output["image_grid_thw"][place].prod()) // self._of_token)

    def grids(self, images: Sequence[PreparedImage]) -> np.ndarray:
        merge, patches = self._processor.merge_size, np.array([image.size for image in images], np.int64)
        grids: np.ndarray = patches.reshape(-1, 3) // [1, merge, merge]
        return grids

    def list_sizes(self) -> Sizes:
        names = [("merge_size", "spatial_merge_size")]
        names += [(name, name) for name in ("patch_size", "temporal_patch_size")]
        return [(a, getattr(self._processor, a), b, getattr(self._vision, b)) for a, b in names]

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        limits = {} if most_pixels is None else self._limits(most_pixels)
        options = {"min_pixels": limits["shortest_edge"], "max_pixels": most_pixels} if limits else {}
        patches = self._processor.get_number_of_image_patches(height, width, options)
        return Cut(whole=patches // self._of_token)

    def options(self, most_pixels: int | None = None) -> dict[str, Any]:
        return {} if most_pixels is None else {"size": self._limits(most_pixels)}

    def _take_first(self, output: Mapping[str, Any]) -> PreparedImage:
        values = output["pixel_values"]
        frames = values.reshape(len(values), RGB, self._processor.temporal_patch_size, -1)
        one_frame = frames[:, :, 0].astype(np.uint8).reshape(len(values), -1)
        time, height, width = (int(n) for n in output["image_grid_thw"][0])
        return PreparedImage(one_frame, (time, height, width), self.cut_from_output(output, 0))

    def _limits(self, most_pixels: int) -> dict[str, int]:
        least = min(self._processor.size["shortest_edge"], most_pixels)
        return {"shortest_edge": least, "longest_edge": most_pixels}


class SplitImages(ImageFamily):
    """Idefics3 and SmolVLM: an image is enlarged to the longest edge, and cut into full tiles."""

    needed = ("do_image_splitting", "max_image_size", "do_resize")

    def saved(self) -> dict[str, object]:
        return {"image_seq_len": self._of_tile}

    def cut_from_output(self, output: Mapping[str, Any], place: int) -> Cut:
        lines, columns = ([n for row in output[name] for n in row][place] for name in ("rows", "cols"))
        return self._cut_into(int(lines), int(columns))

    def arguments(self, images: Sequence[PreparedImage], by_document: Sequence[int]) -> dict[str, Tensor]:
        # A row of images, without a mask of padding inside tiles: every tile is full
        return {name: values[None] for name, values in super().arguments(images, by_document).items()}

    def list_sizes(self) -> Sizes:
        return [("max_image_size", self._tile, "image_size", side_of(self._vision.image_size))]

    def options(self, most_pixels: int | None = None) -> dict[str, Any]:
        size = {} if most_pixels is None else {"size": {"longest_edge": self._edge(most_pixels)}}
        return {"return_row_col_info": True} | size

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        if not self._processor.do_image_splitting:
            return self._cut_into(0, 0)
        if self._processor.do_resize:
            height, width = _scale(height, width, self._edge(most_pixels), step=2)
            if max(height, width) > _MAX_SIDE:
                height, width = _scale(height, width, _MAX_SIDE)
        whole_tiles = math.ceil(max(height, width) / self._tile) * self._tile
        lines, columns = (math.ceil(side / self._tile) for side in _scale(height, width, whole_tiles))
        return self._cut_into(*((0, 0) if lines == columns == 1 else (lines, columns)))

    def _cut_into(self, lines: int, columns: int) -> Cut:
        return Cut(lines, columns, self._of_tile, self._of_tile)

    def _edge(self, most_pixels: int | None) -> int:
        """Return the longest edge; whole tiles if it is limited."""
        longest: int = self._processor.size["longest_edge"]
        if most_pixels is None:
            return longest
        return min(longest, max(1, math.isqrt(most_pixels) // self._tile) * self._tile)

    @property
    def _tile(self) -> int:
        return int(self._processor.max_image_size["longest_edge"])

    @property
    def _of_tile(self) -> int:
        return int((self._grid_side // self._config.scale_factor) ** 2)


class SquareTiles(ImageFamily):
    """The common part of families whose tiles are the tower's squares."""

    @property
    def _tile(self) -> int:
        return side_of(self._vision.image_size)

    def list_sizes(self) -> Sizes:
        size = {side: self._processor.size.get(side) for side in ("height", "width")}
        return [("size", size, "tiles", {"height": self._tile, "width": self._tile})]


class CanvasImages(SquareTiles):
    """InternVL: an image fills the canvas of tiles closest to its shape, and then one whole tile."""

    needed = ("min_patches", "max_patches", "get_number_of_image_patches")

    @property
    def most_pixels(self) -> int:
        return int(self._processor.max_patches * self._tile**2)

    def cut_from_output(self, output: Mapping[str, Any], place: int) -> Cut:
        return Cut(whole=int(output["num_patches"][place]) * self._of_tile)

    def options(self, most_pixels: int | None = None) -> dict[str, Any]:
        options: dict[str, Any] = {"crop_to_patches": True}  # as always in transformers' processor
        if most_pixels is None:
            return options
        most = min(self._processor.max_patches, max(1, most_pixels // self._tile**2))
        return options | {"min_patches": min(self._processor.min_patches, most), "max_patches": most}

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        tiles = self._processor.get_number_of_image_patches(height, width, self.options(most_pixels))
        return Cut(whole=tiles * self._of_tile)

    @property
    def _of_tile(self) -> int:
        return int(self._grid_side**2 * self._config.downsample_ratio**2)


class AnyresImages(SquareTiles):
    """LLaVA-OneVision: the only image of a document is cut into tiles; several are one tile each.

    A newline feature ends each line of features, and an image of one tile.
    """

    needed = ("image_grid_pinpoints",)
    described = ("image_sizes", "batch_num_images")
    shrinks = False

    def saved(self) -> dict[str, object]:
        strategy = self._config.vision_feature_select_strategy
        return {
            "num_image_tokens": self._of_tile + (strategy == "default"),  # without the class token
            "vision_feature_select_strategy": strategy,
            "vision_aspect_ratio": self._config.vision_aspect_ratio,
        }

    def seen(self, tokens: int, size: tuple[int, int], of_document: int) -> tuple[int, int]:
        lines, columns = self._best_tiles(size)
        return (1 + lines * columns if of_document == 1 else 1) * self._of_tile, self._of_tile

    def cut_from_output(self, output: Mapping[str, Any], place: int) -> Cut:
        counts = [int(n) for n in output["batch_num_images"]]
        of_document = np.repeat(counts, counts)[place]
        height, width = (int(n) for n in output["image_sizes"][place])
        return self._cut(height, width, None, int(of_document))

    def arguments(self, images: Sequence[PreparedImage], by_document: Sequence[int]) -> dict[str, Tensor]:
        # Tiles of all images, concatenated: the model also takes one row for each image, with padding
        counts = torch.tensor([n for n in by_document if n])
        return {**super().arguments(images, by_document), "batch_num_images": counts}

    def list_sizes(self) -> Sizes:
        name = "image_grid_pinpoints"
        has, needs = ([[*pair] for pair in getattr(part, name)] for part in (self._processor, self._config))
        return [*super().list_sizes(), (name, has, name, needs)]

    def _list_inputs(self, image: Image, of_document: int) -> list[Any]:
        # The processor cuts no image of a list with two; the second one is small
        return [[image] if of_document == 1 else [image, image.crop((0, 0, 8, 8))]]

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        side = self._grid_side
        if of_document != 1:
            return Cut(whole=side**2 + 1)
        lines, columns = (side * tiles for tiles in self._best_tiles((height, width)))
        if width / height > columns / lines:
            lines -= (lines - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (lines / height), 7))) // 2 * 2
        most_tiles = int(self._config.vision_aspect_ratio.removeprefix("anyres_max_"))
        if (shrink := math.sqrt(lines * columns / (most_tiles * side**2))) > 1.1:
            lines, columns = int(lines // shrink), int(columns // shrink)
        return Cut(whole=side**2 + lines * (columns + 1))

    def _best_tiles(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the lines and columns of tiles that an image of this height and width is cut into."""
        from transformers.image_processing_utils import select_best_resolution

        height, width = select_best_resolution(size, self._processor.image_grid_pinpoints)
        return height // self._tile, width // self._tile

    @property
    def _of_tile(self) -> int:
        return self._grid_side**2


class PixtralImages(ImageFamily):
    """Mistral 3: an image keeps its shape; its tokens come line by line."""

    needed = ("patch_size", "size", "do_resize")
    described = ("image_sizes",)
    _of_tile = 1

    @property
    def _tile(self) -> int:
        return int(side_of(self._vision.patch_size) * self._config.spatial_merge_size)

    def seen(self, tokens: int, size: tuple[int, int], of_document: int) -> tuple[int, int]:
        patches = tokens * self._config.spatial_merge_size**2
        return patches, patches

    def saved(self) -> dict[str, object]:
        merge = self._config.spatial_merge_size
        return {"patch_size": self._tile // merge, "spatial_merge_size": merge}

    def cut_from_output(self, output: Mapping[str, Any], place: int) -> Cut:
        height, width = (int(n) for n in output["image_sizes"][place])
        return Cut(height // self._tile, 1, width // self._tile)

    def arguments(self, images: Sequence[PreparedImage], by_document: Sequence[int]) -> dict[str, Tensor]:
        sizes = [image.size for image in images]
        values = np.zeros((len(images), RGB, *np.max(sizes, axis=0)), np.uint8)
        for image, (height, width), padded in zip(images, sizes, values, strict=True):
            padded[:, :height, :width] = image.values[0]
        return {"pixel_values": torch.from_numpy(values), "image_sizes": torch.tensor(sizes)}

    def list_sizes(self) -> Sizes:
        longest, most = self._processor.size["longest_edge"], side_of(self._vision.image_size)
        if longest > most:
            problem = f"the image processor's size['longest_edge'] is {longest}"
            raise InputError(f"{problem}, the model's tower sees {most} pixels; set it to {most} at most")
        return []

    def options(self, most_pixels: int | None = None) -> dict[str, Any]:
        size = {} if most_pixels is None else {"size": {"longest_edge": self._edge(most_pixels)}}
        return {"patch_size": self._tile} | size

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        if not self._processor.do_resize:
            return Cut(height // self._tile, 1, width // self._tile)
        edge = self._edge(most_pixels)
        ratio = max(height / edge, width / edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        lines, columns = ((side - 1) // self._tile + 1 for side in (height, width))
        if not (lines and columns):
            raise ValueError("it would be less than one pixel high or wide")
        return Cut(lines, 1, columns)

    def _edge(self, most_pixels: int | None) -> int:
        longest: int = self._processor.size["longest_edge"]
        return longest if most_pixels is None else min(longest, max(self._tile, math.isqrt(most_pixels)))


class Gemma3Images(SquareTiles):
    """Gemma 3: every image becomes one square, with the same number of tokens."""

    needed = ("do_pan_and_scan", "size")
    both_ways, token_types = True, TOKEN_TYPES
    shrinks = False

    def cut_from_output(self, output: Mapping[str, Any], place: int) -> Cut:
        return Cut(whole=self._of_tile)

    def list_sizes(self) -> Sizes:
        if self._processor.do_pan_and_scan:
            raise InputError("the image processor's do_pan_and_scan is True; set it to False")
        return super().list_sizes()

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        return Cut(whole=self._of_tile)

    @property
    def _of_tile(self) -> int:
        return math.isqrt(self._config.mm_tokens_per_image) ** 2


_FAMILIES: dict[str, type[ImageFamily]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QwenVLImages),
    **dict.fromkeys(("idefics3", "smolvlm"), SplitImages),
    "llava_onevision": AnyresImages,
    "internvl": CanvasImages,
    "mistral3": PixtralImages,
    "gemma3": Gemma3Images,
}


def make_image_family(config: PretrainedConfig, image_processor: Any) -> ImageFamily:
    """Create the image family of a model from its image processor.

    Raises:
        InputError: the model takes no images, is not supported, or has another processor.
    """
    get_image_tokens(config)
    return _FAMILIES[config.model_type](image_processor, config)


def _scale(height: int, width: int, longest: int, step: int = 1) -> tuple[int, int]:
    """Scale the longest side, and the other to a multiple of `step` (1 or 2), as Idefics' processors do."""
    ratio = width / height
    other = int(longest / ratio) if width >= height else int(longest * ratio)
    other = max(other + other % step, 1)
    return (other, longest) if width >= height else (longest, other)

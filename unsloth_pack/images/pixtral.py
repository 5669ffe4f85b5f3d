"""Mistral 3: whole images in sizes of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.images.family import RGB
from unsloth_pack.images.tiled import TiledImages, Tiles, longest_edge, side_of
from unsloth_pack.images.tokens import Cut


class PixtralImages(TiledImages):
    """Mistral 3: an image keeps its shape; its tokens come line by line."""

    needed = ("patch_size", "size", "do_resize")
    described = ("image_sizes",)
    own_limit = "size={'longest_edge': pixels}"

    def seen(self, tokens: int, size: tuple[int, int], of_document: int) -> tuple[int, int]:
        patches = tokens * self._config.spatial_merge_size**2
        return patches, patches

    @property
    def most_pixels(self) -> int:
        return self._longest**2

    def pixels_of_tokens(self, tokens: int) -> int:
        return tokens * self._token**2

    def saved(self) -> dict[str, Any]:
        merge = self._config.spatial_merge_size
        return {"patch_size": self._token // merge, "spatial_merge_size": merge}

    def cut_from_output(self, output: Any, place: int) -> Cut:
        height, width = (int(n) for n in output["image_sizes"][place])
        return Cut(height // self._token, 1, width // self._token)

    def arguments(self, images: Sequence[Tiles], by_document: Sequence[int]) -> dict[str, Any]:
        import torch

        sizes = [image.size for image in images]
        most = np.max(sizes, axis=0)
        values = np.zeros((len(images), RGB, *most), np.uint8)
        for image, (height, width), padded in zip(images, sizes, values, strict=True):
            padded[:, :height, :width] = image.values[0]
        return {"pixel_values": torch.from_numpy(values), "image_sizes": torch.tensor(sizes)}

    def _sizes(self) -> list[tuple[str, Any, str, Any]]:
        most = side_of(self._vision.image_size)
        if self._longest > most:
            problem = f"the image processor's size['longest_edge'] is {self._longest}"
            raise InputError(f"{problem}, the model's tower sees {most} pixels; set it to {most} at most")
        return []

    def _options(self, most_pixels: int | None) -> dict[str, Any]:
        size = {} if most_pixels is None else {"size": {"longest_edge": self._edge(most_pixels)}}
        return {"patch_size": self._token} | size

    def _take_first(self, output: Any, of_document: int) -> Tiles:
        height, width = (int(n) for n in output["image_sizes"][0])
        return Tiles(
            output["pixel_values"].astype(np.uint8), (height, width), self.cut_from_output(output, 0)
        )

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        if not self._processor.do_resize:
            return Cut(height // self._token, 1, width // self._token)
        edge = self._edge(most_pixels)
        ratio = max(height / edge, width / edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        lines, columns = ((side - 1) // self._token + 1 for side in (height, width))
        if not (lines and columns):
            raise ValueError("it would be less than one pixel high or wide")
        return Cut(lines, 1, columns)

    def _edge(self, most_pixels: int | None) -> int:
        limit = self._longest if most_pixels is None else max(self._token, math.isqrt(most_pixels))
        return min(self._longest, limit)

    @property
    def _longest(self) -> int:
        return longest_edge(self._processor)

    @property
    def _token(self) -> int:
        """Pixels a side of one token."""
        return side_of(self._vision.patch_size) * self._config.spatial_merge_size

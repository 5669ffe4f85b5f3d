"""Qwen-VL: patches of an image, cut once on the host as bytes and normalised on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.images.family import RGB, ImageFamily
from unsloth_pack.images.tokens import Cut
from unsloth_pack.models.spec import MODALITIES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches of one image in the tower's order.

    Args:
        values: `[patches, 3 * patch * patch]` uint8, of one frame: all frames of a picture are equal.
        grid: frames, rows and columns of patches.
    """

    values: np.ndarray
    grid: tuple[int, int, int]


class QwenVLImages(ImageFamily[Patches]):
    """Cut images into patches; the image processor resizes them."""

    needed = ("patch_size", "merge_size", "temporal_patch_size", "get_number_of_image_patches")
    described = ("image_grid_thw",)

    @property
    def merge_size(self) -> int:
        """Patches a side of one token."""
        return self._processor.merge_size

    @property
    def most_pixels(self) -> int:
        return self._processor.size["longest_edge"]

    @property
    def pixel_limits(self) -> tuple[int, int]:
        return self._processor.size["shortest_edge"], self.most_pixels

    @property
    def token_types(self) -> str:
        return MODALITIES  # from which transformers' models compute positions on three axes

    def pixels_of_tokens(self, tokens: int) -> int:
        return tokens * (self._processor.patch_size * self.merge_size) ** 2

    def seen(self, tokens: int, size: tuple[int, int], of_document: int) -> tuple[int, int]:
        patches = tokens * self.merge_size**2
        return patches, patches

    def saved(self) -> dict[str, Any]:
        return {}

    def normalised(self, values: Tensor) -> Tensor:
        """Normalise `[patches, 3 * patch * patch]` to `[patches, 3 * frames * patch * patch]`."""
        pixels = self._scaled(values.reshape(len(values), RGB, 1, -1))
        return pixels.expand(-1, -1, self._frames, -1).reshape(len(values), -1)

    def cut_from_output(self, output: Any, place: int) -> Cut:
        return Cut(whole=int(output["image_grid_thw"][place].prod()) // self.merge_size**2)

    def get_cut(self, image: Patches) -> Cut:
        return Cut(whole=len(image.values) // self.merge_size**2)

    def grids(self, images: Sequence[Patches]) -> np.ndarray:
        patches = np.array([image.grid for image in images], dtype=np.int64).reshape(-1, 3)
        return patches // [1, self.merge_size, self.merge_size]

    def arguments(self, images: Sequence[Patches], by_document: Sequence[int]) -> dict[str, Any]:
        import torch

        values = torch.from_numpy(np.concatenate([image.values for image in images]))
        return {"pixel_values": values, "image_grid_thw": torch.tensor([image.grid for image in images])}

    def _sizes(self) -> list[tuple[str, Any, str, Any]]:
        processor, vision = self._processor, self._config.vision_config
        names = {"merge_size": "spatial_merge_size"}
        names |= {name: name for name in ("patch_size", "temporal_patch_size")}
        return [
            (ours, getattr(processor, ours), theirs, getattr(vision, theirs))
            for ours, theirs in names.items()
        ]

    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        limits = {} if most_pixels is None else self._limits(most_pixels)
        options = {"min_pixels": limits["shortest_edge"], "max_pixels": most_pixels} if limits else {}
        patches = self._processor.get_number_of_image_patches(height, width, options)
        return Cut(whole=patches // self.merge_size**2)

    def _options(self, most_pixels: int | None) -> dict[str, Any]:
        return {} if most_pixels is None else {"size": self._limits(most_pixels)}

    def _take_first(self, output: Any, of_document: int) -> Patches:
        frames = output["pixel_values"].reshape(len(output["pixel_values"]), RGB, self._frames, -1)
        time, height, width = (int(n) for n in output["image_grid_thw"][0])
        return Patches(frames[:, :, 0].astype(np.uint8).reshape(len(frames), -1), (time, height, width))

    @property
    def _frames(self) -> int:
        return self._processor.temporal_patch_size

    def _limits(self, most_pixels: int) -> dict[str, int]:
        least = min(self._processor.size["shortest_edge"], most_pixels)
        return {"shortest_edge": least, "longest_edge": most_pixels}

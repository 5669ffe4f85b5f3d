"""The patches of an image as bytes, cut once on the host, and as the numbers that a tower takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.data.refusals import fail
from unsloth_pack.images.reading import pixels_of
from unsloth_pack.images.sources import ImageSource, UnreadableImage

if TYPE_CHECKING:
    from torch import Tensor

_RGB = 3


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches of one image in the order in which the tower reads them.

    Args:
        values: `[patches, 3 * patch * patch]` uint8, of one frame: of a picture all frames are equal.
        grid: frames, rows and columns of patches.
    """

    values: np.ndarray
    grid: tuple[int, int, int]


class PatchMaker:
    """Cuts images into patches as a processor of the Qwen-VL family does, which does the resizing itself.

    Args:
        image_processor: of transformers, with the sizes of patches and of images.
    """

    def __init__(self, image_processor: Any):
        self._processor = image_processor
        self._merged = image_processor.merge_size**2
        self._factor = image_processor.patch_size * image_processor.merge_size

    @property
    def merge_size(self) -> int:
        """Patches a side that one token stands for."""
        return self._processor.merge_size

    @property
    def most_pixels(self) -> int:
        """Pixels above which an image is made smaller."""
        return self._processor.size["longest_edge"]

    def pixels_of_tokens(self, tokens: int) -> int:
        """Pixels of an image of so many tokens."""
        return tokens * self._factor**2

    def tokens(self, source: ImageSource, size: tuple[int, int], most_pixels: int | None = None) -> int:
        """How many tokens an image of this height and width takes.

        Args:
            most_pixels: a limit below that of the processor.

        Raises:
            InputError: the processor refuses such an image, as it does one that is far wider than high.
        """
        limits = {} if most_pixels is None else self._limits(most_pixels)
        options = {"min_pixels": limits["shortest_edge"], "max_pixels": most_pixels} if limits else {}
        try:
            patches = self._processor.get_number_of_image_patches(*size, options)
        except ValueError as error:
            shown = f"{size[0]} by {size[1]} pixels"
            problem = f"an image that the processor refuses ({error})"
            fail(source.index, source.column, problem, shown, "cut it, or remove the row")
        return patches // self._merged

    def __call__(self, source: ImageSource, most_pixels: int | None = None) -> Patches:
        """Read, resize and cut an image.

        Raises:
            InputError: the image cannot be read.
        """
        options = {} if most_pixels is None else {"size": self._limits(most_pixels)}
        # The values stay those of pixels, so they are whole numbers
        made = self._processor(
            [pixels_of(source)], do_rescale=False, do_normalize=False, return_tensors="np", **options
        )
        frames = made["pixel_values"].reshape(len(made["pixel_values"]), _RGB, self._frames, -1)
        grid = tuple(int(n) for n in made["image_grid_thw"][0])
        return Patches(frames[:, :, 0].astype(np.uint8).reshape(len(frames), -1), grid)  # type: ignore[arg-type]

    def of_size(self, source: ImageSource, tokens: int, most_pixels: int | None = None) -> Patches:
        """The patches of an image whose header said how many tokens it takes.

        Raises:
            UnreadableImage: the image cannot be read, or has another size.
        """
        patches = self(source, most_pixels)
        made = len(patches.values) // self._merged
        if made != tokens:
            raise UnreadableImage(
                f"row {source.index}, column {source.column!r}: {source.shown} has {made} tokens, and its "
                f"header said {tokens}; let nothing change it, or remove the row"
            )
        return patches

    def grey(self, tokens: int) -> Patches:
        """Patches without a picture that take so many tokens."""
        n_numbers = _RGB * self._processor.patch_size**2
        values = np.full((tokens * self._merged, n_numbers), 128, np.uint8)
        return Patches(values, (1, self.merge_size, tokens * self.merge_size))

    def normalised(self, values: Tensor) -> Tensor:
        """`[patches, 3 * frames * patch * patch]` float32, on the device of the patches.

        Args:
            values: `[patches, 3 * patch * patch]` uint8.
        """
        import torch

        scale, shift = (torch.from_numpy(each).to(values.device)[:, None, None] for each in self._affine())
        pixels = torch.addcmul(shift, values.reshape(len(values), _RGB, 1, -1).float(), scale)
        return pixels.expand(-1, -1, self._frames, -1).reshape(len(values), -1)

    def _affine(self) -> tuple[np.ndarray, np.ndarray]:
        """`[3]` float32 each: by what the byte of a channel is multiplied, and what is added then."""
        processor = self._processor
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = np.zeros(_RGB), np.ones(_RGB)
        if processor.do_normalize:
            mean, std = np.array(processor.image_mean), np.array(processor.image_std)
        return (factor / std).astype(np.float32), (-mean / std).astype(np.float32)

    @property
    def _frames(self) -> int:
        return self._processor.temporal_patch_size

    def _limits(self, most_pixels: int) -> dict[str, int]:
        least = min(self._processor.size["shortest_edge"], most_pixels)
        return {"shortest_edge": least, "longest_edge": most_pixels}

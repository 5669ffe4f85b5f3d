"""Prepare the images of a family of models: count their tokens, cut them, and describe them to the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.images.reading import ImageSource, read_pixels
from unsloth_pack.images.tokens import Cut

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig

RGB = 3
Sizes = list[tuple[str, object, str, object]]  # names and values of a processor, and those of its model


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """One image for its tower."""

    # uint8 pixels, `[tiles, 3, height, width]`, or patches of one frame, `[patches, 3 * patch * patch]`: all
    # frames of a picture are equal
    values: np.ndarray
    size: tuple[int, ...]  # describes it to the model, such as height and width; () without any
    cut: Cut  # its tokens


class ImageFamily(ABC):
    """Prepare images as the processor of a family of models does, with its own image processor."""

    needed: ClassVar[tuple[str, ...]]  # attributes of an image processor of the family
    # The arguments of a call, beside pixels, that describe the images; first their `size`
    described: ClassVar[tuple[str, ...]] = ()
    shrinks: ClassVar[bool] = True  # whether an image can be shrunk to fewer tokens
    both_ways: ClassVar[bool] = False  # the tokens of an image attend in both directions, see `VisionSpec`
    token_types: ClassVar[str | None] = None  # the argument that tells a model which tokens are images

    def __init__(self, image_processor: Any, config: PretrainedConfig):
        if missing := [name for name in self.needed if not hasattr(image_processor, name)]:
            problem = f"the image processor is a {type(image_processor).__name__}, which has no {missing[0]}"
            raise InputError(f"{problem}; give the one that came with the model")
        self._processor, self._config = image_processor, config
        for ours, has, theirs, needs in self.list_sizes():
            if has != needs:
                problem = f"the image processor's {ours} is {has}, the model's {theirs} {needs}"
                raise InputError(f"{problem}; give the processor that came with the model")

    @abstractmethod
    def list_sizes(self) -> Sizes:
        """List names and values of the image processor, and those of the model that must be equal."""

    @property
    @abstractmethod
    def _tile(self) -> int:
        """Pixels a side of a tile."""

    @property
    @abstractmethod
    def _of_tile(self) -> int:
        """Tokens of a tile."""

    @property
    def most_pixels(self) -> int:
        """Pixels above which an image is shrunk; of a family that shrinks."""
        return int(self._processor.size["longest_edge"] ** 2)

    @abstractmethod
    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        """Implement `cut`; ValueError if the processor refuses such an image."""

    @abstractmethod
    def cut_from_output(self, output: Mapping[str, Any], place: int) -> Cut:
        """Return the tokens of one image of the image processor's output."""

    @property
    def pixel_limits(self) -> tuple[int, int] | None:
        """Pixels below which an image is enlarged, and above which it is shrunk; None with other rules."""
        return None

    def pixels_of_tokens(self, tokens: int) -> int:
        """Return the pixels of an image of so many tokens."""
        return tokens * self._tile**2 // self._of_tile

    def saved(self) -> dict[str, object]:
        """Return the model's sizes in the file of transformers' processor."""
        return {"image_seq_length": self._of_tile}

    def seen(self, tokens: int, size: tuple[int, int], of_document: int) -> tuple[int, int]:
        """Count the patches of an image of so many tokens, and those that each attends to."""
        patches = self._grid_side**2
        return tokens // self._of_tile * patches, patches

    def options(self, most_pixels: int | None = None) -> dict[str, Any]:
        """Return the arguments of the image processor in every call."""
        return {}

    def arguments(self, images: Sequence[PreparedImage], by_document: Sequence[int]) -> dict[str, Tensor]:
        """Return a model's arguments for the images of a row; `pixel_values` are uint8, see `normalised`."""
        arguments = {"pixel_values": torch.from_numpy(np.concatenate([image.values for image in images]))}
        sizes = torch.tensor([image.size for image in images])
        return arguments | dict.fromkeys(self.described[:1], sizes)

    def normalised(self, values: Tensor) -> Tensor:
        """Normalise uint8 `pixel_values` to float32, on their device."""
        return self._scaled(values.flatten(0, -4)).view(values.shape)

    def grids(self, images: Sequence[PreparedImage]) -> np.ndarray | None:
        """Return `[images, 3]` tokens in time, height and width if positions depend on them; else None."""
        return None

    def cut(
        self, source: ImageSource, size: tuple[int, int], most_pixels: int | None = None, of_document: int = 1
    ) -> Cut:
        """Compute the tokens of an image of this height and width, one of so many in its document.

        Raises:
            UnreadableImage: the processor refuses such an image, for example one much wider than high.
        """
        try:
            return self._cut(*size, most_pixels, of_document)
        except ValueError as error:
            height, width = size
            source.refuse(f"an image of {height} by {width} that the processor refuses ({error})", "cut it")

    def __call__(
        self, source: ImageSource, most_pixels: int | None = None, of_document: int = 1
    ) -> PreparedImage:
        """Read, resize and cut an image; UnreadableImage if it cannot be read."""
        # Neither rescaled nor normalised, values stay whole numbers
        plain = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
        images = self._list_inputs(read_pixels(source), of_document)
        return self._take_first(self._processor(images, **plain, **self.options(most_pixels)))

    def _list_inputs(self, image: Image, of_document: int) -> list[Any]:
        return [image]

    def _take_first(self, output: Mapping[str, Any]) -> PreparedImage:
        """Return the first image of the image processor's output, whose values are those of pixels."""
        values = output["pixel_values"]
        values = values[0] if values.ndim == 5 else values  # tiles by image
        size = tuple(int(n) for n in output[self.described[0]][0]) if self.described else ()
        return PreparedImage(values.astype(np.uint8), size, self.cut_from_output(output, 0))

    def _scaled(self, values: Tensor) -> Tensor:
        """Scale uint8 `[n, 3, ...]` to float32, each channel as the image processor does."""
        processor = self._processor
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = np.zeros(RGB), np.ones(RGB)
        if processor.do_normalize:
            mean, std = np.array(processor.image_mean), np.array(processor.image_std)
        affine = (factor / std).astype(np.float32), (-mean / std).astype(np.float32)
        shape = (-1, *[1] * (values.ndim - 2))
        scale, shift = (torch.from_numpy(x).to(values.device).view(shape) for x in affine)
        return torch.addcmul(shift, values.float(), scale)

    @property
    def _vision(self) -> Any:
        return self._config.vision_config

    @property
    def _grid_side(self) -> int:
        """Patches a side of a tile."""
        return side_of(self._vision.image_size) // side_of(self._vision.patch_size)


def side_of(size: int | Sequence[int]) -> int:
    """Return the side of a square in pixels; size may be one number or both sides."""
    return size if isinstance(size, int) else size[0]

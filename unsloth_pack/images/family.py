"""The interface of an image family: count an image's tokens, cut it, and describe it to a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.images.reading import ImageSource, read_pixels, refuse_image
from unsloth_pack.images.tokens import Cut
from unsloth_pack.models import vision_spec_for
from unsloth_pack.models.spec import TOKEN_TYPES

if TYPE_CHECKING:
    from torch import Tensor

Prepared = TypeVar("Prepared")
RGB = 3


class ImageFamily(ABC, Generic[Prepared]):
    """Prepare images as the processor of a family of models does, with its own image processor.

    Args:
        image_processor: of transformers.
        config: of the model.

    Attributes:
        needed: attributes of an image processor of the family.
        own_limit: the image processor's setting that limits the size of an image, for errors; "" without one,
            None if `max_pixels` limits it.
        described: the arguments of a call, beside pixels, that describe the images.
        shrinks: True if an image can be shrunk to fewer tokens.

    Raises:
        InputError: the image processor is of another family, or of other sizes than the model.
    """

    needed: ClassVar[tuple[str, ...]]
    own_limit: ClassVar[str | None] = None
    described: ClassVar[tuple[str, ...]] = ()
    shrinks: ClassVar[bool] = True

    def __init__(self, image_processor: Any, config: Any = None):
        if missing := [name for name in self.needed if not hasattr(image_processor, name)]:
            problem = f"the image processor is a {type(image_processor).__name__}, which has no {missing[0]}"
            raise InputError(f"{problem}; give the one that came with the model")
        self._processor, self._config = image_processor, config
        if config is None:
            return
        for ours, has, theirs, needs in self._sizes():
            if has != needs:
                problem = f"the image processor's {ours} is {has}, the model's {theirs} {needs}"
                raise InputError(f"{problem}; give the processor that came with the model")

    @abstractmethod
    def _sizes(self) -> list[tuple[str, Any, str, Any]]:
        """List names and values of the image processor, and those of the model that must be equal."""

    @abstractmethod
    def saved(self) -> dict[str, Any]:
        """Return the model's sizes in the file of transformers' processor."""

    @property
    @abstractmethod
    def most_pixels(self) -> int:
        """Pixels above which an image is shrunk."""

    @property
    def pixel_limits(self) -> tuple[int, int] | None:
        """Pixels below which an image is enlarged, and above which it is shrunk; None with other rules."""
        return None

    @abstractmethod
    def pixels_of_tokens(self, tokens: int) -> int:
        """Return the pixels of an image of so many tokens."""

    @abstractmethod
    def seen(self, tokens: int, size: tuple[int, int], of_document: int) -> tuple[int, int]:
        """Count the patches of an image, and those that each attends to.

        Args:
            tokens: of the image, without marks.
            size: height and width in pixels.
            of_document: number of images in the document.
        """

    @abstractmethod
    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        """Implement `cut`; ValueError if the processor refuses such an image."""

    @abstractmethod
    def _options(self, most_pixels: int | None) -> dict[str, Any]:
        """Return the arguments of the image processor."""

    @abstractmethod
    def cut_from_output(self, output: Any, place: int) -> Cut:
        """Return the tokens of one image of the image processor's output."""

    @abstractmethod
    def _take_first(self, output: Any, of_document: int) -> Prepared:
        """Return the first image of the image processor's output; its values are those of pixels."""

    @abstractmethod
    def get_cut(self, image: Prepared) -> Cut:
        """Return the tokens of a prepared image."""

    @abstractmethod
    def arguments(self, images: Sequence[Prepared], by_document: Sequence[int]) -> dict[str, Any]:
        """Return a model's arguments for the images of a row; `pixel_values` are uint8, see `normalised`.

        Args:
            images: all of them, at least one.
            by_document: number of images of every document.
        """

    @abstractmethod
    def normalised(self, values: Tensor) -> Tensor:
        """Normalise uint8 `pixel_values` to float32, on their device."""

    def grids(self, images: Sequence[Prepared]) -> np.ndarray | None:
        """Return `[images, 3]` tokens in time, height and width if positions depend on them; else None."""
        return None

    @property
    def both_ways(self) -> bool:
        """True if the tokens of an image attend in both directions, see `VisionSpec`."""
        spec = None if self._config is None else vision_spec_for(self._config.model_type)
        return spec is not None and spec.both_ways

    @property
    def token_types(self) -> str | None:
        """The argument that tells a model which tokens are images, or None."""
        return TOKEN_TYPES if self.both_ways else None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the image processor in every call."""
        return self._options(None)

    def cut(
        self, source: ImageSource, size: tuple[int, int], most_pixels: int | None = None, of_document: int = 1
    ) -> Cut:
        """Compute the tokens of an image of this height and width.

        Args:
            most_pixels: a limit below that of the processor.
            of_document: number of images in the document.

        Raises:
            UnreadableImage: the processor refuses such an image, for example one much wider than high.
        """
        try:
            return self._cut(*size, most_pixels, of_document)
        except ValueError as error:
            _refuse(source, size, str(error))

    def __call__(self, source: ImageSource, most_pixels: int | None = None, of_document: int = 1) -> Prepared:
        """Read, resize and cut an image.

        Raises:
            UnreadableImage: the image cannot be read.
        """
        # Neither rescaled nor normalised, values stay whole numbers
        plain = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
        images = self._list_inputs(read_pixels(source), of_document)
        return self._take_first(self._processor(images, **plain, **self._options(most_pixels)), of_document)

    def _list_inputs(self, image: Any, of_document: int) -> list[Any]:
        return [image]

    def _scaled(self, values: Tensor) -> Tensor:
        """Scale uint8 `[n, 3, ...]` to float32, each channel as the image processor does."""
        import torch

        shape = (-1, *[1] * (values.ndim - 2))
        scale, shift = (torch.from_numpy(x).to(values.device).view(shape) for x in self._affine())
        return torch.addcmul(shift, values.float(), scale)

    def _affine(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the scale and the shift of each channel's bytes, `[3]` float32."""
        processor = self._processor
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = np.zeros(RGB), np.ones(RGB)
        if processor.do_normalize:
            mean, std = np.array(processor.image_mean), np.array(processor.image_std)
        return (factor / std).astype(np.float32), (-mean / std).astype(np.float32)


def _refuse(source: ImageSource, size: tuple[int, int], reason: str) -> NoReturn:
    problem = f"an image that the processor refuses ({reason})"
    refuse_image(source.index, source.column, problem, f"{size[0]} by {size[1]} pixels", "cut it")

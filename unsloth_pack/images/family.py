"""What every family of models does with an image: count its tokens, cut it, and describe it to a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

import numpy as np

from unsloth_pack.errors import InputError
from unsloth_pack.images.reading import ImageSource, pixels_of, refuse_image
from unsloth_pack.images.tokens import Cut
from unsloth_pack.models import vision_spec_for
from unsloth_pack.models.spec import TOKEN_TYPES

if TYPE_CHECKING:
    from torch import Tensor

Made = TypeVar("Made")
RGB = 3


class ImageFamily(ABC, Generic[Made]):
    """Prepares images as the processor of a family of models does, by its own image processor.

    Args:
        image_processor: of transformers.
        config: of the model.

    Attributes:
        needed: what an image processor of the family has.
        own_limit: where `max_pixels` does not limit the size of an image, the setting of the image processor
            that does, for errors; "" where none does.
        described: the arguments of a call, beside pixels, that say which images they are.
        shrinks: whether an image can be made of fewer tokens.

    Raises:
        InputError: the image processor is of another family, or of other sizes than the model.
    """

    needed: ClassVar[tuple[str, ...]]
    own_limit: ClassVar[str | None] = None
    described: ClassVar[tuple[str, ...]] = ()
    shrinks: ClassVar[bool] = True

    def __init__(self, image_processor: Any, config: Any = None):
        if missing := [name for name in self.needed if not hasattr(image_processor, name)]:
            kind = type(image_processor).__name__
            raise InputError(
                f"the image processor is a {kind}, which has no {missing[0]}; give the one that came with "
                "the model"
            )
        self._processor, self._config = image_processor, config
        if config is None:
            return
        for ours, has, theirs, needs in self._sizes():
            if has != needs:
                raise InputError(
                    f"the image processor's {ours} is {has}, the model's {theirs} {needs}; give the "
                    "processor that came with the model"
                )

    @abstractmethod
    def _sizes(self) -> list[tuple[str, Any, str, Any]]:
        """Name and value in the image processor, and name and value in the model, which must be equal."""

    @abstractmethod
    def saved(self) -> dict[str, Any]:
        """What transformers' processor of the family keeps in its file of the model's sizes."""

    @property
    @abstractmethod
    def most_pixels(self) -> int:
        """Pixels above which an image is made smaller."""

    @property
    def pixel_limits(self) -> tuple[int, int] | None:
        """Pixels below which an image is made larger, above which smaller; None where other rules hold."""
        return None

    @abstractmethod
    def pixels_of_tokens(self, tokens: int) -> int:
        """Pixels of an image of so many tokens."""

    @abstractmethod
    def seen(self, tokens: int, size: tuple[int, int], of_document: int) -> tuple[int, int]:
        """Patches of an image that the tower sees, and how many of them each attends to.

        Args:
            tokens: of the image, without marks.
            size: height and width in pixels.
            of_document: how many images the document has.
        """

    @abstractmethod
    def _cut(self, height: int, width: int, most_pixels: int | None, of_document: int) -> Cut:
        """See `cut`; a ValueError says that the processor refuses such an image."""

    @abstractmethod
    def _options(self, most_pixels: int | None) -> dict[str, Any]:
        """Arguments of the image processor."""

    @abstractmethod
    def cut_made(self, made: Any, place: int) -> Cut:
        """The tokens of one image in what the image processor has made."""

    @abstractmethod
    def _taken(self, made: Any, of_document: int) -> Made:
        """The first image in what the image processor has made, its values still those of pixels."""

    @abstractmethod
    def cut_of(self, image: Made) -> Cut:
        """The tokens of an image that has been made."""

    @abstractmethod
    def arguments(self, images: Sequence[Made], by_document: Sequence[int]) -> dict[str, Any]:
        """What a model's call takes of the images of a row; `pixel_values` are uint8, see `normalised`.

        Args:
            images: all of them, at least one.
            by_document: how many every document has.
        """

    @abstractmethod
    def normalised(self, values: Tensor) -> Tensor:
        """`pixel_values` float32, of those that are uint8, where they lie."""

    def grids(self, images: Sequence[Made]) -> np.ndarray | None:
        """`[images, 3]` tokens in time, height and width, where positions are made of them; else None."""
        return None

    @property
    def both_ways(self) -> bool:
        """Whether the tokens of images see each other in both directions, see `VisionSpec`."""
        spec = None if self._config is None else vision_spec_for(self._config.model_type)
        return spec is not None and spec.both_ways

    @property
    def token_types(self) -> str | None:
        """The argument that tells a model which tokens are images; None where it takes none."""
        return TOKEN_TYPES if self.both_ways else None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that the image processor gets in every call."""
        return self._options(None)

    def cut(
        self,
        source: ImageSource,
        size: tuple[int, int],
        most_pixels: int | None = None,
        of_document: int = 1,
    ) -> Cut:
        """The tokens of an image of this height and width.

        Args:
            most_pixels: a limit below that of the processor.
            of_document: how many images the document has.

        Raises:
            UnreadableImage: the processor refuses such an image, as it does one that is far wider than high.
        """
        try:
            return self._cut(*size, most_pixels, of_document)
        except ValueError as error:
            _refuse(source, size, str(error))

    def __call__(self, source: ImageSource, most_pixels: int | None = None, of_document: int = 1) -> Made:
        """Read, resize and cut an image.

        Raises:
            UnreadableImage: the image cannot be read.
        """
        # The values stay those of pixels, so they are whole numbers
        made = self._processor(
            self._given(pixels_of(source), of_document),
            do_rescale=False,
            do_normalize=False,
            return_tensors="np",
            **self._options(most_pixels),
        )
        return self._taken(made, of_document)

    def _given(self, image: Any, of_document: int) -> list[Any]:
        return [image]

    def _scaled(self, values: Tensor) -> Tensor:
        """`[n, 3, ...]` float32 of uint8, as the image processor scales the bytes of each channel."""
        import torch

        shape = (-1, *[1] * (values.ndim - 2))
        scale, shift = (torch.from_numpy(each).to(values.device).view(shape) for each in self._affine())
        return torch.addcmul(shift, values.float(), scale)

    def _affine(self) -> tuple[np.ndarray, np.ndarray]:
        """`[3]` float32 each: by what the byte of a channel is multiplied, and what is added then."""
        processor = self._processor
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = np.zeros(RGB), np.ones(RGB)
        if processor.do_normalize:
            mean, std = np.array(processor.image_mean), np.array(processor.image_std)
        return (factor / std).astype(np.float32), (-mean / std).astype(np.float32)


def _refuse(source: ImageSource, size: tuple[int, int], said: str) -> NoReturn:
    shown = f"{size[0]} by {size[1]} pixels"
    problem = f"an image that the processor refuses ({said})"
    refuse_image(source.index, source.column, problem, shown, "cut it")

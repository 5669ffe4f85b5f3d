"""The images of a model call: its arguments are checked on the host, and turned into features."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.forwards.call import images_in
from unsloth_pack.forwards.frozen_tower import gradients_of
from unsloth_pack.models.vision_spec import VisionSpec

PIXELS = "pixel_values"


@dataclass(frozen=True)
class Images:
    """The images of a call.

    Args:
        pixels: `pixel_values`.
        described: the other arguments that were given, by their names; numbers of patches, pixels and images
            as lists on the host.
        is_blank: they stand in for images that the row does not have.
    """

    pixels: Tensor
    described: Mapping[str, Any]
    is_blank: bool = False


@dataclass(frozen=True)
class Features:
    """What a tower and its aligner make of the images of a call.

    Args:
        of_tokens: `[V, C]`, a row for each token that stands for images.
        sizes: `[images or tiles]` int64, how many of them each has.
        by_layer: `[V, C]` each, for the first layers of the text model.
    """

    of_tokens: Tensor
    sizes: np.ndarray
    by_layer: list[Tensor]

    def of_none(self) -> "Features":
        """Without any row; a backward pass still goes through all that made them, with zeros."""
        return Features(self.of_tokens[:0], self.sizes[:0], [features[:0] for features in self.by_layer])


def take_images(spec: VisionSpec, rest: dict[str, Any]) -> Images | None:
    """The images of a call, taken out of its further arguments; None where it has none.

    Raises:
        InputError: videos; pixels without what describes them, or the reverse; numbers that are none, or that
            describe other pixels; images that the model would leave out.
    """
    if others := [name for name in images_in(rest) if name != PIXELS]:
        raise InputError(f"a packed row comes with {others[0]}; only images are packed, as {PIXELS}")
    pixels = rest.pop(PIXELS, None)
    given = {name: value for name in spec.arguments if (value := rest.pop(name, None)) is not None}
    if pixels is None and not given:
        return None
    needed = (PIXELS, *spec.needed)
    found = given if pixels is None else given | {PIXELS: pixels}
    if missing := [name for name in needed if name not in found]:
        raise InputError(f"a packed row comes with images but no {missing[0]}; give both, or neither")
    if not isinstance(pixels, Tensor) or pixels.ndim not in spec.dimensions:
        shape = list(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        wanted = " or ".join(map(str, spec.dimensions))
        raise InputError(
            f"{PIXELS} is {shape}; give a tensor of {wanted} dimensions, as the model's processor makes it"
        )
    if spec.grid is not None:
        given[spec.grid] = _grids_of(spec.grid, given[spec.grid], pixels)
    if spec.sizes is not None:
        given[spec.sizes] = _sizes_of(spec.sizes, given[spec.sizes], pixels, max(spec.dimensions))
    if (name := spec.of_documents) in given:
        assert name is not None
        given[name] = _whole_numbers(name, given[name], (), "one whole number a document, from 0", least=0)
    if spec.drops_zeros and pixels.device.type == "cpu" and len(pixels) == 1:
        _refuse_zeros(pixels)
    return Images(pixels, given)


def seen(base: Any, spec: VisionSpec, images: Images) -> Features:
    """The features of images, through the tower and the aligner of a model's base model.

    Raises:
        InputError: images of a size that the tower does not take; pixels in tiles are those of other images
            than the sizes.
    """
    tower = base.get_submodule(spec.tower)
    if spec.side is not None:
        _refuse_other_sides(images.pixels, getattr(tower.config, spec.side))
    device = next(tower.parameters()).device
    pixels = images.pixels.to(device, tower.dtype)
    if spec.grid is not None:
        grids = np.array(images.described[spec.grid])
        merge = getattr(tower.config, spec.merge)
        with gradients_of(tower, pixels):
            out = tower(pixels, grid_thw=torch.from_numpy(grids), return_dict=True)
        by_layer = [] if spec.deepstack is None else out.deepstack_features
        return Features(out.pooler_output, grids.prod(axis=1) // merge**2, by_layer)
    try:
        out = base.get_image_features(pixels, **images.described, return_dict=True)
    except RuntimeError as error:
        if "split_sizes" not in str(error):
            raise
        raise InputError(
            f"{PIXELS} holds {len(pixels)} tiles, images of the given sizes have others; give those of the "
            "same images, whole"
        ) from error
    parts = out.pooler_output
    if spec.alike:  # one tensor for all of them, or for those of a row
        of_tokens = torch.cat([part.flatten(0, -2) for part in parts])
        n_images = len(out.last_hidden_state)
        sizes = np.full(n_images, len(of_tokens) // max(n_images, 1))
    else:
        of_tokens, sizes = torch.cat(list(parts)), np.array([len(part) for part in parts])
    return Features(of_tokens, sizes, [])


def _grids_of(name: str, given: Any, pixels: Tensor) -> list[list[int]]:
    grids = _whole_numbers(name, given, (3,), "[images, 3] whole numbers of patches, from 1")
    n_patches = sum(time * height * width for time, height, width in grids)
    if n_patches != len(pixels):
        raise InputError(
            f"{PIXELS} holds {len(pixels)} patches, {name} {n_patches}; give those of the same images"
        )
    return grids


def _sizes_of(name: str, given: Any, pixels: Tensor, dimensions: int) -> list[list[int]]:
    sizes = _whole_numbers(name, given, (2,), "[images, 2] whole numbers of pixels, from 1")
    if pixels.ndim == dimensions and len(sizes) != len(pixels):
        raise InputError(
            f"{PIXELS} holds {len(pixels)} images, {name} {len(sizes)}; give those of the same images"
        )
    return sizes


def _whole_numbers(name: str, given: Any, shape: tuple[int, ...], wanted: str, least: int = 1) -> list[Any]:
    """Lists of `[images, *shape]` whole numbers, of a tensor, an array or lists.

    Raises:
        InputError: something else, or a number below `least`.
    """
    try:
        array = np.asarray(given.cpu() if isinstance(given, Tensor) else given)
    except ValueError:  # lists of several lengths
        array = np.asarray(None)
    if array.ndim != 1 + len(shape) or array.shape[1:] != shape or array.dtype.kind not in "iu":
        raise InputError(f"{name} is {reprlib.repr(given)}; give {wanted}")
    if (array < least).any():
        raise InputError(f"{name} is {reprlib.repr(given)}; give {wanted}")
    return array.astype(np.int64).tolist()


def _refuse_other_sides(pixels: Tensor, side: int) -> None:
    if pixels.shape[-2:] != (side, side):
        raise InputError(
            f"{PIXELS} is {list(pixels.shape)}, the tower takes images of {side} x {side}; give those that "
            "the model's processor has made"
        )


def _refuse_zeros(pixels: Tensor) -> None:
    is_zero = ~pixels.detach().flatten(2).any(dim=-1)[0]
    if is_zero.any():
        number = int(is_zero.nonzero()[0, 0])
        raise InputError(
            f"image {number} of {PIXELS} is zeros, which the model takes for padding and leaves out; give "
            "the images of the row alone"
        )

"""A model of vision and language: the images of a packed row are found, turned into tokens and put in.

Shapes: B rows of T tokens, N tokens of the packed row, V of them stand for images, C features.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from unsloth_pack.errors import InputError
from unsloth_pack.layers.causal_lm import FastCausalLM
from unsloth_pack.layers.deferred_checks import lost_boundaries, lost_images, other_tokens
from unsloth_pack.layers.forward_slot import ForwardCall, images_in
from unsloth_pack.layers.vision.tower import gradients_of
from unsloth_pack.models.spec import DEEPSTACK, MODALITIES, TOKEN_TYPES, VisionSpec
from unsloth_pack.modules.sharding import is_gathered_as_group, is_gathered_by_module
from unsloth_pack.packed_row.describe import add_axes
from unsloth_pack.packed_row.images import RowImages, images_by_document
from unsloth_pack.packed_row.labels import PaddedBatch
from unsloth_pack.packed_row.row import PackedRow

# The images of a model call: its arguments are checked on the host, and turned into features.

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


# An image for a row without any, where something waits for the gradients of what sees images.


def needs_blank_image(model: Any, spec: VisionSpec) -> bool:
    """Whether a row of text alone has to go through the tower and the aligner of a model as well.

    Other processes wait for the gradients of what trains there, and for the parts of weights that are
    sharded. And where nothing else trains, the loss would have no gradient.
    """
    if not torch.is_grad_enabled():
        return False
    parts = [model.base_model.get_submodule(path) for path in (spec.tower, *spec.aligner)]
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        return any(map(_is_waited_for, parts))
    trained_here = {weight for part in parts for weight in part.parameters() if weight.requires_grad}
    return bool(trained_here) and all(
        weight in trained_here for weight in model.parameters() if weight.requires_grad
    )


def _is_waited_for(part: nn.Module) -> bool:
    trains_or_gathers = any(w.requires_grad or is_gathered_by_module(w) for w in part.parameters())
    return trains_or_gathers or any(map(is_gathered_as_group, part.modules()))


def blank_image(spec: VisionSpec, config: Any) -> Images:
    """The arguments of a call with the smallest image that a model takes, all ones; none of it is put in.

    Args:
        config: of the model of vision and language.
    """
    vision = config.vision_config
    names = ("in_channels", "in_chans", "num_channels")
    channels = next(n for name in names if (n := getattr(vision, name, None)) is not None)
    if spec.grid is not None:
        merge = getattr(vision, spec.merge)
        numbers = channels * vision.temporal_patch_size * vision.patch_size**2
        return Images(torch.ones(merge**2, numbers), {spec.grid: [[1, merge, merge]]}, is_blank=True)
    size = [vision.image_size] * 2 if isinstance(vision.image_size, int) else [*vision.image_size]
    if spec.attends == "sizes":
        side = vision.patch_size * config.spatial_merge_size
        size = [side, 2 * side]  # Mistral 3 fails on an image of one token
    n_images = 1 if spec.of_documents is None else 2  # of two images in a document none is cut into tiles
    tiles = [1] * (max(spec.dimensions) - 4)
    described: dict[str, Any] = {}
    if spec.sizes is not None:
        described[spec.sizes] = [size] * n_images
    if spec.of_documents is not None:
        described[spec.of_documents] = [n_images]
    return Images(torch.ones(n_images, *tiles, channels, *size), described, is_blank=True)


class FastVisionLM(FastCausalLM):
    """Takes the place of the class of a model of vision and language (`Qwen3VLForConditionalGeneration`)."""

    vision_spec: VisionSpec

    def _takes_images(self, rest: Mapping[str, Any]) -> bool:
        given = images_in(rest)
        # transformers hides the tokens behind it from one of an image where a batch does not mark them
        is_marked = not (given and self.vision_spec.both_ways) or rest.get(TOKEN_TYPES) is not None
        return set(given) <= {PIXELS} and is_marked

    def _take_images(self, call: ForwardCall) -> None:
        """Find the images of a row, and describe its tokens by them.

        Raises:
            InputError: what `take_images`, `RowImages.of`, `RowImages.axes`, `lost_images` and `other_tokens`
                refuse; positions on three axes that are not those of the images; token types that mark other
                tokens.
        """
        call.rest.pop(MODALITIES, None)  # transformers finds images by them; we by their tokens
        types = call.rest.pop(TOKEN_TYPES, None) if self.vision_spec.both_ways else None
        call.images = take_images(self.vision_spec, call.rest)
        if call.images is None:
            if call.row is not None:
                ids = call.inputs["input_ids"]
                call.lost += lost_images(self.vision_spec, self.config, call.row, ids)
            if needs_blank_image(self, self.vision_spec):
                call.images = blank_image(self.vision_spec, self.config)
                call.describe(replace(call.packed_row, visual=np.empty(0, np.int64), _built={}))
        else:
            call.describe(self._described(call, call.images, types))

    def _look_for_boundaries(self, call: ForwardCall) -> None:
        call.lost += lost_boundaries(self.vision_spec, call.inputs, call.rest)

    def _described(self, call: ForwardCall, images: Images, types: Any) -> PackedRow:
        spec, row, ids = self.vision_spec, call.packed_row, call.inputs["input_ids"]
        if ids is None:
            raise InputError(f"a packed row comes with {PIXELS} and inputs_embeds; give input_ids")
        if row.visual is not None:
            call.lost += other_tokens(spec, self.config, row, ids)
            is_placeholder = np.zeros(row.n_tokens, dtype=bool)
            is_placeholder[row.visual] = True
        else:
            is_placeholder = self._placeholders(ids, types)
            if isinstance(call.described, PaddedBatch):
                is_placeholder = is_placeholder[call.described.places]
        if spec.grid is None:
            if row.visual is not None and row.both_ways == spec.both_ways:
                return row
            return replace(row, visual=np.flatnonzero(is_placeholder), both_ways=spec.both_ways, _built={})
        merge = getattr(self.config.vision_config, spec.merge)
        of_patches = np.array(images.described[spec.grid])
        _refuse_parts_of_tokens(spec.grid, of_patches, merge)
        of_tokens = of_patches // [1, merge, merge]
        found = RowImages.of(is_placeholder, of_tokens.prod(axis=1), row)
        if row.visual is not None and row.axes is not None:
            _refuse_other_shapes(spec.grid, row.axes, found, of_tokens)
            return row
        described = add_axes(replace(row, visual=found.places, _built={}), found.axes(row, of_tokens))
        if row.axes is not None and described.axes is not None:
            _refuse_other_axes(row.axes, described.axes)
        return described

    def _placeholders(self, ids: Tensor, types: Any) -> np.ndarray:
        """`[B * T]` bool: which tokens stand for images. Waits for the device once.

        Args:
            types: 1 at the same tokens, `[B, T]`; or None.
        """
        is_placeholder = ids == getattr(self.config, self.vision_spec.token)
        if types is None:
            return is_placeholder.cpu().numpy().reshape(-1)
        if not isinstance(types, Tensor) or types.shape != ids.shape:
            given = list(types.shape) if isinstance(types, Tensor) else type(types).__name__
            raise InputError(f"{TOKEN_TYPES} is {given}, the input ids {list(ids.shape)}; give one a token")
        both = torch.stack([is_placeholder, types.to(ids.device) == 1]).cpu().numpy().reshape(2, -1)
        differ = np.flatnonzero(both[0] != both[1])
        if len(differ):
            is_image = bool(both[0, differ[0]])
            raise InputError(
                f"{TOKEN_TYPES} of token {differ[0]} is {'not ' * is_image}1, its id is "
                f"{'' if is_image else 'not '}that of an image; leave them out, or give 1 for image tokens"
            )
        return both[0]

    def decoded(self, call: ForwardCall) -> Any:
        if call.images is not None:
            self._put_images_in(call, call.images)
        return super().decoded(call)

    def _put_images_in(self, call: ForwardCall, images: Images) -> None:
        """Replace the token ids of a call by embeddings that hold its images."""
        spec, row, ids = self.vision_spec, call.packed_row, call.inputs["input_ids"]
        features = seen(self.base_model, spec, images)
        if images.is_blank:
            features = features.of_none()
        elif spec.grid is None:
            self._refuse_other_images(row, images, features.sizes)
        embeds = call.inputs["inputs_embeds"]
        places = row.visual_ids
        if isinstance(call.described, PaddedBatch) and row.visual is not None:
            places = row.upload(call.described.places[row.visual])
        if embeds is None:
            known_ids = ids.flatten().index_fill(0, places, 0)  # a placeholder may have no embedding
            embeds = self.fast_decoder.get_input_embeddings()(known_ids.view(ids.shape))
        tokens = features.of_tokens.to(embeds)
        call.inputs["inputs_embeds"] = embeds.flatten(0, 1).index_copy(0, places, tokens).view(embeds.shape)
        call.inputs["input_ids"] = None
        if features.by_layer:
            call.rest[DEEPSTACK] = features.by_layer

    def _refuse_other_images(self, row: PackedRow, images: Images, sizes: np.ndarray) -> None:
        """Refuse images that the tokens of a row do not stand for, once the tower has seen them."""
        name = self.vision_spec.of_documents
        given = images.described.get(name or "")
        hint = ""
        if name is not None:
            found = "is not given" if given is None else f"is {given}"
            hint = f"; {name} {found}, it has to hold the number of images of every document"
        elif self.vision_spec.drops_zeros:
            hint = "; an image of zeros counts as padding"
        assert row.visual is not None
        by_document = images_by_document(row, row.visual, sizes, hint)
        if given is not None and [n for n in given if n] != [n for n in by_document if n]:
            raise InputError(
                f"{name} is {given}, the documents of the row hold {by_document}; give one number a "
                "document, or to the processor a list of images for each"
            )


def _refuse_parts_of_tokens(name: str, of_patches: np.ndarray, merge: int) -> None:
    in_parts = (of_patches[:, 1:] % merge).any(axis=1)
    if in_parts.any():
        image = int(np.flatnonzero(in_parts)[0])
        raise InputError(
            f"{name} of image {image} is {of_patches[image].tolist()}, and {merge} by {merge} patches make a "
            "token; give the grids that the model's processor has made"
        )


def _refuse_other_shapes(name: str, axes: np.ndarray, images: RowImages, of_tokens: np.ndarray) -> None:
    """Refuse images whose tokens have positions of another shape, which were made where they were known."""
    ends = np.cumsum(images.sizes)
    shapes = (axes[:, images.places[ends - 1]] - axes[:, images.starts]).T + 1
    differ = (shapes != of_tokens).any(axis=1)
    if differ.any():
        image = int(np.flatnonzero(differ)[0])
        raise InputError(
            f"{name} gives image {image} {of_tokens[image].tolist()} tokens in time, height and width, its "
            f"positions are of {shapes[image].tolist()}; give the images of this very row, in their order"
        )


def _refuse_other_axes(given: np.ndarray, of_images: np.ndarray) -> None:
    differ = (given != of_images).any(axis=0)
    if differ.any():
        token = int(np.flatnonzero(differ)[0])
        raise InputError(
            f"position_ids of token {token} are {given[:, token].tolist()} in time, height and width, those "
            f"of its images {of_images[:, token].tolist()}; leave them out, or make them agree"
        )

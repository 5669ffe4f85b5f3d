"""Run a model of vision and language: find the images of a packed row, encode them, and put them in.

A loader, a data set's columns or a trainer may drop an argument of a call, and the rest would train on
something else unnoticed. So a row that has lost its images, its ids or its boundaries is refused: before the
decoder runs where the host knows, else after it, so that no check waits for the device.

Shapes: B rows of T tokens, N tokens of the packed row, V of them stand for images, C features.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from unsloth_pack.errors import InputError
from unsloth_pack.layers.causal_lm import FastCausalLM
from unsloth_pack.layers.forward_call import ForwardCall, name_images
from unsloth_pack.layers.vision.tower import tower_gradients
from unsloth_pack.lora.base_model import is_always_the_same
from unsloth_pack.models.spec import DEEPSTACK, MODALITIES, TOKEN_TYPES, VisionSpec
from unsloth_pack.modules import is_gathered_as_group, is_gathered_by_module
from unsloth_pack.packed_row.describe import add_axes
from unsloth_pack.packed_row.images import RowImages, images_by_document
from unsloth_pack.packed_row.padded_batch import PaddedBatch
from unsloth_pack.packed_row.row import PackedRow

PIXELS = "pixel_values"
_ENDS = "nothing says where documents end; give packed_seq_lengths"
_OTHER_IDS = (
    "{} tokens of input_ids are not what packed_row says, which knows where images stand; give ids and "
    "packed_row of one row, as VisionDataCollator makes them"
)


@dataclass(frozen=True)
class Images:
    """The images of a call."""

    pixels: Tensor  # `pixel_values`
    # the call's other arguments about them; numbers of patches, pixels and images as lists
    arguments: Mapping[str, Any]
    is_dummy: bool = False  # it stands in for images that the row does not have


@dataclass(frozen=True)
class Features:
    """The output of a tower and its aligner for the images of a call."""

    by_token: Tensor  # `[V, C]`, a row for each placeholder token
    sizes: np.ndarray  # `[images or tiles]` int64, how many tokens each has
    by_layer: list[Tensor]  # `[V, C]` each, for the first layers of the text model

    def empty(self) -> "Features":
        """Drop all rows; a backward pass still runs through the tower, with zeros."""
        return Features(self.by_token[:0], self.sizes[:0], [features[:0] for features in self.by_layer])


def take_images(spec: VisionSpec, rest: dict[str, Any]) -> Images | None:
    """Take the images of a call out of its further arguments; return None where it has none."""
    if others := [name for name in name_images(rest) if name != PIXELS]:
        raise InputError(f"a packed row comes with {others[0]}; only images are packed, as {PIXELS}")
    pixels = rest.pop(PIXELS, None)
    arguments = {name: value for name in spec.arguments if (value := rest.pop(name, None)) is not None}
    if pixels is None and not arguments:
        return None
    present = arguments if pixels is None else arguments | {PIXELS: pixels}
    if missing := [name for name in (PIXELS, *spec.needed) if name not in present]:
        raise InputError(f"a packed row comes with images but no {missing[0]}; give both, or neither")
    if not isinstance(pixels, Tensor) or pixels.ndim not in spec.dimensions:
        shape = list(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        wanted = " or ".join(map(str, spec.dimensions))
        raise InputError(
            f"{PIXELS} is {shape}; give a tensor of {wanted} dimensions, as the model's processor makes it"
        )
    for name, columns in ((spec.grid, (3,)), (spec.sizes, (2,)), (spec.of_documents, ())):
        if name in arguments:
            arguments[name] = _read_whole_numbers(name, arguments[name], columns)
    number = len(pixels)
    if spec.grid is not None:
        number = sum(map(math.prod, arguments[spec.grid]))
    elif spec.sizes is not None and pixels.ndim == max(spec.dimensions):
        number = len(arguments[spec.sizes])
    if number != len(pixels):
        problem = f"{PIXELS} holds {len(pixels)} patches or images, {spec.needed[0]} {number}"
        raise InputError(f"{problem}; give those of the same images")
    return Images(pixels, arguments)


def _read_whole_numbers(name: str, value: object, columns: tuple[int, ...]) -> list[Any]:
    """List `[images, *columns]` whole numbers, at least 1, or counts `[documents]`, at least 0."""
    array = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    is_right = array.ndim == 1 + len(columns) and array.shape[1:] == columns and array.dtype.kind in "iu"
    if not is_right or (array < len(columns)).any():
        problem = f"{name} is {reprlib.repr(value)}"
        raise InputError(f"{problem}; give whole numbers, as the model's processor makes them")
    numbers: list[Any] = array.astype(np.int64).tolist()
    return numbers


def encode_images(base: Any, spec: VisionSpec, images: Images) -> Features:
    """Compute the features of images with the tower and the aligner of a model's base model."""
    tower = base.get_submodule(spec.tower)
    sides = [] if spec.side is None else [getattr(tower.config, spec.side)] * 2
    if sides and [*images.pixels.shape[-2:]] != sides:
        raise InputError(f"{PIXELS} is {[*images.pixels.shape]}, the tower takes images of {sides}")
    device = next(tower.parameters()).device
    pixels = images.pixels.to(device, tower.dtype)
    if spec.grid is not None:
        grids = np.array(images.arguments[spec.grid])
        merge = getattr(tower.config, spec.merge)
        with tower_gradients(tower, pixels):
            out = tower(pixels, grid_thw=torch.from_numpy(grids), return_dict=True)
        by_layer = [] if spec.deepstack is None else out.deepstack_features
        return Features(out.pooler_output, grids.prod(axis=1) // merge**2, by_layer)
    out = base.get_image_features(pixels, **images.arguments, return_dict=True)
    parts = out.pooler_output
    if spec.alike:  # one tensor for all images, or for those of a row
        by_token = torch.cat([part.flatten(0, -2) for part in parts])
        n_images = len(out.last_hidden_state)
        sizes = np.full(n_images, len(by_token) // max(n_images, 1))
    else:
        by_token, sizes = torch.cat(list(parts)), np.array([len(part) for part in parts])
    return Features(by_token, sizes, [])


def needs_dummy_image(model: Any, spec: VisionSpec) -> bool:
    """Return whether a row of text alone has to run through a model's tower and aligner as well.

    Other processes may wait for gradients or sharded weights there; or nothing else trains.
    """
    if not torch.is_grad_enabled():
        return False
    parts = [model.base_model.get_submodule(path) for path in (spec.tower, *spec.aligner)]
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        return any(map(_is_waited_for, parts))
    trained = {weight for part in parts for weight in part.parameters() if weight.requires_grad}
    return bool(trained) and all(weight in trained for weight in model.parameters() if weight.requires_grad)


def _is_waited_for(part: nn.Module) -> bool:
    trains_or_gathers = any(w.requires_grad or is_gathered_by_module(w) for w in part.parameters())
    return trains_or_gathers or any(map(is_gathered_as_group, part.modules()))


def shape_images(
    spec: VisionSpec, config: Any, sizes: Sequence[tuple[int, int]], largest: tuple[int, int], n_tiles: int
) -> tuple[tuple[int, ...], dict[str, list[list[int]]]]:
    """Return the shape of `pixel_values` that a model takes, without rows, and what describes the images.

    `sizes`, in tokens and padded to `largest`, serve models with free sizes, `n_tiles` those that cut images.
    """
    vision = config.vision_config
    names = ("in_channels", "in_chans", "num_channels")
    channels = next(n for name in names if (n := getattr(vision, name, None)) is not None)
    if spec.grid is not None:
        merge = getattr(vision, spec.merge)
        grids = [[1, merge * height, merge * width] for height, width in sizes]
        numbers = channels * vision.temporal_patch_size * vision.patch_size**2
        return (sum(map(math.prod, grids)), numbers), {spec.grid: grids}
    size = [vision.image_size] * 2 if isinstance(vision.image_size, int) else [*vision.image_size]
    in_pixels = [size] * len(sizes)
    if spec.attends == "sizes":
        unit = vision.patch_size * getattr(config, spec.merge)
        in_pixels = [[unit * height, unit * width] for height, width in sizes]
        size = [unit * side for side in largest]
    tiles = [] if spec.sizes is None or spec.attends == "sizes" else [n_tiles]
    return (len(sizes), *tiles, channels, *size), {} if spec.sizes is None else {spec.sizes: in_pixels}


def add_row(spec: VisionSpec, pixels: Tensor) -> Tensor:
    """Add the dimension of rows to pixels if the model has one."""
    return pixels[None] if pixels.ndim < min(spec.dimensions) else pixels


def make_dummy_image(spec: VisionSpec, config: Any) -> Images:
    """Build a call's arguments for the smallest image that a model takes, all ones; it is not put in."""
    size = (1, 1 if spec.attends != "sizes" else 2)  # Mistral 3 fails on an image of one token
    n_images = 1 if spec.of_documents is None else 2  # two images in a document are not cut into tiles
    shape, described = shape_images(spec, config, [size] * n_images, size, 1)
    arguments: dict[str, Any] = {**described}
    if spec.of_documents is not None:
        arguments[spec.of_documents] = [n_images]
    return Images(add_row(spec, torch.ones(shape)), arguments, is_dummy=True)


class FastVisionLM(FastCausalLM):
    """Replaces the class of a model of vision and language (`Qwen3VLForConditionalGeneration`)."""

    vision_spec: VisionSpec

    def _takes_images(self, rest: Mapping[str, object]) -> bool:
        names = name_images(rest)
        # Without marks transformers lets tokens of an image attend causally
        is_marked = not (names and self.vision_spec.both_ways) or rest.get(TOKEN_TYPES) is not None
        return set(names) <= {PIXELS} and is_marked

    def _take_images(self, call: ForwardCall) -> None:
        """Find the images of a row, and describe its tokens by them."""
        call.rest.pop(MODALITIES, None)  # here images are found by their tokens
        if self.vision_spec.both_ways:
            call.rest.pop(TOKEN_TYPES, None)
        call.images = take_images(self.vision_spec, call.rest)
        if call.images is None:
            if call.row is not None:
                self._refuse_lost_images(call, call.row)
            if needs_dummy_image(self, self.vision_spec):
                call.images = make_dummy_image(self.vision_spec, self.config)
                call.describe(replace(call.packed_row, visual=np.empty(0, np.int64), _built={}))
        else:
            call.describe(self._describe(call, call.images))

    def _refuse_lost_images(self, call: ForwardCall, row: PackedRow) -> None:
        """Refuse a packed row without pixels that has image tokens."""
        message = (
            "a packed row holds {} image tokens and comes without pixel_values; give the images of the row"
        )
        if row.visual is not None and len(row.visual):
            raise InputError(message.format(len(row.visual)))
        if (ids := call.inputs["input_ids"]) is not None:
            token = getattr(self.config, self.vision_spec.token)
            message = f"{message}, or text without token {token}"
            call.require_zero((ids == token).sum(), message)

    def _check_boundaries(self, call: ForwardCall) -> None:
        """Refuse a row of several documents whose call does not say where they end."""
        spec, inputs, rest, ids = self.vision_spec, call.inputs, call.rest, call.inputs["input_ids"]
        if ids is None or inputs["past_key_values"] is not None:
            return
        counts = rest.get(spec.of_documents or "")
        if counts is not None and len(counts) > len(ids):
            raise InputError(
                f"{spec.of_documents} is of {len(counts)} documents, the input ids have {len(ids)} rows, and "
                f"{_ENDS}, or to the processor a list of images for each row"
            )
        if isinstance(rest.get(spec.grid or ""), list):
            raise InputError(f"{spec.grid} is a list, as VisionDataCollator makes it, and {_ENDS}")
        axes, mask = inputs["position_ids"], inputs["attention_mask"]
        if not isinstance(axes, Tensor) or axes.shape != (3, *ids.shape):
            return
        starts_over = (axes[..., 1:] == 0).all(dim=0) & (axes[..., :-1] > 1).any(dim=0)
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            starts_over &= mask[:, 1:].to(axes.device) != 0  # padding behind a document starts over too
        elif mask is not None:
            return
        message = "position_ids in time, height and width start over {} times inside a row, and " + _ENDS
        call.require_zero(torch.count_nonzero(starts_over), message)

    def _describe(self, call: ForwardCall, images: Images) -> PackedRow:
        spec, row, ids = self.vision_spec, call.packed_row, call.inputs["input_ids"]
        if ids is None:
            raise InputError(f"a packed row comes with {PIXELS} and inputs_embeds; give input_ids")
        if row.visual is not None:
            is_placeholder = np.zeros(row.n_tokens, dtype=bool)
            is_placeholder[row.visual] = True
            is_other = ids.flatten() == getattr(self.config, spec.token)
            is_other[row.visual_ids] ^= True
            call.require_zero(is_other.sum(), _OTHER_IDS)
        else:
            is_placeholder = self._find_placeholders(ids)
            if isinstance(call.described, PaddedBatch):
                is_placeholder = is_placeholder[call.described.places]
        if spec.grid is None:
            if row.visual is not None and row.both_ways == spec.both_ways:
                return row
            return replace(row, visual=np.flatnonzero(is_placeholder), both_ways=spec.both_ways, _built={})
        merge = getattr(self.config.vision_config, spec.merge)
        patch_grids = np.array(images.arguments[spec.grid])
        token_grids = patch_grids // [1, merge, merge]
        located = RowImages.locate(is_placeholder, token_grids.prod(axis=1), row)
        described = add_axes(replace(row, visual=located.places, _built={}), located.axes(row, token_grids))
        if row.axes is None or described.axes is None:
            return described
        if len(differ := np.flatnonzero((row.axes != described.axes).any(axis=0))):
            token = differ[0]
            raise InputError(
                f"position_ids of token {token} are {row.axes[:, token].tolist()} in time, height and width, "
                f"those of its images {described.axes[:, token].tolist()}; leave them out, or make them agree"
            )
        return described if row.visual is None else row

    def _find_placeholders(self, ids: Tensor) -> np.ndarray:
        """Return `[B * T]` bool: tokens that stand for images. Waits for the device."""
        is_image: Tensor = ids == getattr(self.config, self.vision_spec.token)
        return is_image.cpu().numpy().reshape(-1)

    def run_decoder(self, call: ForwardCall) -> Any:
        if call.images is not None:
            self._put_images_in(call, call.images)
        return super().run_decoder(call)

    def encode_once(self, call: ForwardCall) -> None:
        if call.images is None or call.features is not None:
            return
        parts = [
            self.base_model.get_submodule(p) for p in (self.vision_spec.tower, *self.vision_spec.aligner)
        ]
        if all(map(is_always_the_same, parts)):
            call.features = encode_images(self.base_model, self.vision_spec, call.images)

    def _put_images_in(self, call: ForwardCall, images: Images) -> None:
        """Replace the token ids of a call by embeddings that hold its images."""
        spec, row, ids = self.vision_spec, call.packed_row, call.inputs["input_ids"]
        features = call.features or encode_images(self.base_model, spec, images)
        if images.is_dummy:
            features = features.empty()
        elif spec.grid is None:
            self._refuse_other_images(row, images, features.sizes)
        embeds = call.inputs["inputs_embeds"]
        places = row.visual_ids
        if isinstance(call.described, PaddedBatch) and row.visual is not None:
            places = row.upload(call.described.places[row.visual])
        if embeds is None:
            known_ids = ids.flatten().index_fill(0, places, 0)  # a placeholder may have no embedding
            embeds = self.fast_decoder.get_input_embeddings()(known_ids.view(ids.shape))
        tokens = features.by_token.to(embeds)
        call.inputs["inputs_embeds"] = embeds.flatten(0, 1).index_copy(0, places, tokens).view(embeds.shape)
        call.inputs["input_ids"] = None
        if features.by_layer:
            call.rest[DEEPSTACK] = features.by_layer

    def _refuse_other_images(self, row: PackedRow, images: Images, sizes: np.ndarray) -> None:
        """Refuse encoded images that do not match the placeholder tokens of a row."""
        assert row.visual is not None
        by_document = images_by_document(row, row.visual, sizes)
        name = self.vision_spec.of_documents
        counts = images.arguments.get(name or "")
        if counts is not None and [n for n in counts if n] != [n for n in by_document if n]:
            raise InputError(
                f"{name} is {counts}, the documents of the row hold {by_document}; give one number a "
                "document, or to the processor a list of images for each"
            )

"""A model of vision and language: the images of a packed row are found, turned into tokens and put in.

Shapes: B rows of T tokens, N tokens of the packed row, V of them stand for images, C features.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.forwards.blank_image import blank_image, needs_blank_image
from unsloth_pack.forwards.call import Call, images_in
from unsloth_pack.forwards.causal_lm import FastCausalLM
from unsloth_pack.forwards.image_arguments import PIXELS, Images, seen, take_images
from unsloth_pack.forwards.lost_parts import lost_boundaries, lost_images, other_tokens
from unsloth_pack.models.vision_spec import DEEPSTACK, MODALITIES, TOKEN_TYPES, VisionSpec
from unsloth_pack.row.from_call import with_axes
from unsloth_pack.row.images import RowImages, images_by_document
from unsloth_pack.row.packed_row import PackedRow
from unsloth_pack.row.padded_batch import PaddedBatch


class FastVisionLM(FastCausalLM):
    """Takes the place of the class of a model of vision and language (`Qwen3VLForConditionalGeneration`)."""

    vision_spec: VisionSpec

    def _takes_images(self, rest: Mapping[str, Any]) -> bool:
        given = images_in(rest)
        # transformers hides the tokens behind it from one of an image where a batch does not mark them
        is_marked = not (given and self.vision_spec.both_ways) or rest.get(TOKEN_TYPES) is not None
        return set(given) <= {PIXELS} and is_marked

    def _take_images(self, call: Call) -> None:
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

    def _look_for_boundaries(self, call: Call) -> None:
        call.lost += lost_boundaries(self.vision_spec, call.inputs, call.rest)

    def _described(self, call: Call, images: Images, types: Any) -> PackedRow:
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
        described = with_axes(replace(row, visual=found.places, _built={}), found.axes(row, of_tokens))
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

    def decoded(self, call: Call) -> Any:
        if call.images is not None:
            self._put_images_in(call, call.images)
        return super().decoded(call)

    def _put_images_in(self, call: Call, images: Images) -> None:
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

"""Check that a row with images has not lost its images, its ids, or its boundaries on the way to the model.

A loader, a data set's columns or a trainer may drop an argument of a call, and the rest would train on
something else unnoticed. Numbers on the host are checked before the decoder runs. Those on a device are
copied meanwhile and checked after it, before any backward pass, so that no check waits for the device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from unsloth_pack.errors import InputError
from unsloth_pack.models.spec import VisionSpec
from unsloth_pack.packed_row.labels import DeferredCheck
from unsloth_pack.packed_row.row import PackedRow

_AXES = 3  # time, height and width


def check_images(
    spec: VisionSpec, config: PreTrainedConfig, row: PackedRow, ids: Tensor | None
) -> list[DeferredCheck]:
    """Refuse a packed row without pixels that has image tokens.

    Raises:
        InputError: the host knows of some.
    """
    message = "a packed row holds {} image tokens and comes without pixel_values; give the images of the row"
    if row.visual is not None and len(row.visual):
        raise InputError(message.format(len(row.visual)))
    if ids is None:
        return []
    token = getattr(config, spec.token)
    return DeferredCheck.start((ids == token).sum(), f"{message}, or text without token {token}")


def check_image_tokens(
    spec: VisionSpec, config: PreTrainedConfig, row: PackedRow, ids: Tensor
) -> list[DeferredCheck]:
    """Refuse a row that says where its images stand, with ids of image tokens elsewhere.

    Raises:
        InputError: the host knows of some.
    """
    is_other = ids.flatten() == getattr(config, spec.token)
    is_other[row.visual_ids] ^= True
    message = (
        "{} tokens of input_ids are not what packed_row says, which knows where images stand; give ids and "
        "packed_row of one row, as VisionDataCollator makes them"
    )
    return DeferredCheck.start(is_other.sum(), message)


def check_boundaries(
    spec: VisionSpec, inputs: Mapping[str, Any], rest: Mapping[str, Any]
) -> list[DeferredCheck]:
    """Refuse a row of several documents whose call does not say where they end.

    Raises:
        InputError: the host knows of several.
    """
    ids = inputs["input_ids"]
    if ids is None or inputs["past_key_values"] is not None:
        return []
    counts = rest.get(spec.of_documents or "")
    if counts is not None and len(counts) > len(ids):
        raise InputError(
            f"{spec.of_documents} is of {len(counts)} documents, the input ids have {len(ids)} rows, and "
            "nothing says where documents end; give packed_seq_lengths, or to the processor a list of images "
            "for each row"
        )
    if isinstance(rest.get(spec.grid or ""), list):
        raise InputError(
            f"{spec.grid} is a list, as VisionDataCollator makes it for a packed row, and nothing says where "
            "documents end; give packed_row or packed_seq_lengths, too"
        )
    axes = inputs["position_ids"]
    if not isinstance(axes, Tensor) or axes.shape != (_AXES, *ids.shape):
        return []
    starts_over = (axes[..., 1:] == 0).all(dim=0) & (axes[..., :-1] > 1).any(dim=0)
    mask = inputs["attention_mask"]
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        starts_over &= mask[:, 1:].to(axes.device) != 0  # padding behind a document starts over too
    elif mask is not None:
        return []
    message = (
        "position_ids in time, height and width start over {} times inside a row, and nothing says where "
        "documents end; give packed_seq_lengths, or position_ids [4, B, T]"
    )
    return DeferredCheck.start(torch.count_nonzero(starts_over), message)

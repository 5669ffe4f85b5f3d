"""What a row with images may have lost on its way to the model: its images, its ids, or where documents end.

A loader, a data set's columns or a trainer may drop an argument of a call, and the rest of it would train on
something else without a word. Numbers on the host are looked at before the decoder runs. Those on a device
are copied meanwhile and looked at behind it, before any backward pass, so that no look waits for the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.host_copy import HostCopy
from unsloth_pack.models.spec import VisionSpec
from unsloth_pack.packed_row.row import PackedRow

_AXES = 3  # time, height and width


@dataclass(frozen=True)
class DeferredCheck:
    """A count that is 0 in a whole row.

    Args:
        count: on its way to the host where it comes from a device.
        said: of the error; `{}` stands for the count.
    """

    count: HostCopy
    said: str

    @classmethod
    def sought(cls, count: Tensor, said: str) -> list["DeferredCheck"]:
        """What is to be refused behind the decoder: nothing where the count is on the host.

        Raises:
            InputError: the count is on the host, and not 0.
        """
        lost = cls(HostCopy(count), said)
        if count.device.type != "cpu":
            return [lost]
        lost.refuse()
        return []

    def refuse(self) -> None:
        """Refuse the row.

        Raises:
            InputError: the count is not 0.
        """
        if count := int(self.count.read()):
            raise InputError(self.said.format(count))


def lost_images(spec: VisionSpec, config: Any, row: PackedRow, ids: Tensor | None) -> list[DeferredCheck]:
    """A packed row without pixels that has image tokens.

    Raises:
        InputError: the row has some, as far as the host knows.
    """
    name = "a packed row holds {} image tokens and comes without pixel_values; give the images of the row"
    if row.visual is not None and len(row.visual):
        raise InputError(name.format(len(row.visual)))
    if ids is None:
        return []
    token = getattr(config, spec.token)
    said = f"{name}, or text without token {token}"
    return DeferredCheck.sought((ids == token).sum(), said)


def other_tokens(spec: VisionSpec, config: Any, row: PackedRow, ids: Tensor) -> list[DeferredCheck]:
    """A row that says where its images stand, and ids of image tokens elsewhere.

    Raises:
        InputError: there are some, as far as the host knows.
    """
    is_other = ids.flatten() == getattr(config, spec.token)
    is_other[row.visual_ids] ^= True
    said = (
        "{} tokens of input_ids are not what packed_row says, which knows where images stand; give ids and "
        "packed_row of one row, as VisionDataCollator makes them"
    )
    return DeferredCheck.sought(is_other.sum(), said)


def lost_boundaries(
    spec: VisionSpec, inputs: Mapping[str, Any], rest: Mapping[str, Any]
) -> list[DeferredCheck]:
    """Several documents in a row of which a call does not say where they end.

    Args:
        inputs: the decoder's named arguments, which describe no packed row.
        rest: the others.

    Raises:
        InputError: there are several, as far as the host knows.
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
    said = (
        "position_ids in time, height and width start over {} times inside a row, and nothing says where "
        "documents end; give packed_seq_lengths, or position_ids [4, B, T]"
    )
    return DeferredCheck.sought(torch.count_nonzero(starts_over), said)

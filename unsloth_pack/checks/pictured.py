"""A model of vision and language under test, and random documents with images for it.

Shapes: T tokens of a row or L of a document, P patches of all its images, V words of the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.checks.subject import Subject
from unsloth_pack.models.vision_spec import VisionSpec
from unsloth_pack.row.images import RowImages
from unsloth_pack.row.packed_row import PackedRow

# Text and images, an image as its tokens in height and width: first, last, none, three of unequal size
_DOCUMENTS: tuple[tuple[int | tuple[int, int], ...], ...] = (
    ((2, 3), 5),
    (9,),
    (3, (1, 1), 2, (2, 4), 1, (3, 1), 6),
    (7, (4, 2)),
)


@dataclass(frozen=True)
class Pictured:
    """A document with images.

    Args:
        ids: `[L]` int64, a placeholder for each token of an image.
        grids: `[images, 3]` int64, the patches of every image in time, height and width.
        pixels: `[P, numbers of a patch]` float32.
    """

    ids: Tensor
    grids: Tensor
    pixels: Tensor


class PicturedSubject:
    """A model of vision and language, and how its packed rows are described to it.

    Args:
        subject: the model, described as it is with text alone.
        spec: how it takes images.

    The description "position_ids" means those along the text, then in time, height and width. A function that
    takes `axes`, too, gets `[3, 1, T]`, the latter three.
    """

    def __init__(self, subject: Subject, spec: VisionSpec):
        self.subject, self.spec = subject, spec
        self.config = subject.model.config

    def documents(self, generator: torch.Generator) -> list[Pictured]:
        """Random ones."""
        vision = self.config.vision_config
        merge, token = getattr(vision, self.spec.merge), getattr(self.config, self.spec.token)
        channels = getattr(vision, "in_channels", None) or vision.in_chans
        n_pixels = channels * vision.temporal_patch_size * vision.patch_size**2
        made = []
        for parts in _DOCUMENTS:
            sizes = [part for part in parts if isinstance(part, tuple)]
            grids = torch.tensor([[1, merge * h, merge * w] for h, w in sizes], dtype=torch.int64).view(-1, 3)
            ids = [
                torch.full((part[0] * part[1],), token)
                if isinstance(part, tuple)
                else torch.randint(self._lowest_special, (part,), generator=generator)
                for part in parts
            ]
            pixels = torch.randn(int(grids.prod(-1).sum()), n_pixels, generator=generator)
            made.append(Pictured(torch.cat(ids), grids, pixels))
        return made

    @property
    def _lowest_special(self) -> int:
        """Token ids below it are of text: those of images and videos, and around them, have a meaning."""
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return min(
            self.subject.vocab_size, *(getattr(self.config, n, self.subject.vocab_size) for n in names)
        )

    def logits(self, documents: Sequence[Pictured], pixels: Tensor | None = None) -> tuple[Tensor, ...]:
        """`[L, V]` of every document in one row of all."""
        lengths = [len(document.ids) for document in documents]
        given = self._images(documents, pixels) | self._described(documents, lengths)
        ids = torch.cat([document.ids for document in documents])[None].to(self.subject.device)
        return self.subject.model(input_ids=ids, **given).logits[0].split(lengths)

    def logits_alone(self, document: Pictured) -> Tensor:
        """`[L, V]` of a document in a row of its own."""
        ids = document.ids[None].to(self.subject.device)
        given = self._images([document], None)
        given["position_ids"] = self._axes([document])
        return self.subject.model(input_ids=ids, use_cache=False, **given).logits[0]

    def pixels(self, documents: Sequence[Pictured]) -> Tensor:
        joined = torch.cat([document.pixels for document in documents])
        return joined.to(self.subject.device, self.subject.dtype)

    def _images(self, documents: Sequence[Pictured], pixels: Tensor | None) -> dict[str, Any]:
        grids = torch.cat([document.grids for document in documents])
        if not len(grids):
            return {}
        pixels = self.pixels(documents) if pixels is None else pixels
        assert self.spec.grid is not None
        return {"pixel_values": pixels, self.spec.grid: grids.to(self.subject.device)}

    def _described(self, documents: Sequence[Pictured], lengths: list[int]) -> dict[str, Any]:
        axes = self._axes(documents)
        if self.subject.description == "position_ids":
            along = torch.cat([torch.arange(length) for length in lengths])[None, None]
            return {"position_ids": torch.cat([along.to(axes.device), axes])}
        return self.subject.described(lengths, axes)

    def _axes(self, documents: Sequence[Pictured]) -> Tensor:
        """`[3, 1, T]`."""
        row = PackedRow.of_lengths(tuple(len(d.ids) for d in documents), torch.device("cpu"))
        merge = getattr(self.config.vision_config, self.spec.merge)
        grids = torch.cat([document.grids for document in documents]).numpy() // [1, merge, merge]
        is_placeholder = torch.cat([d.ids for d in documents]) == getattr(self.config, self.spec.token)
        images = RowImages.of(is_placeholder.numpy(), grids.prod(axis=1), row)
        return torch.from_numpy(images.axes(row, grids))[:, None].to(self.subject.device)

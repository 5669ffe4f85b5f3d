"""A call of a causal language model that has come in."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unsloth_pack.forwards.lost_parts import Lost
from unsloth_pack.row.packed_row import PackedRow
from unsloth_pack.row.padded_batch import PaddedBatch

_OF_IMAGES = (
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "mm_encoder_outputs",
    "image_hidden_states",  # of transformers below 5.20
)


@dataclass
class Call:
    """A call that has come in.

    Args:
        described: its packed row, or the padded batch that becomes one inside the decoder; None for a batch
            that keeps its padding.
        inputs: the decoder's named arguments.
        rest: the others; neither the row's nor the loss's.
        images: pixels and grids that have been taken out of them.
        lost: what it may have lost, to refuse when the decoder has run.
    """

    described: PackedRow | PaddedBatch | None
    inputs: dict[str, Any]
    rest: dict[str, Any]
    images: Any = None
    lost: list[Lost] = field(default_factory=list)

    @property
    def row(self) -> PackedRow | None:
        """The packed row that the caller has given."""
        return self.described if isinstance(self.described, PackedRow) else None

    @property
    def packed_row(self) -> PackedRow:
        """The row that the decoder runs; only where there is one."""
        assert self.described is not None
        return self.described.row if isinstance(self.described, PaddedBatch) else self.described

    def describe(self, row: PackedRow) -> None:
        """Put this row, of which more is known, in the place of that one."""
        batch = self.described if isinstance(self.described, PaddedBatch) else None
        self.described = row if batch is None else replace(batch, row=row)


def images_in(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments of a call that hold images or the like."""
    return [name for name in _OF_IMAGES if arguments.get(name) is not None]

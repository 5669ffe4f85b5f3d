"""What a step needs of a decoder: to run packed rows, and to be captured.

`forwards.decoder.FastDecoder` is one such decoder. Any other class with these members will do.
"""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from unsloth_pack.modules.walk import Walkable
from unsloth_pack.packed_row.row import PackedRow


class KeptTables(Protocol):
    """Rotary tables that are kept between steps, so that graphs may read them."""

    @property
    def static_table(self) -> tuple[Tensor, Tensor] | None:
        """`cos` and `sin`, made by the last `for_row`."""

    def for_row(self, row: PackedRow) -> object:
        """Make the tables that the row reads, unless they are long enough already."""


class Recomputation(Protocol):
    """Which layers the backward pass computes again."""

    n_recomputed: int


class DecoderOutput(Protocol):
    """What a decoder returns."""

    @property
    def last_hidden_state(self) -> Tensor | None:
        """`[B, T, C]`."""

    @property
    def router_logits(self) -> tuple[Tensor, ...] | None:
        """`[B * T, experts]` of every layer that routes, where they were asked for."""


class PackedDecoder(Walkable, Protocol):
    """A decoder that runs packed rows."""

    @property
    def training(self) -> bool:
        """As of a `torch.nn.Module`."""

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, all of one size. Their `gradient_checkpointing` may be True."""

    def get_input_embeddings(self) -> nn.Embedding:
        """As in transformers: makes hidden states of token ids."""

    def _packed_forward(
        self,
        row: PackedRow,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        only: Collection[int] | None = None,
        **asked: Any,
    ) -> DecoderOutput:
        """The hidden states of a packed row.

        Args:
            input_ids: `[B, T]` int64, or None where `inputs_embeds` `[B, T, C]` is given.
            only: the numbers of the layers that run; None for all.
            asked: `output_router_logits=True`, or nothing; and with `inputs_embeds` perhaps
                `deepstack_visual_embeds`, `[V, C]` for each of the first layers, to add to the hidden states
                of the V tokens that stand for images.
        """


class CapturableDecoder(PackedDecoder, Protocol):
    """A packed decoder that graphs can hold: it reads nothing of a row but what `PackedRow.static` allows."""

    @property
    def rotary_tables(self) -> Mapping[str | None, KeptTables]:
        """By the kind of layer that reads them."""

    @property
    def recompute_plan(self) -> Recomputation | None:
        """Which layers are recomputed, where the free memory decides it; None elsewhere."""


@runtime_checkable
class CastsParameters(Protocol):
    """A module that casts parameters at every call to the dtype that it computes in."""

    def cast_when_used(self) -> list[Tensor]:
        """These parameters."""

"""Protocols of a decoder that runs packed rows and can be captured, such as `layers.decoder.FastDecoder`."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from unsloth_pack.modules import Walkable
from unsloth_pack.packed_row.row import PackedRow


class KeptTables(Protocol):
    """Rotary tables that live longer than a step, so that graphs can read them."""

    @property
    def static_table(self) -> tuple[Tensor, Tensor] | None:
        """`cos` and `sin` of the last `for_row`."""

    def for_row(self, row: PackedRow) -> object:
        """Extend the tables to the row's positions if necessary."""


class Recomputation(Protocol):
    """The number of layers that the backward pass recomputes."""

    n_recomputed: int


class DecoderOutput(Protocol):
    """The output of a decoder."""

    @property
    def last_hidden_state(self) -> Tensor | None:
        """`[B, T, C]`."""

    @property
    def router_logits(self) -> tuple[Tensor, ...] | None:
        """`[B * T, experts]` of every layer that routes, if requested."""


class PackedDecoder(Walkable, Protocol):
    """A decoder that runs packed rows."""

    @property
    def training(self) -> bool:
        """As of a `torch.nn.Module`."""

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, all of one size. Their `gradient_checkpointing` may be True."""

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding, as in transformers."""

    def _packed_forward(
        self,
        row: PackedRow,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        only: Collection[int] | None = None,
        **asked: Any,
    ) -> DecoderOutput:
        """Compute the hidden states of a packed row.

        Args:
            input_ids: `[B, T]` int64, or None with `inputs_embeds` `[B, T, C]`.
            only: the numbers of the layers to run; None for all.
            asked: perhaps `output_router_logits=True`; with `inputs_embeds` perhaps
                `deepstack_visual_embeds`, `[V, C]` for each of the first layers, to add to the hidden states
                of the V image tokens.
        """


class CapturableDecoder(PackedDecoder, Protocol):
    """A packed decoder that can be captured: it reads only the parts of a row that `PackedRow.static` has."""

    @property
    def rotary_tables(self) -> Mapping[str | None, KeptTables]:
        """Rotary tables by kind of layer."""

    @property
    def recompute_plan(self) -> Recomputation | None:
        """The plan, if the free memory decides which layers are recomputed; else None."""


@runtime_checkable
class CastsParameters(Protocol):
    """A module that casts parameters to its compute dtype at every call."""

    def cast_when_used(self) -> list[Tensor]:
        """List these parameters."""

"""Say what graphs need of a decoder, such as `layers.decoder.FastDecoder`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from unsloth_pack.modules import Walkable
from unsloth_pack.packed_row.row import PackedRow


class RotaryTables(Protocol):
    def for_row(self, row: PackedRow) -> object: ...


class RecomputePlan(Protocol):
    n_recomputed: int  # layers that the backward pass recomputes


class PeerWeights(Protocol):
    """Copies the weights of layers, a layer ahead, that other processes have parts of."""

    held: list[int | None]  # the layers that are whole

    def join(self) -> None:
        """Have the current stream wait for all copies."""

    def hold(self, layers: Sequence[int | None]) -> None:
        """Have these layers whole, and join."""

    def reset(self) -> None:
        """Take no layer as whole."""


class DecoderOutput(Protocol):
    """The last hidden state `[B, T, C]`, and router logits `[B * T, experts]` by layer."""

    @property
    def last_hidden_state(self) -> Tensor | None: ...

    @property
    def router_logits(self) -> tuple[Tensor, ...] | None: ...


class CapturableDecoder(Walkable, Protocol):
    """A decoder that runs packed rows, and reads only the parts of a row that `PackedRow.static` has."""

    @property
    def training(self) -> bool: ...

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, all of one size. Their `gradient_checkpointing` may be True."""

    @property
    def rotary_tables(self) -> Mapping[str | None, RotaryTables]:
        """Rotary tables by kind of layer. They live longer than a step, so that graphs can read them."""

    @property
    def recompute_plan(self) -> RecomputePlan | None:
        """The plan, if the free memory decides which layers are recomputed."""

    @property
    def peer_weights(self) -> PeerWeights: ...

    def get_input_embeddings(self) -> nn.Embedding: ...

    def embed_per_layer(self, input_ids: Tensor) -> Mapping[str, Tensor]:
        """Return the layers' own embeddings of token ids as an argument of `_packed_forward`, if any."""

    def _packed_forward(
        self,
        row: PackedRow,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        only: Collection[int] | None = None,
        **options: object,
    ) -> DecoderOutput:
        """Run a packed row from `[B, T]` ids or `[B, T, C]` embeddings through all or `only` these layers."""


@runtime_checkable
class CastsParameters(Protocol):
    """A module that casts parameters to its compute dtype at every call."""

    def cast_when_used(self) -> list[Tensor]:
        """List these parameters."""

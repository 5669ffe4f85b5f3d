"""Forms of packed rows: sizes rounded up, to which a row is padded. Rows of one shape replay the same graphs.

Shapes: B rows of T tokens, N = B * T, V image tokens, C features.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.cuda_graphs.memory import GraphMemory
from unsloth_pack.models.spec import DEEPSTACK
from unsloth_pack.packed_row.images import BlockShape
from unsloth_pack.packed_row.row import PackedRow, power_of_2, round_up


@dataclass(frozen=True, eq=False)
class Embedded:
    """Embeddings in place of token ids."""

    embeds: Tensor  # `[B, T, C]`
    by_layer: Sequence[Tensor] = ()  # `[V, C]` each, added to image tokens after the first layers (DeepStack)

    def by_token(self, row: PackedRow) -> list[Tensor]:
        """Return the embeddings and the additions after each of the first layers, `[N, C]` each."""
        embeds_NC = self.embeds.flatten(0, 1)
        # Adding -0.0, unlike 0.0, changes no bit of any number
        zeros = [torch.full_like(embeds_NC, -0.0, requires_grad=False) for _ in self.by_layer]
        added = (
            zeros_NC.index_copy_(0, row.visual_ids, features_VC.to(embeds_NC.dtype))
            for zeros_NC, features_VC in zip(zeros, self.by_layer, strict=True)
        )
        return [embeds_NC, *added]


@dataclass(frozen=True)
class EmbeddedShape:
    """The properties of embeddings that graphs depend on."""

    features: int  # of a token
    dtype: torch.dtype
    n_layers: int  # with additions
    trains: bool  # the embeddings need a gradient, for example for a vision tower

    @classmethod
    def of(cls, inputs: Tensor | Embedded) -> "EmbeddedShape | None":
        """Describe embeddings; None for token ids."""
        if isinstance(inputs, Tensor):
            return None
        embeds, by_layer = inputs.embeds, inputs.by_layer
        trains = any(x.requires_grad for x in (embeds, *by_layer))
        return cls(embeds.shape[-1], embeds.dtype, len(by_layer), trains)


class StaticInputs:
    """The static inputs of graphs: token ids without a shape, else embeddings."""

    def __init__(self, tokens: int, bucket: EmbeddedShape | None, device: torch.device, memory: GraphMemory):
        self._ids: Tensor | None = None
        self._by_token: list[Tensor] = []
        if bucket is None:
            self._ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        else:
            for number in range(1 + bucket.n_layers):
                x = memory.rows("input", number, tokens, bucket.features, bucket.dtype, device)
                self._by_token.append(x.requires_grad_(bucket.trains))
        # `[tokens, C]` each; the inputs that get gradients
        self.leaves = [x for x in self._by_token if x.requires_grad]

    def fill(self, inputs: list[Tensor] | Tensor, n_tokens: int) -> None:
        """Copy the inputs of a row: token ids `[B, T]`, or `Embedded.by_token`."""
        if self._ids is not None:
            assert isinstance(inputs, Tensor)
            self._ids[0, :n_tokens].copy_(inputs.reshape(-1))  # the rest keeps ids of an earlier row
            return
        with torch.no_grad():
            for static, x in zip(self._by_token, inputs, strict=True):
                static[:n_tokens].copy_(x)
                static[n_tokens:].zero_()  # an earlier row's NaN there would reach the gradients

    def arguments(self) -> tuple[Tensor | None, Tensor | None, dict[str, Any]]:
        """Return the arguments of a decoder's `_packed_forward` after the row."""
        if not self._by_token:
            return self._ids, None, {}
        embeds, *by_layer = self._by_token
        return None, embeds[None], {DEEPSTACK: by_layer} if by_layer else {}


ROWS_BEFORE_CAPTURE = 2  # of a size: they compile the kernels, and a rare size is never captured
MAX_FORMS = 12
WASTE_ALLOWED = 1.25  # padded tokens for each token of a common size, before it is captured too


@dataclass(frozen=True)
class ShapeBucket:
    """The shape of a row: its sizes, rounded up."""

    tokens: int  # of the padded row
    segments: int  # of the padded row: its documents, and the pieces of the padding
    longest: int  # tokens of a segment at most, and positions that the row reaches
    autocast: torch.dtype | None  # its dtype; None without autocast
    router_logits: bool = False  # they are requested beside the last hidden state
    embedded: EmbeddedShape | None = None  # None for token ids
    axes: bool = False  # tokens may have other positions in time, height and width than along the text
    blocks: BlockShape | None = None  # of bidirectional tokens. With them the last token is padding
    branches: bool = False  # segments may continue others

    @classmethod
    def of(
        cls, row: PackedRow, router_logits: bool = False, embedded: EmbeddedShape | None = None
    ) -> "ShapeBucket":
        """Round a row's sizes: tokens to sixteenths of the power of 2 above, the rest to powers of 2."""
        blocks = BlockShape.from_row(row) if len(row.blocks) else None
        tokens = round_up(row.n_tokens + (blocks is not None), 64)
        longest = power_of_2(max(_longest(row), min(256, tokens)))
        segments = max(64, power_of_2(_segments(row, tokens, longest)))
        kind = autocast_dtype(), router_logits, embedded, row.has_own_axes
        return cls(tokens, segments, longest, *kind, blocks, row.parent is not None)

    def widened(self, others: Iterable["ShapeBucket"], room: int) -> "ShapeBucket":
        """Widen to the segments, their length and the blocks of other shapes with no more tokens.

        `room` is a further factor for segments and their length, up to the shape's tokens.
        """
        like = [self, *(other for other in others if other.tokens <= self.tokens and other.kind == self.kind)]
        longest = max(bucket.longest for bucket in like)
        blocks = [bucket.blocks for bucket in like if bucket.blocks is not None]
        return replace(
            self,
            segments=room * max(bucket.segments for bucket in like),
            longest=max(longest, min(room * longest, power_of_2(self.tokens))),
            blocks=reduce(BlockShape.widened, blocks) if blocks else None,
        )

    @property
    def size(self) -> tuple[int, ...]:
        """The sizes, the most expensive first."""
        blocks = (0, 0) if self.blocks is None else (self.blocks.queries, self.blocks.earlier)
        return self.tokens, *blocks, self.longest, self.segments

    @property
    def kind(self) -> tuple[object, ...]:
        """All but the sizes."""
        has_blocks = self.blocks is not None
        return self.autocast, self.router_logits, self.embedded, self.axes, has_blocks, self.branches

    def holds(
        self, row: PackedRow, router_logits: bool = False, embedded: EmbeddedShape | None = None
    ) -> bool:
        """True if the row fits into the shape, under the current autocast."""
        return (
            row.n_tokens + bool(len(row.blocks)) <= self.tokens
            and _longest(row) <= self.longest
            and _segments(row, self.tokens, self.longest) <= self.segments
            and autocast_dtype() == self.autocast
            and router_logits == self.router_logits
            and embedded == self.embedded
            and (self.axes or not row.has_own_axes)
            and (self.branches or row.parent is None)
            and (self.blocks is not None) == bool(len(row.blocks))
            and (self.blocks is None or self.blocks.holds(row))
        )


def _longest(row: PackedRow) -> int:
    """Return the positions that the row reaches. A document may start above position 0."""
    return max(row.longest, int(row.positions.max()) + 1)


def _segments(row: PackedRow, tokens: int, longest: int) -> int:
    """Count the segments of the row padded to `tokens` with runs of at most `longest` tokens."""
    return len(row.lengths) + -(-(tokens - row.n_tokens) // longest)


def autocast_dtype() -> torch.dtype | None:
    """Return autocast's dtype; None without autocast."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None

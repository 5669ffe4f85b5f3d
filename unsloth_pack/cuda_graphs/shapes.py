"""Which packed rows replay the same CUDA graphs: sizes rounded up, to which a row is padded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.cuda_graphs.memory import GraphMemory
from unsloth_pack.models.spec import DEEPSTACK
from unsloth_pack.packed_row.images import BlockForm
from unsloth_pack.packed_row.row import PackedRow, power_of_2, round_up

# What goes into a decoder beside the row: token ids, or embeddings that hold images.
#
# Shapes: B rows of T tokens, N = B * T, V of them stand for images, C features.


@dataclass(frozen=True, eq=False)
class Embedded:
    """Embeddings in place of token ids.

    Args:
        embeds: `[B, T, C]`.
        by_layer: `[V, C]` each, what is added to the tokens of images behind the first layers (DeepStack).
    """

    embeds: Tensor
    by_layer: Sequence[Tensor] = ()

    def by_token(self, row: PackedRow) -> list[Tensor]:
        """`[N, C]` each: the embeddings, and what is added to every token behind each of the first layers."""
        embeds_NC = self.embeds.flatten(0, 1)
        # -0.0 and not 0.0: to add it changes no bit of any number
        nothing = [torch.full_like(embeds_NC, -0.0, requires_grad=False) for _ in self.by_layer]
        added = (
            none_NC.index_copy_(0, row.visual_ids, features_VC.to(embeds_NC.dtype))
            for none_NC, features_VC in zip(nothing, self.by_layer, strict=True)
        )
        return [embeds_NC, *added]


@dataclass(frozen=True)
class EmbeddedForm:
    """What rows of embeddings have to share to replay the same graphs.

    Args:
        features: of a token.
        n_layers: behind how many layers something is added.
        trains: whether a gradient goes on from them, to what has made the images for example.
    """

    features: int
    dtype: torch.dtype
    n_layers: int
    trains: bool

    @classmethod
    def of(cls, inputs: Tensor | Embedded) -> "EmbeddedForm | None":
        """None of token ids."""
        if isinstance(inputs, Tensor):
            return None
        embeds, by_layer = inputs.embeds, inputs.by_layer
        trains = any(x.requires_grad for x in (embeds, *by_layer))
        return cls(embeds.shape[-1], embeds.dtype, len(by_layer), trains)


class StaticInputs:
    """The inputs that graphs read, for `tokens` tokens.

    Args:
        form: None for token ids.

    Attributes:
        leaves: `[tokens, C]` each; those whose gradients the graphs compute.
    """

    def __init__(self, tokens: int, form: EmbeddedForm | None, device: torch.device, memory: GraphMemory):
        self._ids: Tensor | None = None
        self._by_token: list[Tensor] = []
        if form is None:
            self._ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        else:
            for number in range(1 + form.n_layers):
                x = memory.input(number, tokens, form.features, form.dtype, device)
                self._by_token.append(x.requires_grad_(form.trains))
        self.leaves = [x for x in self._by_token if x.requires_grad]

    def fill(self, inputs: list[Tensor] | Tensor, n_tokens: int) -> None:
        """Take the inputs of a row.

        Args:
            inputs: token ids `[B, T]`, or what `Embedded.by_token` gives.
        """
        if self._ids is not None:
            assert isinstance(inputs, Tensor)
            self._ids[0, :n_tokens].copy_(inputs.reshape(-1))  # behind them are ids of a row before
            return
        with torch.no_grad():
            for static, given in zip(self._by_token, inputs, strict=True):
                static[:n_tokens].copy_(given)
                static[n_tokens:].zero_()  # not of a row before: a NaN there would reach the gradients

    def arguments(self) -> tuple[Tensor | None, Tensor | None, dict[str, Any]]:
        """What `_packed_forward` of a decoder takes behind the row."""
        if not self._by_token:
            return self._ids, None, {}
        embeds, *by_layer = self._by_token
        return None, embeds[None], {DEEPSTACK: by_layer} if by_layer else {}


ROWS_BEFORE_CAPTURE = 2  # of a size: they compile the kernels, and what comes once costs nothing
MOST_FORMS = 12
WASTE_ALLOWED = 1.25  # tokens computed for each token of a common size, before it is captured too


@dataclass(frozen=True)
class ShapeBucket:
    """The sizes of a row, rounded up. Rows of one form replay the same graphs.

    Args:
        tokens: of the padded row.
        segments: of the padded row: its documents, and what the padding is cut into.
        longest: tokens of a segment at most, and positions that the row reaches.
        autocast: the dtype that autocast computes in; None without autocast.
        router_logits: whether these are asked for, beside the last hidden state.
        embedded: of the embeddings that come in; None where token ids do.
        axes: whether tokens may have other positions in time, height and width than along the text.
        blocks: of the tokens that see each other in both directions; None where none do. With them the last
            token is padding.
    """

    tokens: int
    segments: int
    longest: int
    autocast: torch.dtype | None
    router_logits: bool = False
    embedded: EmbeddedForm | None = None
    axes: bool = False
    blocks: BlockForm | None = None

    @classmethod
    def of(
        cls, row: PackedRow, router_logits: bool = False, embedded: EmbeddedForm | None = None
    ) -> "ShapeBucket":
        """The form of a row: tokens in steps of a sixteenth of the power of 2 above, the rest powers of 2."""
        blocks = BlockForm.from_row(row) if len(row.blocks) else None
        tokens = round_up(row.n_tokens + (blocks is not None), 64)
        longest = power_of_2(max(_longest(row), min(256, tokens)))
        segments = max(64, power_of_2(_segments(row, tokens, longest)))
        kind = autocast_dtype(), router_logits, embedded, row.has_own_axes
        return cls(tokens, segments, longest, *kind, blocks)

    def widened(self, others: Iterable["ShapeBucket"], room: int) -> "ShapeBucket":
        """This form with as many segments, and as long ones, as the widest of others like it.

        Args:
            others: forms of rows; those of more tokens are left out.
            room: how many times as many, and as long ones, up to the tokens of the form.
        """
        like = [self, *(other for other in others if other.tokens <= self.tokens and other.kind == self.kind)]
        longest = max(form.longest for form in like)
        blocks = [form.blocks for form in like if form.blocks is not None]
        return replace(
            self,
            segments=room * max(form.segments for form in like),
            longest=max(longest, min(room * longest, power_of_2(self.tokens))),
            blocks=reduce(BlockForm.widened, blocks) if blocks else None,
        )

    @property
    def size(self) -> tuple[int, ...]:
        """What a replay takes, the dearest first."""
        blocks = (0, 0) if self.blocks is None else (self.blocks.queries, self.blocks.earlier)
        return self.tokens, *blocks, self.longest, self.segments

    @property
    def kind(self) -> tuple[object, ...]:
        """All but the sizes."""
        return self.autocast, self.router_logits, self.embedded, self.axes, self.blocks is not None

    def holds(
        self, row: PackedRow, router_logits: bool = False, embedded: EmbeddedForm | None = None
    ) -> bool:
        """Whether the row fits into the form, under the autocast that is on now."""
        return (
            row.n_tokens + bool(len(row.blocks)) <= self.tokens
            and _longest(row) <= self.longest
            and _segments(row, self.tokens, self.longest) <= self.segments
            and autocast_dtype() == self.autocast
            and router_logits == self.router_logits
            and embedded == self.embedded
            and (self.axes or not row.has_own_axes)
            and (self.blocks is not None) == bool(len(row.blocks))
            and (self.blocks is None or self.blocks.holds(row))
        )


def _longest(row: PackedRow) -> int:
    """Positions that the row reaches. A document may start above position 0."""
    return max(row.longest, int(row.positions.max()) + 1)


def _segments(row: PackedRow, tokens: int, longest: int) -> int:
    """Segments of the row once it is padded to `tokens`, by runs of at most `longest` tokens."""
    return len(row.lengths) + -(-(tokens - row.n_tokens) // longest)


def autocast_dtype() -> torch.dtype | None:
    """The dtype that autocast computes in; None without autocast."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None

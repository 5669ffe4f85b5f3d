"""Which packed rows replay the same CUDA graphs: sizes rounded up, to which a row is padded."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import torch

from unsloth_pack.graphs.inputs import EmbeddedForm
from unsloth_pack.row.block_rows import BlockForm
from unsloth_pack.row.packed_row import PackedRow
from unsloth_pack.row.rounding import power_of_2, rounded_up

ROWS_BEFORE_CAPTURE = 2  # of a size: they compile the kernels, and what comes once costs nothing
MOST_FORMS = 12
WASTE_ALLOWED = 1.25  # tokens computed for each token of a common size, before it is captured too


@dataclass(frozen=True)
class RowForm:
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
    ) -> "RowForm":
        """The form of a row: tokens in steps of a sixteenth of the power of 2 above, the rest powers of 2."""
        blocks = BlockForm.of(row) if len(row.blocks) else None
        tokens = rounded_up(row.n_tokens + (blocks is not None), 64)
        longest = power_of_2(max(_longest(row), min(256, tokens)))
        segments = max(64, power_of_2(_segments(row, tokens, longest)))
        kind = autocast_dtype(), router_logits, embedded, row.has_own_axes
        return cls(tokens, segments, longest, *kind, blocks)

    def widened(self, others: Iterable["RowForm"], room: int) -> "RowForm":
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

"""What is counted while documents are made, span by span, and summed up in a ledger."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from unsloth_pack.errors import InputError

if TYPE_CHECKING:
    from unsloth_pack.data.encoding import Encoded


@dataclass(frozen=True)
class TokenLedger:
    """What happened to each token that was read.

    tokens_read + tokens_repeated = tokens_truncated + tokens_dropped + tokens_held_out + tokens_not_drawn
                + tokens_masked_by_template + tokens_masked_at_boundaries + tokens_counted
    """

    rows_read: int  # all that came in
    tokens_read: int
    rows_truncated: int  # cut at their end, and the tokens cut off
    tokens_truncated: int
    rows_fully_masked: int  # in which no token counts, and what truncation left of them
    tokens_dropped: int
    tokens_masked_by_template: int  # outside of responses, in the rows that are trained on
    tokens_masked_at_boundaries: int  # that would count, but are the first of their document
    tokens_counted: int  # in the loss, which is a mean over them
    # Rows that do not begin with the tokens of their prompt alone, which the model gets when it generates;
    # the loss starts at the first difference
    prompts_rerendered: int
    longest: int  # tokens of a row before truncation, and the 99th percentile over the rows
    p99: int
    rows_split: int = 0  # that became several documents; these tokens are in other counts too
    tokens_split: int = 0
    rows_held_out: int = 0  # that are evaluated on, and so not trained on
    tokens_held_out: int = 0
    rows_not_drawn: int = 0  # that a mixture of data sets, or a limit, leaves out
    tokens_not_drawn: int = 0
    rows_repeated: int = 0  # that a mixture takes once more in a pass, each time that it does
    tokens_repeated: int = 0
    images: int = 0  # of the documents that were made; these tokens are in the other counts too
    vision_tokens: int = 0
    rows_shrunk: int = 0  # whose images were made smaller to fit
    tokens_shrunk: int = 0  # that this saved, which are in no other count
    rows_broken: int = 0  # left out since an image cannot be read. They were not tokenised
    rows_left_out: int = 0  # those of `rows_truncated` whose cut would have gone through an image

    @classmethod
    def of_all(cls, ledgers: Sequence[TokenLedger]) -> TokenLedger:
        """The ledger of several data sets together; `p99` is the greatest of theirs."""
        names = [each.name for each in fields(cls)]
        sums = {name: sum(getattr(ledger, name) for ledger in ledgers) for name in names}
        most = {name: max(getattr(ledger, name) for ledger in ledgers) for name in ("longest", "p99")}
        return cls(**sums | most)

    @property
    def discarded(self) -> float:
        """The share of the tokens read that is truncated or dropped, 0 to 1."""
        return (self.tokens_truncated + self.tokens_dropped) / self.tokens_read if self.tokens_read else 0.0


def check_token_loss(
    name: str,
    ledger: TokenLedger,
    max_token_loss: float,
    max_length: int,
    n_positions: int,
    are_packed: bool = False,
) -> None:
    """Refuse to train on the data of this name if truncation and dropping discard too many tokens.

    Args:
        max_token_loss: the share of tokens that may be lost, 0 to 1.
        max_length, n_positions: tokens at which rows were cut, and those of the longest row of the model.
        are_packed: whether the rows come from packs on disk, which were cut when they were packed.
    """
    if ledger.discarded <= max_token_loss:
        return
    cut = f"{ledger.tokens_truncated:,} beyond --max_seq_length {max_length}"
    if ledger.rows_left_out:
        cut += f" ({ledger.rows_left_out:,} rows whole, for a cut goes through an image: --shrink_images)"
    loses, way = ("has lost", "pack it anew with") if are_packed else ("would lose", "give")
    raise InputError(
        f"{name} {loses} {ledger.discarded:.2%} of its {ledger.tokens_read:,} tokens, "
        f"and --max_token_loss allows {max_token_loss:.2%}: {cut}, {ledger.tokens_dropped:,} in rows where "
        f"no token counts; {way} --max_seq_length {min(ledger.longest, n_positions)} (99 % of the rows have "
        f"at most {ledger.p99}), or --max_token_loss {math.ceil(ledger.discarded * 1000) / 1000:g}"
    )


FILES = "image_files"  # images that are files, and rows of which that is not known


@dataclass
class SpanCounts:
    """Counts of the rows of some batches; `+=` adds those of others."""

    # The fields of a `TokenLedger` that are sums over the rows, `FILES`, and what `of_part` adds
    sums: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)  # how many rows had so many tokens when read
    least_id: int = 0  # the smallest and the largest token id
    last_id: int = -1

    def coarse(self) -> SpanCounts:
        """The same counts with lengths rounded up by at most a 64th, so that there are few in any data."""
        lengths: Counter[int] = Counter()
        for length, rows in self.lengths.items():
            step = 1 << max(0, length.bit_length() - 7)
            lengths[-(-length // step) * step] += rows
        return SpanCounts(self.sums.copy(), lengths, self.least_id, self.last_id)

    @classmethod
    def of(cls, encoded: Encoded) -> SpanCounts:
        """The counts of a batch."""
        read, kept, masked, counted = encoded.read, encoded.kept, encoded.masked, encoded.counted
        stays = counted > 0
        sums = {
            "rows_read": len(read),
            "tokens_read": read.sum(),
            "rows_truncated": (kept < read).sum(),
            "tokens_truncated": (read - kept).sum(),
            "rows_fully_masked": (~stays).sum(),
            "tokens_dropped": kept[~stays].sum(),
            "tokens_masked_by_template": masked[stays].sum(),
            "tokens_masked_at_boundaries": (kept - masked - counted)[stays].sum(),
            "tokens_counted": counted.sum(),
            "prompts_rerendered": encoded.rerendered[stays].sum(),
        }
        lengths, rows = np.unique(read, return_counts=True)
        return cls(
            Counter({name: int(number) for name, number in sums.items()}),
            Counter(dict(zip(lengths.tolist(), rows.tolist(), strict=True))),
            int(encoded.ids.min(initial=0)),
            int(encoded.ids.max(initial=-1)),
        )

    def of_part(self, part: int) -> SpanCounts:
        """The same counts, with its rows and tokens also counted for one data set of a mixture."""
        for what in ("rows_read", "tokens_read"):
            self.sums[f"{what} of {part}"] = self.sums[what]
        return self

    def read_of(self, part: int) -> tuple[int, int]:
        """Rows and tokens that were read of one data set of a mixture."""
        return self.sums[f"rows_read of {part}"], self.sums[f"tokens_read of {part}"]

    def __iadd__(self, other: SpanCounts) -> SpanCounts:
        self.sums.update(other.sums)
        self.lengths.update(other.lengths)
        self.least_id, self.last_id = min(self.least_id, other.least_id), max(self.last_id, other.last_id)
        return self

    def __add__(self, other: SpanCounts) -> SpanCounts:
        return SpanCounts().__iadd__(self).__iadd__(other)

    @property
    def ledger(self) -> TokenLedger:
        sums = {each.name: self.sums[each.name] for each in fields(TokenLedger)}
        lengths, rows = sorted(self.lengths), [self.lengths[length] for length in sorted(self.lengths)]
        rank = math.ceil((self.lengths.total() - 1) * 0.99)  # between two lengths, the higher
        p99 = lengths[int(np.searchsorted(np.cumsum(rows), rank, "right"))] if lengths else 0
        return TokenLedger(**sums | {"longest": max(lengths, default=0), "p99": p99})

"""What is counted while documents are made, span by span, and summed up in a ledger."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from unsloth_pack.data.ledger import TokenLedger

if TYPE_CHECKING:
    from unsloth_pack.data.encoding import Encoded

_SUMS = [
    each.name
    for each in fields(TokenLedger)
    if each.default is MISSING and each.name not in ("longest", "p99")
]
FILES = "image_files"  # images that are files, and rows of which that is not known
OF_IMAGES = ("images", "vision_tokens", "rows_shrunk", "tokens_shrunk", "rows_broken", "rows_left_out")


@dataclass
class Tally:
    """Counts of the rows of some batches; `+=` adds those of others.

    Args:
        sums: the fields of a `TokenLedger` that are sums over the rows, by name; `FILES`; and of each data
            set of a mixture, what `of_part` has added.
        lengths: how many rows had so many tokens when they were read.
        least_id, last_id: the smallest and the largest token id; 0 and -1 where there is no token.
    """

    sums: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    least_id: int = 0
    last_id: int = -1

    def coarse(self) -> Tally:
        """The same counts with lengths rounded up by at most a 64th: a few thousand at most, in any data."""
        lengths: Counter[int] = Counter()
        for length, rows in self.lengths.items():
            step = 1 << max(0, length.bit_length() - 7)
            lengths[-(-length // step) * step] += rows
        return Tally(self.sums.copy(), lengths, self.least_id, self.last_id)

    @classmethod
    def of(cls, encoded: Encoded) -> Tally:
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

    def of_part(self, part: int) -> Tally:
        """The same counts, with its rows and tokens also counted for one data set of a mixture."""
        for what in ("rows_read", "tokens_read"):
            self.sums[f"{what} of {part}"] = self.sums[what]
        return self

    def read_of(self, part: int) -> tuple[int, int]:
        """Rows and tokens that were read of one data set of a mixture."""
        return self.sums[f"rows_read of {part}"], self.sums[f"tokens_read of {part}"]

    def __iadd__(self, other: Tally) -> Tally:
        self.sums.update(other.sums)
        self.lengths.update(other.lengths)
        self.least_id, self.last_id = min(self.least_id, other.least_id), max(self.last_id, other.last_id)
        return self

    def __add__(self, other: Tally) -> Tally:
        both = Tally(self.sums.copy(), self.lengths.copy(), self.least_id, self.last_id)
        both += other
        return both

    @property
    def has_files(self) -> bool:
        """As `Documents` has it."""
        return self.sums[FILES] > 0

    @property
    def ledger(self) -> TokenLedger:
        sums = {name: self.sums[name] for name in (*_SUMS, *OF_IMAGES)}
        return TokenLedger(**sums, longest=max(self.lengths, default=0), p99=self._quantile(0.99))

    def _quantile(self, share: float) -> int:
        """The length at a quantile of the rows; between two lengths, the higher."""
        rank = math.ceil((self.lengths.total() - 1) * share)
        for length in sorted(self.lengths):
            rank -= self.lengths[length]
            if rank < 0:
                return length
        return 0

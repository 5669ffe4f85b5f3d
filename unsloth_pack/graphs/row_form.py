"""Which packed rows replay the same CUDA graphs: sizes rounded up, to which a row is padded."""

from dataclasses import dataclass

import torch

from unsloth_pack.row.packed_row import PackedRow


@dataclass(frozen=True)
class RowForm:
    """What rows that replay the same graphs have in common, all rounded up.

    Args:
        tokens, segments, longest: of the padded row.
        autocast: the dtype that autocast computes in, None without.
    """

    tokens: int
    segments: int
    longest: int
    autocast: torch.dtype | None

    @classmethod
    def of(cls, row: PackedRow) -> "RowForm":
        """The form of a row: tokens by sixteenths of the power of 2 above them, the rest powers of 2."""
        tokens = _round_up(row.n_tokens, max(64, _power_of_2(row.n_tokens) // 16))
        longest = _power_of_2(max(_longest(row), min(256, tokens)))
        segments = max(64, _power_of_2(_segments(row, tokens, longest)))
        return cls(tokens, segments, longest, _autocast())

    def holds(self, row: PackedRow) -> bool:
        """Whether the row fits, as things are now."""
        return (
            row.n_tokens <= self.tokens
            and _longest(row) <= self.longest
            and _segments(row, self.tokens, self.longest) <= self.segments
            and _autocast() == self.autocast
        )


def _longest(row: PackedRow) -> int:
    """Positions that the row reaches, which may start above 0 in a document."""
    return max(row.longest, int(row.positions.max()) + 1)


def _segments(row: PackedRow, tokens: int, longest: int) -> int:
    """Segments of the row padded to so many tokens, by runs no longer than the longest document."""
    return len(row.lengths) + -(-(tokens - row.n_tokens) // longest)


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()

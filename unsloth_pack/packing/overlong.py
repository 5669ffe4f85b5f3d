"""How sequences that are empty or longer than a row are handled, and how many there were."""

from dataclasses import dataclass

from unsloth_pack.errors import InputError

CHOICES = ("error", "truncate", "drop", "split")


class PackingWarning(UserWarning):
    """Sequences were dropped or cut, and the caller did not ask for the counts."""


@dataclass
class CutCounts:
    """Sequences that could not be packed as they came.

    Args:
        empty: sequences without tokens, dropped.
        truncated, dropped, split: over-long sequences, by what was done to them.
        tokens_lost: tokens cut off or dropped.
    """

    empty: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    tokens_lost: int = 0

    def __bool__(self) -> bool:
        return bool(self.empty or self.truncated or self.dropped or self.split)

    def __str__(self) -> str:
        shown = {
            "empty dropped": self.empty,
            "over-long truncated": self.truncated,
            "over-long dropped": self.dropped,
            "over-long split": self.split,
        }
        parts = ", ".join(f"{number} {what}" for what, number in shown.items() if number)
        return f"{parts or 'none cut'} ({self.tokens_lost} tokens lost)"


def check_overlong(overlong: str) -> str:
    if overlong not in CHOICES:
        raise InputError(f"overlong is {overlong!r}; choose one of {', '.join(CHOICES)}")
    return overlong


def pieces_of(
    name: str, length: int, capacity: int, overlong: str, counts: CutCounts
) -> list[tuple[int, int]]:
    """The pieces `(start, end)` of one sequence that are to be packed; `counts` notes a cut or a drop.

    Raises:
        InputError: it is longer than `capacity` and `overlong` is "error".
    """
    if length == 0:
        counts.empty += 1
        return []
    if length <= capacity:
        return [(0, length)]
    if overlong == "error":
        raise InputError(
            f"{name} has {length} tokens and a row holds {capacity}; raise the length of a row, or choose "
            'overlong="truncate", "drop" or "split"'
        )
    if overlong == "split":
        counts.split += 1
        return [(start, min(start + capacity, length)) for start in range(0, length, capacity)]
    if overlong == "drop":
        counts.dropped += 1
        counts.tokens_lost += length
        return []
    counts.truncated += 1
    counts.tokens_lost += length - capacity
    return [(0, capacity)]

"""What a run says of the data sets that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unsloth_pack.data.mixture import Part


def lines_of_parts(parts: Sequence[Part], how: str = "") -> list[tuple[str, str]]:
    """A line for each data set of a mixture, and one for the columns of each that are not used.

    Args:
        how: the data sets are mixed, for those that stream.
    """
    are_weighted = len(parts) > 1 or any(part.weight != 1 for part in parts)
    mixture = [("mixture", f"{part.name}: {_share(part, parts, how)}") for part in parts if are_weighted]
    unused = [
        ("not used", f"{part.name}: {columns_line(part.unused_columns)}")
        for part in parts
        if part.unused_columns
    ]
    return mixture + unused


def columns_line(columns: Sequence[str]) -> str:
    return f"{'columns' if len(columns) > 1 else 'column'} {', '.join(columns)}"


def _share(part: Part, parts: Sequence[Part], how: str) -> str:
    if part.documents is None and how == "concatenate":
        return f"read {part.weight:g} times in a pass"
    if part.documents is None:
        return f"weight {part.weight:g}, {part.weight / sum(each.weight for each in parts):.1%} of the rows"
    total = sum(each.trained_tokens for each in parts)
    held_out = f", {part.held_out:,} held out" if part.held_out else ""
    return (
        f"weight {part.weight:g}, {part.trained_documents:,} from {part.documents:,} documents{held_out}, "
        f"{part.trained_tokens:,} tokens ({part.trained_tokens / total:.1%})"
    )

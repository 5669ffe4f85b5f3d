"""The ledger of a data set's tokens, and the check that not too many of them are lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from unsloth_pack.errors import InputError


@dataclass(frozen=True)
class TokenLedger:
    """What happened to each token that was read.

    tokens_read + tokens_repeated = tokens_truncated + tokens_dropped + tokens_held_out + tokens_not_drawn
                + tokens_masked_by_template + tokens_masked_at_boundaries + tokens_counted

    Args:
        rows_read, tokens_read: all that came in.
        rows_truncated, tokens_truncated: rows cut at their end, and the tokens cut off.
        rows_fully_masked, tokens_dropped: rows in which no token counts in the loss, which are dropped, and
            the tokens that truncation left in them.
        tokens_masked_by_template: tokens outside of responses, in the rows that are trained on.
        tokens_masked_at_boundaries: tokens that would count, but are the first of their document, so that no
            token predicts them.
        tokens_counted: tokens that count in the loss, which is a mean over them.
        prompts_rerendered: rows that do not begin with the tokens of their prompt alone, which the model
            gets when it generates; the loss starts at the first difference.
        longest, p99: tokens of the longest row, and the 99th percentile over the rows, before truncation.
        rows_split, tokens_split: rows that became several documents, and their tokens; each of these tokens
            is in one of the other counts too. `tokenize` truncates rows and never splits them.
        rows_held_out, tokens_held_out: rows that are evaluated on, and so not trained on.
        rows_not_drawn, tokens_not_drawn: rows that a mixture of data sets, or a limit, leaves out.
        rows_repeated, tokens_repeated: rows that a mixture takes once more in a pass, each time that it does.
        images, vision_tokens: of the documents that were made; these tokens are in the other counts too.
        rows_shrunk, tokens_shrunk: rows whose images were made smaller to fit, and the tokens that this
            saved, which are in no other count.
        rows_broken: rows left out since an image cannot be read. They were not tokenised.
        rows_left_out: those of `rows_truncated` of which nothing is left, since the cut would have been in
            front of the end of an image.
    """

    rows_read: int
    tokens_read: int
    rows_truncated: int
    tokens_truncated: int
    rows_fully_masked: int
    tokens_dropped: int
    tokens_masked_by_template: int
    tokens_masked_at_boundaries: int
    tokens_counted: int
    prompts_rerendered: int
    longest: int
    p99: int
    rows_split: int = 0
    tokens_split: int = 0
    rows_held_out: int = 0
    tokens_held_out: int = 0
    rows_not_drawn: int = 0
    tokens_not_drawn: int = 0
    rows_repeated: int = 0
    tokens_repeated: int = 0
    images: int = 0
    vision_tokens: int = 0
    rows_shrunk: int = 0
    tokens_shrunk: int = 0
    rows_broken: int = 0
    rows_left_out: int = 0

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
    option: str = "dataset",
) -> None:
    """Refuse to train if truncation and dropping discard too many tokens.

    Args:
        name: of the data, for the message.
        max_token_loss: the share of tokens that may be lost, 0 to 1.
        max_length: tokens at which rows were cut.
        n_positions: of the model; no row may be longer.
        are_packed: whether the rows come from packs on disk, which were cut when they were packed.
        option: that names the data.

    Raises:
        InputError: more is lost; the error says why, and how to keep these tokens.
    """
    if ledger.discarded <= max_token_loss:
        return
    causes, ways = [], [f"allow it with --max_token_loss {math.ceil(ledger.discarded * 1000) / 1000:g}"]
    if ledger.tokens_dropped:
        rows = f"{ledger.rows_fully_masked:,} rows in which no token counts"
        causes.append(f"{ledger.tokens_dropped:,} in {rows}")
    if ledger.tokens_truncated:
        beyond = f"beyond --max_seq_length {max_length} in {ledger.rows_truncated:,} rows"
        if ledger.rows_left_out:
            beyond += f" ({ledger.rows_left_out:,} of them whole, as the cut would go through an image)"
            ways.insert(0, "make images smaller with --shrink_images")
        causes.insert(0, f"{ledger.tokens_truncated:,} {beyond}")
        most = f"99 % of the rows have at most {ledger.p99}"
        way = "pack it anew with --max_seq_length" if are_packed else "raise --max_seq_length to"
        if max_length < n_positions:
            ways.insert(0, f"{way} {min(ledger.longest, n_positions)} ({most})")
        if n_positions < ledger.longest:
            ways.insert(0, f"split the long rows, as the model has {n_positions} positions")
    loses = "has lost" if are_packed else "would lose"
    raise InputError(
        f"{name} {loses} {ledger.discarded:.2%} of its {ledger.tokens_read:,} tokens, "
        f"and --max_token_loss allows {max_token_loss:.2%}: {' and '.join(causes)}; {', or '.join(ways)}",
        about=("max_token_loss", "max_seq_length", option),
    )

"""The ledger of a data set's tokens, and the check that not too many of them are lost."""

import math
from dataclasses import dataclass

from unsloth_pack.errors import InputError


@dataclass(frozen=True)
class TokenLedger:
    """Where the tokens went.

    tokens_read = tokens_truncated + tokens_dropped
                + tokens_masked_by_template + tokens_masked_at_boundaries + tokens_counted

    Args:
        rows_read, tokens_read: all that came in.
        rows_truncated, tokens_truncated: rows cut at their end, and the tokens cut off.
        rows_fully_masked, tokens_dropped: rows without a token that counts, which are dropped, and what
            truncation left of them.
        tokens_masked_by_template: tokens that are no response, in the rows that stay.
        tokens_masked_at_boundaries: tokens that would count but are the first of their document, which
            nothing predicts.
        tokens_counted: tokens that the loss is a mean of.
        prompts_rerendered: rows that do not begin with the tokens of their prompt alone, as the model will
            meet them when it generates; the loss starts where the two part.
        longest, p99: tokens of the longest row, and of one that 99 % are no longer than, before truncation.
        rows_split, tokens_split: rows that became several documents, and their tokens, each in one of the
            other counts too. A row that is tokenised is truncated, never split.
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
    """Refuse to train on what truncation and dropping leave, where they discard too much.

    Args:
        name: of the data, for the message.
        max_token_loss: the share of tokens that may be lost, 0 to 1.
        max_length: at which rows were cut.
        n_positions: of the model, which no row may be longer than.
        are_packed: whether they lie on disk as they were cut.

    Raises:
        InputError: more is lost; says why, and what would keep it.
    """
    if ledger.discarded <= max_token_loss:
        return
    causes, ways = [], [f"allow it with --max_token_loss {math.ceil(ledger.discarded * 1000) / 1000:g}"]
    if ledger.tokens_dropped:
        rows = f"{ledger.rows_fully_masked:,} rows in which no token counts"
        causes.append(f"{ledger.tokens_dropped:,} in {rows}")
    if ledger.tokens_truncated:
        beyond = f"beyond --max_seq_length {max_length} in {ledger.rows_truncated:,} rows"
        causes.insert(0, f"{ledger.tokens_truncated:,} {beyond}")
        most = f"99 % of the rows have at most {ledger.p99}"
        way = "pack it anew with --max_seq_length" if are_packed else "raise --max_seq_length to"
        if max_length < n_positions:
            ways.insert(0, f"{way} {min(ledger.longest, n_positions)} ({most})")
        if n_positions < ledger.longest:
            ways.insert(0, f"write rows as shorter ones, as the model has {n_positions} positions")
    loses = "has lost" if are_packed else "would lose"
    raise InputError(
        f"{name} {loses} {ledger.discarded:.2%} of its {ledger.tokens_read:,} tokens, "
        f"and --max_token_loss allows {max_token_loss:.2%}: {' and '.join(causes)}; {', or '.join(ways)}"
    )

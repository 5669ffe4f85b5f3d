"""A padded batch as one packed row: its documents without what stands in their padding.

    rows     a a a . .       places  0 1 2 5 6 7 8 9 13 14
             b b b b b       row     a a a b b b b b c  c
             . . . c c       lengths 3     5         2

Shapes: B rows of T tokens hold N tokens that are no padding.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import ModelOutput

from unsloth_pack.row.packed_row import PackedRow


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Where the documents of a padded batch stand, and the packed row that they form.

    Args:
        row: `[1, N]`, one document for each row of the batch that has a token.
        places: `[N]` int64 on the host; where each token of the row stands in the flattened batch.
        shape: (B, T) of the batch.
    """

    row: PackedRow
    places: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def of_mask(
        cls,
        real: np.ndarray,
        device: torch.device,
        positions: np.ndarray | None = None,
        restarts: bool = False,
    ) -> "PaddedBatch":
        """The batch of a mask for which `is_one_run_a_row` holds and that keeps some token.

        Args:
            real: `[B, T]` bool, False on padding.
            positions: `[B, T]` int64, the rotary positions. None: those of transformers, 0 to T - 1, so that
                a document behind padding starts above 0.
            restarts: without `positions`, let every document start at 0.
        """
        places = np.flatnonzero(real)
        lengths = tuple(int(length) for length in real.sum(axis=1) if length)
        if positions is not None:
            of_tokens = positions.reshape(-1)[places]
        elif restarts:
            of_tokens = np.concatenate([np.arange(length) for length in lengths])
        else:
            of_tokens = places % real.shape[1]
        row = PackedRow(lengths, (False,) * len(lengths), of_tokens, (1, len(places)), device)
        return cls(row, places, (real.shape[0], real.shape[1]))

    def on(self, device: torch.device) -> "PaddedBatch":
        """The batch for a model that computes on `device`."""
        row = self.row.on(device)
        return self if row is self.row else PaddedBatch(row, self.places, self.shape)

    def packed(self, tokens: Tensor | None) -> Tensor | None:
        """`[1, N, ...]` of `[B, T, ...]`: without the padding."""
        if tokens is None:
            return None
        flat = tokens.flatten(0, 1)
        return (flat if self._is_full else flat.index_select(0, self._places_on_device()))[None]

    def padded(self, output: Any) -> Any:
        """A decoder's output for the row as that for the batch, 0 on padding.

        Hidden states `[1, N, C]` become `[B, T, C]`, the routers' logits `[N, E]` become `[B * T, E]`.
        """
        if isinstance(output, ModelOutput):
            return type(output)(**{name: self.padded(value) for name, value in output.items()})
        if isinstance(output, tuple):
            return tuple(self.padded(value) for value in output)
        if not isinstance(output, Tensor):
            return output
        return self._spread(output) if output.dim() == 2 else self._spread(output[0]).unflatten(0, self.shape)

    @property
    def _is_full(self) -> bool:
        """Whether there is no padding."""
        return len(self.places) == self.shape[0] * self.shape[1]

    def _spread(self, tokens: Tensor) -> Tensor:
        if self._is_full:
            return tokens
        spread = tokens.new_zeros(self.shape[0] * self.shape[1], *tokens.shape[1:])
        return spread.index_copy_(0, self._places_on_device(), tokens)

    def _places_on_device(self) -> Tensor:
        return self.row.once("places in the padded batch", lambda: self.row.upload(self.places))


def is_one_run_a_row(real: np.ndarray) -> bool:
    """Whether the tokens of every row of a `[B, T]` bool mask stand side by side: no padding between them."""
    begins = real & ~np.pad(real, ((0, 0), (1, 0)))[:, :-1]
    return bool((begins.sum(axis=1) <= 1).all())


def is_one_document_a_row(positions: np.ndarray, real: np.ndarray, last: int) -> bool:
    """Whether the positions `[B, T]` of each row's tokens continue by one, and lie between 0 and `last`."""
    both = real[:, 1:] & real[:, :-1]
    of_tokens = positions[real]
    return bool(
        (np.diff(positions, axis=1)[both] == 1).all() and ((of_tokens >= 0) & (of_tokens <= last)).all()
    )


def padding_has_labels(labels: Tensor, real: Tensor, ignore_index: int, is_shifted: bool) -> Tensor:
    """Whether a loss reads what a model computes for padding: a bool on the device of the mask.

    It does where padding has a label, or has to predict that of the token behind it.

    Args:
        labels: `[B, T]`.
        real: `[B, T]` bool, False on padding.
        is_shifted: whether each stands one token before the token it is of, as `shift_labels` do.
    """
    is_label = labels.to(real.device) != ignore_index
    has_label = (is_label & ~real).any()
    return has_label if is_shifted else has_label | (is_label[:, 1:] & ~real[:, :-1]).any()

"""Turn padded batches into packed rows. A `PaddedBatch` becomes one row, without its padding:

    rows     a a a . .       places  0 1 2 5 6 7 8 9 13 14
             b b b b b       row     a a a b b b b b c  c
             . . . c c       lengths 3     5         2

Rows with equal prompts may become branches of one prefix:

    rows     p p a a a       places  0 1 2 3 4 7 8
             p p b b .       row     p p a a a b b
                             parent  -1, 0, 0

Shapes: B rows of T tokens, N of them no padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from unsloth_pack.packed_row.row import PackedRow


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Locates the documents of a padded batch, and holds the packed row that they form."""

    row: PackedRow  # `[1, N]`, one document for each row of the batch that has a token
    places: np.ndarray  # `[N]` int64 on the host; where each token of the row stands in the flattened batch
    shape: tuple[int, int]  # (B, T) of the batch
    # Where rows share prefixes, `[M]` int64 on the host each: where the batch has tokens, and for each of
    # them the token of the row that stands for it
    shared: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def of_mask(
        cls,
        real: np.ndarray,
        device: torch.device,
        positions: np.ndarray | None = None,
        restarts: bool = False,
    ) -> "PaddedBatch":
        """Build the batch of a mask that keeps some token and for which `is_one_run_a_row` holds.

        Args:
            real: `[B, T]` bool, False on padding.
            positions: `[B, T]` int64, the rotary positions; None for transformers' 0 to T - 1, or with
                `restarts` for those that start at 0 in every document.
        """
        places = np.flatnonzero(real)
        lengths = tuple(int(length) for length in real.sum(axis=1) if length)
        if positions is not None:
            token_positions = positions.reshape(-1)[places]
        elif restarts:
            token_positions = np.concatenate([np.arange(length) for length in lengths])
        else:
            token_positions = places % real.shape[1]
        row = PackedRow(lengths, (False,) * len(lengths), token_positions, (1, len(places)), device)
        return cls(row, places, (real.shape[0], real.shape[1]))

    def on(self, device: torch.device) -> "PaddedBatch":
        """Return the batch for a model on `device`."""
        row = self.row.on(device)
        return self if row is self.row else replace(self, row=row)

    def share(self, groups: Sequence[tuple[Sequence[int], int]]) -> "PaddedBatch":
        """Return the batch with the common tokens of documents once, as the parent of what follows in each.

        Args:
            groups: all documents of the row, each group with the number of its leading tokens that are equal.
                Every document of several has more tokens than those.
        """
        row = self.row
        runs: list[tuple[int, int]] = []  # first tokens and lengths of the segments
        parent: list[int] = []
        for documents, n_shared in groups:
            prefix = len(runs) if n_shared else -1
            if n_shared:
                runs.append((row.starts[documents[0]], n_shared))
                parent.append(-1)
            runs += [(row.starts[d] + n_shared, row.lengths[d] - n_shared) for d in documents]
            parent += [prefix] * len(documents)
        tokens = np.concatenate([np.arange(first, first + length) for first, length in runs])
        sources = np.empty(row.n_tokens, dtype=np.int64)
        sources[tokens] = np.arange(len(tokens))
        for documents, n_shared in groups:
            first, *others = (row.starts[d] + np.arange(n_shared) for d in documents)
            for other in others:
                sources[other] = sources[first]
        lengths = tuple(int(length) for _, length in runs)
        positions, shape = row.positions[tokens], (1, len(tokens))
        branched = PackedRow(lengths, (False,) * len(runs), positions, shape, row.device, parent=(*parent,))
        return replace(self, row=branched, places=self.places[tokens], shared=(self.places, sources))

    def packed(self, tokens: Tensor | None) -> Tensor | None:
        """Remove the padding: `[1, N, ...]` from `[B, T, ...]`."""
        if tokens is None:
            return None
        flat = tokens.flatten(0, 1)
        is_all = len(self.places) == self.shape[0] * self.shape[1]
        return (flat if is_all else flat.index_select(0, self._on_device("tokens", self.places)))[None]

    def padded(self, output: object) -> Any:
        """Put the padding back into a decoder's output, as zeros, and a shared prefix into each of its rows.

        Hidden states `[1, N, C]` become `[B, T, C]`, the routers' logits `[N, E]` become `[B * T, E]`.
        """
        return tree_map_only(Tensor, self._pad, output)

    def _pad(self, output: Tensor) -> Tensor:
        tokens = output if output.dim() == 2 else output[0]
        name, places = "tokens", self.places
        if self.shared is not None:
            name, (places, sources) = "places", self.shared
            tokens = tokens[self._on_device("sources", sources)]  # its backward sums in a fixed order
        if len(places) < self.shape[0] * self.shape[1]:
            spread = tokens.new_zeros(self.shape[0] * self.shape[1], *tokens.shape[1:])
            tokens = spread.index_copy_(0, self._on_device(name, places), tokens)
        return tokens if output.dim() == 2 else tokens.unflatten(0, self.shape)

    def _on_device(self, name: str, numbers: np.ndarray) -> Tensor:
        return self.row.once(("padded batch", name), lambda: self.row.upload(numbers))


def is_one_run_a_row(real: np.ndarray) -> bool:
    """Return whether no row of a `[B, T]` bool mask has padding between its tokens."""
    begins = real & ~np.pad(real, ((0, 0), (1, 0)))[:, :-1]
    return bool((begins.sum(axis=1) <= 1).all())


def padding_has_labels(labels: Tensor, real: Tensor, ignore_index: int, is_shifted: bool) -> Tensor:
    """Return, as a bool tensor, whether a loss reads the outputs at padding, where `real` `[B, T]` is False.

    It does where padding has one of the `labels` `[B, T]`, or predicts that of the token behind it.
    """
    is_label = labels.to(real.device) != ignore_index
    has_label = (is_label & ~real).any()
    return has_label if is_shifted else has_label | (is_label[:, 1:] & ~real[:, :-1]).any()

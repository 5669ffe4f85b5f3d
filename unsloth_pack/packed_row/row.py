"""Say which token belongs to which document. A packed row is built once a step, on the host.

B rows of T tokens are flattened to one row of N = B * T tokens. It consists of segments: documents, and
perhaps one run of padding at the end of each of the B rows.

    lengths   3     4         2   | padding 3
    tokens    a a a b b b b   c c | . . .
    positions 0 1 2 0 1 2 3   0 1 | 0 1 2
    cu_seqlens 0, 3, 7, 9, 12

A segment may continue another, its parent, as answers continue one prompt. It sees its ancestors whole and
itself causally; its first token is predicted by its parent's last. Descendants follow a segment directly.

    lengths   3     2   3        parent -1, 0, 0
    tokens    p p p a a b b b
    positions 0 1 2 3 4 3 4 5
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100
# Documents stacked into one batch are at least this long, relative to the longest of them
_STACK_RATIO = 0.75

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One flattened row of N tokens cut into segments."""

    lengths: tuple[int, ...]  # tokens of every segment in order, all positive, summing to N
    is_padding: tuple[bool, ...]  # for every segment, whether it is padding rather than a document
    positions: np.ndarray  # `[N]` int64 on the host; the rotary position of every token
    shape: tuple[int, int]  # (B, T) of the rows before flattening
    device: torch.device  # where the tensors that describe the row live
    # `[3, N]` int64 on the host; positions in time, height and width, or None where tokens have one axis
    axes: np.ndarray | None = None
    visual: np.ndarray | None = None  # `[V]` int64 on the host; the tokens that stand for images, if any
    both_ways: bool = False  # adjacent `visual` tokens of a document see each other in both directions
    # for every segment the one that it continues, or -1, in preorder; None where no segment continues another
    parent: tuple[int, ...] | None = None
    _built: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of_lengths(
        cls, lengths: tuple[int, ...], device: torch.device, parent: tuple[int, ...] | None = None
    ) -> "PackedRow":
        """Build a row of documents that fill it, with positions that restart, or continue the parent's."""
        above = count_tokens_above(lengths, parent)
        positions = np.concatenate([np.arange(n) + first for n, first in zip(lengths, above, strict=True)])
        shape = (1, len(positions))
        return cls(tuple(lengths), (False,) * len(lengths), positions, shape, device, parent=parent)

    @classmethod
    def static(
        cls,
        n_tokens: int,
        n_segments: int,
        longest: int,
        device: torch.device,
        has_axes: bool = False,
        both_ways: bool = False,
        has_branches: bool = False,
    ) -> "PackedRow":
        """Build a row of fixed sizes for CUDA graphs, to `fill` anew every step.

        Only sizes, `cu_seqlens`, `parents`, `position_ids` and `axis_ids` mean anything; any token may be an
        image's.
        """
        positions = np.full(n_tokens, longest - 1)  # tables reach as far: positions may start above 0
        row = cls(
            (longest, *[0] * (n_segments - 1)),
            (False,) * n_segments,
            positions,
            (1, n_tokens),
            device,
            axes=np.tile(positions, (3, 1)) if has_axes else None,
            visual=np.arange(n_tokens),
            both_ways=both_ways,
            parent=(-1,) * n_segments if has_branches else None,
        )
        # One tensor, so that one transfer fills all
        n_positions = (4 if has_axes else 1) * n_tokens
        n_by_segment = n_segments // 2 + 1  # pairs of int32
        size = n_positions + (2 if has_branches else 1) * n_by_segment
        numbers = torch.zeros(size, dtype=torch.int64, device=device)
        row._built["static"], row.__dict__["position_ids"] = numbers, numbers[:n_tokens]
        if has_axes:
            row.__dict__["axis_ids"] = numbers[n_tokens:n_positions].view(3, n_tokens)
        by_segment = numbers[n_positions:].view(torch.int32)
        row.__dict__["cu_seqlens"] = by_segment[: n_segments + 1]
        row.cu_seqlens.fill_(n_tokens)
        if has_branches:
            row.__dict__["parents"] = by_segment[2 * n_by_segment :][:n_segments]
            row.parents.fill_(-1)
        return row

    def fill(self, row: "PackedRow") -> None:
        """Make this static row describe `row`, followed by padding and empty segments."""
        n_tokens = self.n_tokens
        tail = np.arange(n_tokens - row.n_tokens) % self.longest
        ends = [*np.cumsum(row.lengths), *(row.n_tokens + np.flatnonzero(tail == 0)[1:])]
        static: Tensor = self._built["static"]
        numbers = np.empty(len(static), dtype=np.int64)
        positions = [row.positions]
        if self.axes is not None:
            positions += [row.positions] * 3 if row.axes is None else [*row.axes]
        n_positions = len(positions) * n_tokens
        by_axis = numbers[:n_positions].reshape(len(positions), n_tokens)
        by_axis[:, : row.n_tokens], by_axis[:, row.n_tokens :] = positions, tail
        cu_seqlens = numbers[n_positions:].view(np.int32)
        if self.parent is not None:
            cu_seqlens, parents = np.split(cu_seqlens, 2)
            parents[:] = -1
            if row.parent is not None:
                parents[: len(row.parent)] = row.parent
        cu_seqlens[: len(ends) + 1], cu_seqlens[len(ends) + 1 :] = [0, *ends], n_tokens
        static.copy_(self.pinned(numbers), non_blocking=True)

    def fill_ends(self, lengths: np.ndarray) -> None:
        """Set the segment lengths of this static row, where nobody reads positions."""
        ends = np.full(len(self.cu_seqlens), self.n_tokens, dtype=np.int32)
        ends[0], ends[1 : len(lengths) + 1] = 0, np.cumsum(lengths)
        self.cu_seqlens.copy_(self.pinned(ends), non_blocking=True)

    def __getstate__(self) -> dict[str, Any]:
        """Drop cached tensors: a loader's worker pickles rows for another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"_built": {}}

    def on(self, device: torch.device) -> "PackedRow":
        """Return the row for a model on `device`."""
        return self if self.device == device else replace(self, device=device, _built={})

    @property
    def n_tokens(self) -> int:
        return len(self.positions)

    @cached_property
    def has_own_axes(self) -> bool:
        """Return whether some token's position in time, height or width differs from that in the text."""
        return self.axes is not None and bool((self.axes != self.positions).any())

    @cached_property
    def longest(self) -> int:
        """Return the length of the longest segment."""
        return max(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """Return `[segments]` int64 on the host: the first token of every segment."""
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(np.int64)

    @cached_property
    def documents(self) -> np.ndarray:
        """Return `[documents]` int64 on the host: the segments that are no padding."""
        return np.flatnonzero(~np.array(self.is_padding))

    @cached_property
    def last_tokens(self) -> np.ndarray:
        """Return `[documents]` int64 on the host: the last token of every document."""
        last: np.ndarray = self.starts + np.array(self.lengths) - 1
        return last.take(self.documents)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Return `[segments + 1]` int32: 0, then the running sum of the lengths, for varlen kernels."""
        return self.upload(np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32))

    @cached_property
    def parents(self) -> Tensor:
        """Return `[segments]` int32: `parent` on the device; only where there is one."""
        return self.upload(np.array(self.parent, dtype=np.int32))

    @cached_property
    def predictors(self) -> np.ndarray:
        """Return `[N]` int64 on the host: whose output predicts the token behind each token of the row.

        It is the token itself, but before a branch the last token of the branch's parent.
        """
        predictors = np.arange(self.n_tokens)
        for segment, parent in enumerate(self.parent or ()):
            if parent >= 0:
                predictors[self.starts[segment] - 1] = self.starts[parent] + self.lengths[parent] - 1
        return predictors

    def before_next_token(self, hidden_BTC: Tensor) -> Tensor:
        """Return `[B, T, C]` with the hidden states of `predictors` in place of each token's own."""
        if self.parent is None:
            return hidden_BTC
        on_device = self.once("predictors", lambda: self.upload(self.predictors))
        return hidden_BTC.flatten(0, 1)[on_device].view(hidden_BTC.shape)  # its backward sums in order

    @cached_property
    def position_ids(self) -> Tensor:
        """Return `[N]` int64: the rotary position of every token."""
        return self.upload(self.positions)

    @cached_property
    def axis_ids(self) -> Tensor:
        """Return `[3, N]` int64: `axes` on the device; only where there are any."""
        assert self.axes is not None
        return self.upload(self.axes)

    @cached_property
    def visual_ids(self) -> Tensor:
        """Return `[V]` int64: `visual` on the device; only where there are any."""
        assert self.visual is not None
        return self.upload(self.visual)

    @cached_property
    def blocks(self) -> np.ndarray:
        """Return `[blocks, 2]` int64 on the host: the first token and the end of each bidirectional run.

        None crosses the end of a document.
        """
        if not self.both_ways or self.visual is None or not len(self.visual):
            return np.zeros((0, 2), dtype=np.int64)
        begins = np.ones(len(self.visual), dtype=bool)
        begins[1:] = (np.diff(self.visual) != 1) | np.isin(self.visual[1:], self.starts)
        return np.stack([self.visual[begins], self.visual[np.roll(begins, -1)] + 1], axis=1)

    @cached_property
    def token_mask(self) -> Tensor | None:
        """Return `[B, T]` int64, 0 on padding, or None without padding."""
        if not any(self.is_padding):
            return None
        is_document = np.repeat(~np.array(self.is_padding), self.lengths)
        return self.upload(is_document.astype(np.int64).reshape(self.shape))

    @cached_property
    def unscored_places(self) -> np.ndarray:
        """Return the tokens, int64 on the host, whose label carries no loss: padding, and document starts.

        The first token of a branch is no document start.
        """
        is_unscored = np.repeat(np.array(self.is_padding), self.lengths)
        is_unscored[self.starts if self.parent is None else self.starts[np.array(self.parent) < 0]] = True
        return np.flatnonzero(is_unscored)

    @cached_property
    def predicted_unscored(self) -> np.ndarray:
        """Return the `unscored_places` that a token before them predicts: not column 0 of `[B, T]`."""
        predicted: np.ndarray = self.unscored_places[self.unscored_places % self.shape[1] != 0]
        return predicted

    @cached_property
    def places_before_others(self) -> np.ndarray:
        """Return the tokens, int64 on the host, whose output does not predict the token behind them."""
        before_branches = np.flatnonzero(self.predictors != np.arange(self.n_tokens))
        return np.concatenate([self.predicted_unscored - 1, before_branches])

    @cached_property
    def places_before_unscored(self) -> np.ndarray:
        """Return the tokens, int64 on the host, that have no token of their own document to predict."""
        return (self.unscored_places - 1) % self.n_tokens

    def _stack(self, ratio: float) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
        """Stack segments at least `ratio` times as long as the longest of their stack.

        Those of a stack have as many tokens in their ancestors.
        """
        lengths, above = np.array(self.lengths), count_tokens_above(self.lengths, self.parent)
        segments: list[list[int]] = []
        for segment in np.lexsort((-lengths, above)).tolist():
            first = segments[-1][0] if segments else segment
            is_alike = above[segment] == above[first] and lengths[segment] >= ratio * lengths[first]
            if segments and is_alike:
                segments[-1].append(segment)
            else:
                segments.append([segment])
        slots, stacks = [], []
        for stack in segments:
            columns = np.minimum(np.arange(lengths[stack[0]])[None, :], lengths[stack][:, None] - 1)
            slots.append(self.starts[stack][:, None] + columns)
            queries = keys = self.upload(slots[-1])
            if above[stack[0]]:
                ancestors = np.stack([self._tokens_above(segment) for segment in stack])
                keys = torch.cat([self.upload(ancestors), queries], dim=1)
            stacks.append((queries, keys))
        flat = np.concatenate([stack.reshape(-1) for stack in slots])
        place = np.empty(self.n_tokens, dtype=np.int64)
        # Backwards, so that the first slot of a token wins: later ones are fillers
        place[flat[::-1]] = np.arange(len(flat))[::-1]
        return tuple(stacks), self.upload(place)

    def _tokens_above(self, segment: int) -> np.ndarray:
        """Return the tokens of a segment's ancestors, in order; only where there are any."""
        runs: list[np.ndarray] = []
        while self.parent is not None and (segment := self.parent[segment]) >= 0:
            runs.insert(0, np.arange(self.lengths[segment]) + self.starts[segment])
        return np.concatenate(runs)

    @cached_property
    def stacks(self) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
        """Group segments of similar length into right-padded batches: int64 token indices.

        A slot past the end of its segment repeats the segment's last token, so no slot shows another
        document; under a causal mask nothing before it can see it.

        Returns the batches, and `[N]` int64: where each token lies in them, flattened and concatenated. A
        batch has queries `[segments, L]` and keys `[segments, P + L]`, P of them in ancestors; the last query
        faces the last key. Without ancestors both are one tensor.
        """
        return self._stack(_STACK_RATIO)

    @cached_property
    def equal_stacks(self) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
        """Do the same for the segments of each length by themselves, without padding."""
        return self._stack(1.0)

    def mask_labels(
        self, labels: Tensor, ignore_index: int = IGNORE_INDEX, is_shifted: bool = False
    ) -> Tensor:
        """Copy `labels`, of N elements, to the row's device, with `ignore_index` at `unscored_places`.

        If `is_shifted`, each label stands one token before its own token.
        """
        places = self.places_before_unscored if is_shifted else self.unscored_places
        on_device = self.once(("unscored", is_shifted), lambda: self.upload(places))
        masked = labels.reshape(-1).to(self.device, copy=True)
        return masked.index_fill_(0, on_device, ignore_index).view(labels.shape)  # assigning would wait

    def once(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """Return the result of `build`, cached by `key` for all layers of the step."""
        if key not in self._built:
            self._built[key] = build()
        built: _T = self._built[key]
        return built

    def upload(self, array: np.ndarray) -> Tensor:
        """Copy `array` to the row's device without waiting for it."""
        return self.pinned(array).to(self.device, non_blocking=True)

    def pinned(self, array: np.ndarray) -> Tensor:
        """Copy `array` to pinned memory if the row is on a GPU: a copy from other memory would wait."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor
        pinned = torch.empty_like(tensor, pin_memory=True)
        # By numpy: torch copies in several threads, which wait while loaders keep the cores busy
        pinned.numpy()[...] = array
        return pinned


def count_tokens_above(lengths: Sequence[int], parent: Sequence[int] | None) -> np.ndarray:
    """Return `[segments]` int64: the tokens of each segment's ancestors."""
    above = np.zeros(len(lengths), dtype=np.int64)
    for segment, before in enumerate(parent or ()):
        if before >= 0:
            above[segment] = above[before] + lengths[before]
    return above


def find_misplaced(parent: Sequence[int]) -> int | None:
    """Return the first segment that does not follow its parent or another descendant of it, or None."""
    for segment, before in enumerate(parent):
        last = segment - 1
        while last > before:
            last = parent[last]
        if last != before:
            return segment
    return None


def round_up(n: int, least: int = 1) -> int:
    """Round n up in steps of a sixteenth of the power of 2 above, at least `least`.

    Rows of similar size then replay the same CUDA graphs.
    """
    step = max(least, power_of_2(n) // 16)
    return -(-n // step) * step


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is not below n."""
    return 1 << max(0, n - 1).bit_length()

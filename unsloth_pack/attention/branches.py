"""Lay out the keys of a row that branches for kernels that attend from segments to segments.

A segment of keys holds the tokens that its queries can reach: those of its ancestors, and its own behind
them. So a varlen kernel needs one call, with its own windows, softcap and dropout. The keys of a prefix are
copied for each of its branches, as in rows that share nothing; all else of a layer is computed once.

Two calls, of branches on themselves and on their prefix, would copy nothing. But to join them in the backward
pass a kernel has to take their joint log-sum-exp, which the public functions of FlashAttention do not.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_pack.kernels import Scaled, sum_of_rows
from unsloth_pack.kernels.launch import apply, once_differentiable
from unsloth_pack.packed_row.row import PackedRow, count_tokens_above


@dataclass(frozen=True, eq=False)
class BranchKeys:
    """The keys of each segment of a row of N tokens."""

    row: PackedRow  # M keys; the last key of a segment is its last query's own
    places: Tensor  # `[M]` int64; the token of each key
    copies: Tensor  # `[N, C]` int64; the keys of each token, filled with M

    @classmethod
    def from_row(cls, row: PackedRow, window: int | None) -> "BranchKeys":
        """Return the keys that all layers with this window share; None sees all of them."""

        def build() -> BranchKeys:
            paths: list[np.ndarray] = []  # the tokens of each segment behind those of its ancestors
            for start, length, parent in zip(row.starts, row.lengths, row.parent or (), strict=True):
                above = paths[parent] if parent >= 0 else np.zeros(0, dtype=np.int64)
                paths.append(np.concatenate([above, np.arange(start, start + length)]))
            if window is not None:
                paths = [path[-(n + window - 1) :] for path, n in zip(paths, row.lengths, strict=True)]
            keys = PackedRow.of_lengths(tuple(map(len, paths)), row.device)
            places = np.concatenate(paths)
            return cls(keys, row.upload(places), row.upload(_invert(places, row.n_tokens)))

        return row.once(("keys of branches", window), build)

    def gather(self, x_NKD: Tensor) -> Tensor:
        """Return `[M, K, D]`. Gradients of copies are added in their order, in float32."""
        return apply(_Gather, x_NKD, self.places, self.copies)


def _invert(places: np.ndarray, n_tokens: int) -> np.ndarray:
    """Return `[N, C]` int64: where each token stands in `places`, filled with their number."""
    counts = np.bincount(places, minlength=n_tokens)
    order = np.argsort(places, kind="stable")
    copies = np.full((n_tokens, counts.max()), len(places))
    copies[places[order], np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)] = order
    return copies


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NKD: Tensor, places: Tensor, copies: Tensor) -> Tensor:
        ctx.save_for_backward(copies)
        return x_NKD.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_MKD: Tensor) -> tuple[Tensor, None, None]:
        (copies,) = ctx.saved_tensors
        g_MC = g_MKD.flatten(1)
        g_NC = sum_of_rows([Scaled(torch.cat([g_MC, g_MC.new_zeros(1, g_MC.shape[1])]), 1.0)], copies)
        return g_NC.view(-1, *g_MKD.shape[1:]), None, None


def find_longest_path(row: PackedRow) -> int:
    """Return the tokens of the longest segment with its ancestors: windows from there on hide nothing."""

    def add_ancestors() -> int:
        return int((count_tokens_above(row.lengths, row.parent) + row.lengths).max())

    return row.longest if row.parent is None else row.once("longest path", add_ancestors)

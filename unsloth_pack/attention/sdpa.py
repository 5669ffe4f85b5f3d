"""Attend over a packed row with `scaled_dot_product_attention`, documents of similar length as one batch.

No mask over the whole row is built. A stack of documents is padded on the right, where the causal mask hides
the padding. Where a sliding window is shorter than the stack, each block of queries gets the keys that it can
reach, under a mask of at most 2 * max(window, 256) keys a side. With a softcap or sinks the logits are built
eagerly, for long documents block by block, and again in the backward pass.

Without a causal mask a batch holds segments of one length. Segments with other keys run one by one.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unsloth_pack.attention.dense import attend_all, attend_dense, causal_mask, needs_eager, window_mask
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.packed_row.row import PackedRow

_SHORTEST_BLOCK = 256
_EAGER_BLOCK = 1024  # queries whose logits exist at the same time


def why_unavailable(need: AttentionNeed) -> str | None:
    if not need.options.causal and needs_eager(need.options):
        return "it has neither softcap nor sinks for attention that is not causal"
    return None


def attend(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    sinks_H: Tensor | None = None,
    keys: PackedRow | None = None,
) -> Tensor:
    if keys is not None:
        return _attend_other_keys(q_NHD, k_NKD, v_NKD, row, options, keys)
    if not options.causal:
        return _attend_whole_segments(q_NHD, k_NKD, v_NKD, row, options)
    outs = []
    for stack_SL in row.stacks:
        q_SHLD, k_SKLD, v_SKLD = (x[stack_SL].transpose(1, 2) for x in (q_NHD, k_NKD, v_NKD))
        length = stack_SL.shape[1]
        window = None if options.window is None or options.window >= length else options.window
        if needs_eager(options) and length > _EAGER_BLOCK:
            out_SLHD = _attend_eager_blocks(q_SHLD, k_SKLD, v_SKLD, window, options, sinks_H)
        elif window is not None:
            out_SLHD = _attend_window(q_SHLD, k_SKLD, v_SKLD, window, row, options, sinks_H)
        else:
            out_SLHD = attend_dense(q_SHLD, k_SKLD, v_SKLD, None, options, sinks_H)
        outs.append(out_SLHD.flatten(0, 1))
    return torch.cat(outs)[row.unstack]


def _attend_whole_segments(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, row: PackedRow, options: AttentionOptions
) -> Tensor:
    """Attend in both directions; segments of one length form a batch, as nothing would hide padding."""
    outs = []
    for stack_SL in row.equal_stacks:
        q_SHLD, k_SKLD, v_SKLD = (x[stack_SL].transpose(1, 2) for x in (q_NHD, k_NKD, v_NKD))
        outs.append(attend_all(q_SHLD, k_SKLD, v_SKLD, options).flatten(0, 1))
    return torch.cat(outs)[row.unstack_equal]


def _attend_other_keys(
    q_QHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, row: PackedRow, options: AttentionOptions, keys: PackedRow
) -> Tensor:
    """Attend from each segment of queries to the segment of `keys` in its place, without a causal mask."""
    outs = []
    segments = (x.split(list(cut.lengths)) for x, cut in ((q_QHD, row), (k_MKD, keys), (v_MKD, keys)))
    for qkv in zip(*segments, strict=True):
        q_1HLD, k_1KSD, v_1KSD = (x.transpose(0, 1)[None] for x in qkv)
        sizes, window, mask = (q_1HLD.shape[2], k_1KSD.shape[2]), options.window, None
        if window is not None and window < sizes[1]:
            build = partial(window_mask, *sizes, window, row.device)
            mask = row.once(("window mask", window, sizes), build)
        outs.append(attend_all(q_1HLD, k_1KSD, v_1KSD, options, mask)[0])
    return torch.cat(outs)


def _attend_window(
    q_SHLD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    window: int,
    row: PackedRow,
    options: AttentionOptions,
    sinks_H: Tensor | None,
) -> Tensor:
    outs = []
    for queries, keys in _blocks(q_SHLD.shape[2], max(window, _SHORTEST_BLOCK), window):
        sizes = (queries.stop - queries.start, keys.stop - keys.start)
        mask = row.once(("window mask", window, sizes), partial(causal_mask, *sizes, window, row.device))
        qkv = q_SHLD[:, :, queries], k_SKLD[:, :, keys], v_SKLD[:, :, keys]
        outs.append(attend_dense(*qkv, mask, options, sinks_H))
    return torch.cat(outs, dim=1)


def _attend_eager_blocks(
    q_SHLD: Tensor,
    k_SKLD: Tensor,
    v_SKLD: Tensor,
    window: int | None,
    options: AttentionOptions,
    sinks_H: Tensor | None,
) -> Tensor:
    def block(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        mask = causal_mask(q.shape[2], k.shape[2], window, q.device)
        return attend_dense(q, k, v, mask, options, sinks)

    outs = []
    for queries, keys in _blocks(q_SHLD.shape[2], _EAGER_BLOCK, window):
        inputs = q_SHLD[:, :, queries], k_SKLD[:, :, keys], v_SKLD[:, :, keys], sinks_H
        outs.append(checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=options.dropout > 0))
    return torch.cat(outs, dim=1)


def _blocks(length: int, size: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Cut queries into blocks, each with the keys that it can reach."""
    for start in range(0, length, size):
        end = min(start + size, length)
        yield slice(start, end), slice(0 if window is None else max(0, start - window + 1), end)

"""Attend with `scaled_dot_product_attention`: over a packed row, and over an ordinary batch.

Documents of similar length form one batch.

No mask over the whole row is built. A stack of documents is padded on the right, where the causal mask hides
the padding. Where a sliding window is shorter than the stack, each block of queries gets the keys that it can
reach, under a mask of at most 2 * max(window, 256) keys a side. The keys of a branch are those of its
ancestors and its own, under a mask of at most 1,024 queries. With a softcap or sinks the logits are built
eagerly, for long documents block by block, and again in the backward pass.

Without a causal mask a batch holds segments of one length. Segments with other keys run one by one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from unsloth_pack.attention.options import AttentionOptions
from unsloth_pack.packed_row.row import PackedRow

QKV = tuple[Tensor, Tensor, Tensor]  # q, k and v of one layout

_SHORTEST_BLOCK = 256
_EAGER_BLOCK = 1024  # queries whose logits exist at the same time
# On a GPU larger heads run through torch's memory-efficient kernel, which takes no grouped heads: torch would
# build the logits of all queries instead.
_LARGEST_GROUPED = 256


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
        return _attend_other_keys((q_NHD, k_NKD, v_NKD), row, options, keys, sinks_H)
    outs, (stacks, unstack) = [], row.stacks if options.causal else row.equal_stacks
    for queries_SL, keys_SM in stacks:
        q = q_NHD[queries_SL].transpose(1, 2)
        k, v = (x[keys_SM].transpose(1, 2) for x in (k_NKD, v_NKD))
        n_keys = keys_SM.shape[1]
        has_ancestors = n_keys > queries_SL.shape[1]
        window = None if options.window is None or options.window >= n_keys else options.window
        if not options.causal:
            out_SLHD = _attend_pairs((q, k, v), options, None, False, sinks_H)
        elif has_ancestors or window is not None or (_is_eager(options) and n_keys > _EAGER_BLOCK):
            out_SLHD = _attend_in_blocks((q, k, v), window, row, options, sinks_H)
        else:
            out_SLHD = attend_dense(q, k, v, None, options, sinks_H)
        outs.append(out_SLHD.flatten(0, 1))
    return torch.cat(outs)[unstack]


def _attend_other_keys(
    qkv: QKV, row: PackedRow, options: AttentionOptions, keys: PackedRow, sinks_H: Tensor | None
) -> Tensor:
    """Attend from each segment of queries to the segment of `keys` in its place, without a causal mask."""
    outs = []
    segments = (x.split(list(cut.lengths)) for x, cut in zip(qkv, (row, keys, keys), strict=True))
    for segment in zip(*segments, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in segment)
        sizes, window, mask = (q.shape[2], k.shape[2]), options.window, None
        if window is not None and window < sizes[1]:
            build = partial(build_mask, *sizes, window, row.device, is_causal=False)
            mask = row.once(("window mask", window, sizes), build)
        outs.append(_attend_pairs((q, k, v), options, mask, False, sinks_H)[0])
    return torch.cat(outs)


def _attend_in_blocks(
    qkv: QKV, window: int | None, row: PackedRow, options: AttentionOptions, sinks_H: Tensor | None
) -> Tensor:
    """Attend block by block of queries, each to the keys that it can reach; the last faces the last key.

    Eager logits of long documents are built again in the backward pass.
    """
    (q_SHLD, k_SKMD, v_SKMD), outs = qkv, []
    length, n_keys = q_SHLD.shape[2], k_SKMD.shape[2]
    is_recomputed = _is_eager(options) and n_keys > _EAGER_BLOCK

    def attend_block(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        sizes = q.shape[2], k.shape[2]
        build = partial(build_mask, *sizes, window, row.device)
        mask = build() if is_recomputed else row.once(("window mask", window, sizes), build)
        return attend_dense(q, k, v, mask, options, sinks)

    run: Callable[..., Tensor] = attend_block
    if is_recomputed:
        keeps_state = options.dropout > 0
        run = partial(checkpoint, attend_block, use_reentrant=False, preserve_rng_state=keeps_state)
    size = _EAGER_BLOCK if is_recomputed or window is None else max(window, _SHORTEST_BLOCK)
    for start in range(0, length, size):
        end, above = min(start + size, length), n_keys - length
        keys = slice(0 if window is None else max(0, above + start - window + 1), above + end)
        outs.append(run(q_SHLD[:, :, start:end], k_SKMD[:, :, keys], v_SKMD[:, :, keys], sinks_H))
    return torch.cat(outs, dim=1)


def attend_dense(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend from T queries to S keys.

    Args:
        q_BHTD: `[B, H, T, D]`.
        k_BKSD, v_BKSD: `[B, K, S, D]`, K dividing H.
        mask: `[B, 1, T, S]` (or broadcastable): a bool, True where a query may look, or numbers that are
            added to the logits. It includes the window and padding. None: one query sees all keys; of
            several, query i sees the keys up to i, and keys after the last query are empty slots of a static
            cache.
        sinks_H: `[H]`, the logit of each head's sink, where `options.sinks`.

    Returns:
        `[B, T, H, D]` in the dtype of `q_BHTD`.
    """
    n_queries = q_BHTD.shape[2]
    is_causal = mask is None and n_queries > 1
    if is_causal:
        k_BKSD, v_BKSD = k_BKSD[:, :, :n_queries], v_BKSD[:, :, :n_queries]
    return _attend_pairs((q_BHTD, k_BKSD, v_BKSD), options, mask, is_causal, sinks_H)


def _attend_pairs(
    qkv: QKV, options: AttentionOptions, mask: Tensor | None, is_causal: bool, sinks_H: Tensor | None
) -> Tensor:
    """Attend from every query to every key that the mask lets it see: `[B, T, H, D]`."""
    q_BHTD, k_BKSD, v_BKSD = qkv
    if _is_eager(options):
        if is_causal:
            mask = build_mask(q_BHTD.shape[2], k_BKSD.shape[2], None, q_BHTD.device)
        return _attend_eager(qkv, mask, options, sinks_H).transpose(1, 2)
    if q_BHTD.shape[-1] > _LARGEST_GROUPED:
        groups = q_BHTD.shape[1] // k_BKSD.shape[1]
        k_BKSD, v_BKSD = (x.repeat_interleave(groups, dim=1) for x in (k_BKSD, v_BKSD))
    named: dict[str, Any] = {"dropout_p": options.dropout, "is_causal": is_causal, "scale": options.scale}
    named["enable_gqa"] = q_BHTD.shape[1] != k_BKSD.shape[1]
    out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, mask, **named)
    return out_BHTD.transpose(1, 2)


def _is_eager(options: AttentionOptions) -> bool:
    """True if torch has no fused operator for these options: the logits of all pairs are built."""
    return options.softcap is not None or options.sinks


def build_mask(
    n_queries: int, n_keys: int, window: int | None, device: torch.device, is_causal: bool = True
) -> Tensor:
    """Build `[queries, keys]` bool, True where a query may look; the last query faces the last key."""
    queries = torch.arange(n_keys - n_queries, n_keys, device=device)
    age = queries[:, None] - torch.arange(n_keys, device=device)[None, :]
    is_seen = age >= 0 if is_causal else torch.ones_like(age, dtype=torch.bool)
    return is_seen if window is None else is_seen & (age < window)


def _attend_eager(qkv: QKV, mask: Tensor | None, options: AttentionOptions, sinks_H: Tensor | None) -> Tensor:
    """Attend with a softcap (Gemma 2, 2024) or sinks (gpt-oss, 2025): `[B, H, T, D]`."""
    q_BHTD, k_BKSD, v_BKSD = qkv
    groups = q_BHTD.shape[1] // k_BKSD.shape[1]
    k_BHSD, v_BHSD = (x.repeat_interleave(groups, dim=1) for x in (k_BKSD, v_BKSD))
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    logits = (q_BHTD @ k_BHSD.transpose(2, 3)).to(wide) * options.scale
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    elif mask is not None:
        logits = logits + mask
    n_keys = logits.shape[-1]
    if sinks_H is not None:
        sinks = sinks_H.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(-1)[..., :n_keys]
    return F.dropout(weights, options.dropout).to(q_BHTD.dtype) @ v_BHSD

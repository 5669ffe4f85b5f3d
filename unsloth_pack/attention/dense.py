"""Attend over an ordinary batch: padded training batches, prefill and decoding with a cache."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.attention.options import AttentionOptions

# On a GPU larger heads run through torch's memory-efficient kernel, which takes no grouped heads: torch would
# build the logits of all queries instead.
_LARGEST_GROUPED = 256


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
    if not needs_eager(options):
        if q_BHTD.shape[-1] > _LARGEST_GROUPED:
            groups = q_BHTD.shape[1] // k_BKSD.shape[1]
            k_BKSD, v_BKSD = (x.repeat_interleave(groups, dim=1) for x in (k_BKSD, v_BKSD))
        return _attend_fused(q_BHTD, k_BKSD, v_BKSD, options, mask, is_causal)
    if is_causal:
        mask = causal_mask(n_queries, n_queries, None, q_BHTD.device)
    return _attend_eager(q_BHTD, k_BKSD, v_BKSD, mask, options, sinks_H).transpose(1, 2)


def attend_all(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, options: AttentionOptions, mask: Tensor | None = None
) -> Tensor:
    """Attend from every query to every key of its batch entry: `[B, T, H, D]`.

    Args:
        mask: `[T, S]` bool, False where a query may not look after all.
    """
    return _attend_fused(q_BHTD, k_BKSD, v_BKSD, options, mask)


def _attend_fused(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    options: AttentionOptions,
    mask: Any,
    is_causal: bool = False,
) -> Tensor:
    settings: dict[str, Any] = {"dropout_p": options.dropout, "scale": options.scale, "is_causal": is_causal}
    settings["enable_gqa"] = q_BHTD.shape[1] != k_BKSD.shape[1]
    out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, **settings)
    return out_BHTD.transpose(1, 2)


def needs_eager(options: AttentionOptions) -> bool:
    """Return whether torch has no fused operator for these options: the logits of all pairs are built."""
    return options.softcap is not None or options.sinks


def causal_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Build `[queries, keys]` bool, True where a query may look; the last query faces the last key."""
    age = _age(n_queries, n_keys, device)
    return (age >= 0) if window is None else (age >= 0) & (age < window)


def window_mask(n_queries: int, n_keys: int, window: int, device: torch.device) -> Tensor:
    """Build the same for queries that see all keys behind them."""
    return _age(n_queries, n_keys, device) < window


def _age(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """Return `[queries, keys]`: how many tokens a key lies before a query."""
    queries = torch.arange(n_keys - n_queries, n_keys, device=device)
    return queries[:, None] - torch.arange(n_keys, device=device)[None, :]


def _attend_eager(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attend with a softcap (Gemma 2, 2024) or sinks (gpt-oss, 2025): `[B, H, T, D]`."""
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

"""Plain torch that kernels and their oracles share, and the random numbers of dropout."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from unsloth_pack.kernels.arguments import Field, TokenScores, TopLogProbs
from unsloth_pack.kernels.launch import wide_dtype


def scale_and_cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return scale * logits in float32 or wider; softcap * tanh(scale * logits / softcap) with a softcap."""
    z = scale * logits.to(wide_dtype(logits))
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def score(z: Tensor, labels: Tensor, fields: Collection[Field]) -> TokenScores:
    """Score labels `[...]` under logits `[..., V]`."""
    log_p = z.log_softmax(-1)
    has_no_label = labels == -100
    scores = {"log_prob": log_p.gather(-1, labels.clamp(min=0).long()[..., None])[..., 0]}
    if "entropy" in fields:  # 0 * -inf would be NaN
        scores["entropy"] = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
    if "is_top1" in fields:
        scores["is_top1"] = z.argmax(-1) == labels
    if "mean_logit" in fields:
        scores["mean_logit"] = z.mean(-1)
    if "log_sum_sq_probs" in fields:
        scores["log_sum_sq_probs"] = (2 * log_p).logsumexp(-1)
    return TokenScores(**{name: x.masked_fill(has_no_label, 0) for name, x in scores.items()})


def expect(weights: Tensor, values: Tensor) -> Tensor:
    """Sum weights * values over the last dimension; values may be infinite where weights are 0."""
    return torch.where(weights > 0, weights * values, 0).sum(-1)


def complete_teacher(z: Tensor, stored: TopLogProbs) -> Tensor:
    """Return log-probabilities `[.., V]`: the stored ones, and the rest as spread by logits z `[.., V]`."""
    ids, log_q = stored.ids.long(), stored.log_probs.to(z.dtype)
    rest = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).eps)
    others = z.scatter(-1, ids, -math.inf)
    return (others - others.logsumexp(-1, keepdim=True) + rest.log()).scatter_(-1, ids, log_q)


def dropout_threshold(p: float) -> int:
    """Return the least 16-bit number whose element is not dropped."""
    return round(p * 2**16)


def dropout_scale(p: float) -> float:
    """Return the factor on remaining elements, 1 / (1 - p) with the rounded p; 0 if none remain."""
    n_remaining = 2**16 - dropout_threshold(p)
    return 2**16 / n_remaining if n_remaining else 0.0


def philox(key: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox 4x32-7 of the counters (c0, c1, 0, 0): four words of 32 bits, in int64."""
    low = 2**32 - 1
    k0, k1 = key & low, key >> 32 & low
    c0, c1 = torch.broadcast_tensors(c0, c1)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32 & low) ^ c1 ^ k0, b & low, (a >> 32 & low) ^ c3 ^ k1, a & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c0, c1, c2, c3

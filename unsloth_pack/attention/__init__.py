"""Attention for every model: `attend` over a packed row, `attend_dense` over an ordinary batch.

All backends mean the same: causal within each document, a branch as one with the segments that it continues,
at most `window` keys back (the query's own included, as transformers counts), logits softcapped, heads
grouped, scaled by `scale`.
"""

from unsloth_pack.attention.backends import BACKENDS, attend, choose_backend, why_passed_over, why_unavailable
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.attention.sdpa import attend_dense

"""Packed attention through `scaled_dot_product_attention`: documents of similar length as one batch.

No mask over the whole row is ever built. A stack is padded on the right, where a causal mask hides the
padding by itself. Where a sliding window is shorter than the stack, blocks of queries look at the keys they
can reach, under one mask of at most 2 * max(window, 256) keys a side.
"""

from functools import partial

import torch
from torch import Tensor

from unsloth_pack.attention.dense import attend_dense, causal_mask
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.layout import PackedRow

_SHORTEST_BLOCK = 256


def why_unavailable(need: AttentionNeed) -> str | None:
    return None


def attend(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, row: PackedRow, options: AttentionOptions) -> Tensor:
    outs = []
    for stack_SL in row.stacks:
        q_SHLD, k_SKLD, v_SKLD = (x[stack_SL].transpose(1, 2) for x in (q_NHD, k_NKD, v_NKD))
        if options.window is None or options.window >= stack_SL.shape[1]:
            out_SLHD = attend_dense(q_SHLD, k_SKLD, v_SKLD, None, options)
        else:
            out_SLHD = _attend_window(q_SHLD, k_SKLD, v_SKLD, options.window, row, options)
        outs.append(out_SLHD.flatten(0, 1))
    return torch.cat(outs)[row.unstack]


def _attend_window(
    q_SHLD: Tensor, k_SKLD: Tensor, v_SKLD: Tensor, window: int, row: PackedRow, options: AttentionOptions
) -> Tensor:
    length, block = q_SHLD.shape[2], max(window, _SHORTEST_BLOCK)
    outs = []
    for start in range(0, length, block):
        end, first_key = min(start + block, length), max(0, start - window + 1)
        sizes = (end - start, end - first_key)
        mask = row.once(("window mask", window, sizes), partial(causal_mask, *sizes, window, row.device))
        keys = slice(first_key, end)
        outs.append(
            attend_dense(q_SHLD[:, :, start:end], k_SKLD[:, :, keys], v_SKLD[:, :, keys], mask, options)
        )
    return torch.cat(outs, dim=1)

"""Attend over a packed row with xformers' memory-efficient attention and its block-diagonal causal mask."""

import torch
from torch import Tensor

from unsloth_pack.attention import flash
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.errors import first_line
from unsloth_pack.packed_row.row import PackedRow


def why_unavailable(need: AttentionNeed) -> str | None:
    if need.device_type != "cuda":
        return f"it needs CUDA, the model is on {need.device_type}"
    if need.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {need.dtype}"
    if need.options.softcap is not None:
        return "it has no softcap"
    if need.options.sinks:
        return "it has no attention sinks"
    try:
        import xformers.ops  # noqa: F401
    except (ImportError, OSError) as error:
        reason = first_line(error)[:80] or type(error).__name__
        return f"xformers does not import ({reason}); pip install xformers"
    return None


def attend(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    sinks_H: Tensor | None = None,
) -> Tensor:
    assert sinks_H is None  # `why_unavailable` refuses them
    from xformers import ops

    flash.refuse_int32_overflow(q_NHD, row)  # its flash operator is the same kernel
    bias = row.once(("xformers", options.window, options.causal), lambda: _block_diagonal_mask(row, options))
    groups = q_NHD.shape[1] // k_NKD.shape[1]
    # Its backward pass does not take grouped heads
    k_NHD, v_NHD = (x.repeat_interleave(groups, dim=1) for x in (k_NKD, v_NKD))
    return ops.memory_efficient_attention(
        q_NHD[None], k_NHD[None], v_NHD[None], attn_bias=bias, p=options.dropout, scale=options.scale
    )[0]


def _block_diagonal_mask(row: PackedRow, options: AttentionOptions):
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, BlockDiagonalMask

    kind = BlockDiagonalCausalMask if options.causal else BlockDiagonalMask
    mask = kind.from_seqlens(list(row.lengths), device=row.device)
    return mask if options.window is None else mask.make_local_attention(options.window)

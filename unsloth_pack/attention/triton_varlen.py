"""Attend over a packed row with the package's own Triton kernels.

They keep the heads of a group in one tile, so that short documents fill it, and take a softcap and sinks.
"""

import torch
from torch import Tensor

from unsloth_pack.attention import flash
from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.kernels import launch, varlen_attention
from unsloth_pack.kernels.attention import MAX_HEAD_DIM
from unsloth_pack.packed_row.row import PackedRow


def why_unavailable(need: AttentionNeed) -> str | None:
    if launch.triton is None:
        return "triton does not import; pip install triton"
    if need.device_type != "cuda" and not launch.INTERPRETED:
        return f"it needs CUDA, the model is on {need.device_type}"
    if need.dtype not in launch.FUSED_DTYPES:
        return f"it computes in float16, bfloat16 and float32, not {need.dtype}"
    if need.padded_head_dim > MAX_HEAD_DIM:
        return f"its head size is at most {MAX_HEAD_DIM}, not {need.padded_head_dim}"
    if not need.options.causal:
        return "its kernels are causal"
    if need.options.dropout > 0:
        return "it has no attention dropout"
    if need.device_type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {torch.cuda.get_device_capability()}"
    if need.device_type != "cuda" and need.dtype == torch.bfloat16:
        return "Triton's interpreter cannot multiply bfloat16"
    return None


def why_not_by_default(need: AttentionNeed) -> str | None:
    if need.device_type != "cuda":
        return "`auto` takes it on CUDA only: the interpreter is slow"
    if need.options.sinks:
        return None
    kernel = None if flash.why_unavailable(need) else flash.varlen_kernel(need.padded_head_dim, need.options)
    if need.options.softcap is not None:
        return None if kernel is None else f"{kernel.name} has the softcap too"
    # Where it was measured to be faster than FlashAttention 2
    is_faster = kernel is not None and kernel.capability < (9, 0) and need.padded_head_dim <= 128
    if is_faster and torch.cuda.get_device_capability() == (9, 0):
        return None
    return "`auto` takes it for heads up to 128 on Hopper with FlashAttention 2, for a softcap, or for sinks"


def attend(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    sinks_H: Tensor | None = None,
) -> Tensor:
    # One compilation then serves layers with and without a window
    longest = row.longest if row.parent is None else row.n_tokens
    window = None if options.window is None or options.window >= longest else options.window
    return varlen_attention(
        *(q_NHD, k_NKD, v_NKD, row.cu_seqlens, options.scale),
        window=window,
        softcap=options.softcap,
        sinks=sinks_H,
        parents=None if row.parent is None else row.parents,
    )

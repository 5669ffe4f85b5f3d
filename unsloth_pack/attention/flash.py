"""Packed attention through FlashAttention's varlen kernels (Dao 2023).

The flash-attn package when it imports (3 before 2), else the same kernels as they ship in torch.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.errors import InputError
from unsloth_pack.layout import PackedRow

_MAX_HEAD_DIM = 256


def why_unavailable(need: AttentionNeed) -> str | None:
    if need.device_type != "cuda":
        return f"it needs CUDA, the model is on {need.device_type}"
    if need.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {need.dtype}"
    if need.head_dim > _MAX_HEAD_DIM or need.head_dim % 8:
        return f"its head size is a multiple of 8 up to {_MAX_HEAD_DIM}, not {need.head_dim}"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {torch.cuda.get_device_capability()}"
    kernel = varlen_kernel()
    if need.options.softcap is not None and "softcap" not in kernel.options:
        return f"{kernel.name} has no softcap; install flash-attn"
    if need.options.dropout and "dropout_p" not in kernel.options:
        return f"{kernel.name} has no attention dropout"
    return None


def attend(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, row: PackedRow, options: AttentionOptions) -> Tensor:
    refuse_int32_overflow(q_NHD, row)
    return varlen_kernel().call(q_NHD, k_NKD, v_NKD, row.cu_seqlens, row.longest, options)


def refuse_int32_overflow(q_NHD: Tensor, row: PackedRow) -> None:
    """Raise before FlashAttention-2's backward pass would corrupt the CUDA context.

    It indexes its float32 dQ accumulator, `[N + 128 * segments, H, D rounded up to 32]`, with 32 bits.
    """
    n_tokens, n_heads, head_dim = q_NHD.shape
    if (n_tokens + 128 * len(row.lengths)) * n_heads * (-(-head_dim // 32) * 32) >= 2**31:
        raise InputError(
            f"a packed row of {n_tokens} tokens, {n_heads} heads of {head_dim} passes FlashAttention's "
            "32-bit index; use a smaller max_seq_length, or attn_backend 'sdpa'"
        )


class VarlenKernel:
    """One varlen FlashAttention, its spelling of the options hidden."""

    def __init__(self, name: str, function: Callable[..., Tensor]):
        self.name = name
        self.function = function
        self.options = set(inspect.signature(function).parameters)

    def call(
        self,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        options: AttentionOptions,
    ) -> Tensor:
        # FlashAttention counts the keys before the query, transformers counts the query too.
        before = -1 if options.window is None else options.window - 1
        wanted = {
            "scale": options.scale,
            "softmax_scale": options.scale,
            "causal": True,
            "window_size": (before, 0),
            "softcap": options.softcap or 0.0,
            "dropout_p": options.dropout,
            "enable_gqa": True,
        }
        chosen = {name: value for name, value in wanted.items() if name in self.options}
        out = self.function(q_NHD, k_NKD, v_NKD, cu_seqlens, cu_seqlens, longest, longest, **chosen)
        return out[0] if isinstance(out, tuple) else out


def flash_attn_3() -> VarlenKernel:
    from flash_attn_interface import flash_attn_varlen_func

    return VarlenKernel("flash-attn 3", flash_attn_varlen_func)


def flash_attn_2() -> VarlenKernel:
    from flash_attn import flash_attn_varlen_func

    return VarlenKernel("flash-attn 2", flash_attn_varlen_func)


def torch_flash() -> VarlenKernel:
    from torch.nn.attention.varlen import varlen_attn

    return VarlenKernel("torch's FlashAttention", varlen_attn)


@lru_cache(maxsize=1)
def varlen_kernel() -> VarlenKernel:
    """The best varlen FlashAttention that imports."""
    for kernel in (flash_attn_3, flash_attn_2):
        try:
            return kernel()
        except ImportError:
            pass
    return torch_flash()

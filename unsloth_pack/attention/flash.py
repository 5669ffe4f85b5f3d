"""Attend over a packed row with FlashAttention's varlen kernels (Dao 2023), or with xformers.

The kernels come from the flash-attn packages that import and can serve the layer, else from torch.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.attention.options import AttentionNeed, AttentionOptions
from unsloth_pack.errors import InputError, first_line
from unsloth_pack.packed_row.row import PackedRow

_MAX_HEAD_DIM = 256
_ALIGNMENT = 16  # bytes


def why_unavailable(need: AttentionNeed) -> str | None:
    if why := _why_not_in_16_bits(need):
        return why
    if need.padded_head_dim > _MAX_HEAD_DIM or need.padded_head_dim % 8:
        return f"its head size is a multiple of 8 up to {_MAX_HEAD_DIM}, not {need.padded_head_dim}"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {torch.cuda.get_device_capability()}"
    if varlen_kernel(need.padded_head_dim, need.options) is None:
        missing = "softcap" if need.options.softcap is not None else "attention dropout"
        return f"{' or '.join(kernel.name for kernel in _kernels())} has no {missing}; install flash-attn"
    return None


def _why_not_in_16_bits(need: AttentionNeed) -> str | None:
    if need.device_type != "cuda":
        return f"it needs CUDA, the model is on {need.device_type}"
    if need.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {need.dtype}"
    return "it has no attention sinks" if need.options.sinks else None


def attend(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    row: PackedRow,
    options: AttentionOptions,
    keys: PackedRow | None = None,
) -> Tensor:
    refuse_int32_overflow(q_NHD, row)
    kernel = varlen_kernel(q_NHD.shape[-1], options)
    assert kernel is not None  # `why_unavailable` checks it
    q_NHD, k_NKD, v_NKD = map(_align, (q_NHD, k_NKD, v_NKD))
    return kernel.call(q_NHD, k_NKD, v_NKD, row, options, keys)


def _align(x_NHD: Tensor) -> Tensor:
    """Copy a tensor whose heads are not aligned: the kernels load 16 bytes at a time.

    Values cut out of a wider projection may be so.
    """
    begins = x_NHD.storage_offset(), *x_NHD.stride()[:-1]
    if all(begin * x_NHD.element_size() % _ALIGNMENT == 0 for begin in begins):
        return x_NHD
    return x_NHD.clone(memory_format=torch.contiguous_format)


def kernel_name(need: AttentionNeed) -> str | None:
    kernel = varlen_kernel(need.padded_head_dim, need.options)
    return None if kernel is None else kernel.name


def refuse_int32_overflow(q_NHD: Tensor, row: PackedRow) -> None:
    """Refuse a row whose backward pass in FlashAttention-2 would corrupt the CUDA context.

    It indexes its float32 dQ accumulator, `[N + 128 * segments, H, D rounded up to 32]`, with 32 bits.
    """
    n_tokens, n_heads, head_dim = q_NHD.shape
    if (n_tokens + 128 * len(row.lengths)) * n_heads * (-(-head_dim // 32) * 32) >= 2**31:
        raise InputError(
            f"a packed row of {n_tokens} tokens, {n_heads} heads of {head_dim} exceeds FlashAttention's "
            "32-bit index; use a smaller max_seq_length, or attn_backend 'sdpa'"
        )


@dataclass(frozen=True)
class VarlenKernel:
    """One varlen FlashAttention. Hides that each names its options differently."""

    name: str  # for reports
    function: Callable[..., Any]  # of q, k, v, `cu_seqlens` and the longest document of each, then options
    capability: tuple[int, int] = (8, 0)  # the least for its forward and backward pass
    head_dims: tuple[int, ...] = ()  # the sizes that it is trusted with; none for all

    @cached_property
    def options(self) -> set[str]:
        """Return the names of its parameters."""
        return {*inspect.signature(self.function).parameters}

    def serves(self, head_dim: int, options: AttentionOptions) -> bool:
        """Return whether it is trusted with this head size and has all options in use."""
        lacks_softcap = options.softcap is not None and "softcap" not in self.options
        lacks_dropout = options.dropout > 0 and "dropout_p" not in self.options
        is_trusted = not self.head_dims or head_dim in self.head_dims
        return is_trusted and not lacks_softcap and not lacks_dropout

    def call(
        self,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        row: PackedRow,
        options: AttentionOptions,
        keys: PackedRow | None = None,
    ) -> Tensor:
        """Return `[N, H, D]`; the last query of a segment faces the last of other keys."""
        # FlashAttention counts the keys before the query, transformers the query too
        before = -1 if options.window is None else options.window - 1
        named = {
            "scale": options.scale,
            "softmax_scale": options.scale,
            "causal": options.causal,
            "window_size": (before, 0 if options.causal else -1),
            "softcap": options.softcap or 0.0,
            "dropout_p": options.dropout,
            "enable_gqa": True,
        }
        chosen = {name: value for name, value in named.items() if name in self.options}
        keys = row if keys is None else keys
        segments = row.cu_seqlens, keys.cu_seqlens, row.longest, keys.longest
        out: Tensor | tuple[Tensor, ...] = self.function(q_NHD, k_NKD, v_NKD, *segments, **chosen)
        return out[0] if isinstance(out, tuple) else out


def flash_attn_4() -> VarlenKernel:
    """Load FlashAttention 4, which compiles itself in the first step of each kind of layer, in about 5 s."""
    from flash_attn.cute import flash_attn_varlen_func

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, *segments: object,
        softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        # Its "no window" is None: it takes -1 beside a 0 as a real bound
        before, after = window_size
        window = (before if before >= 0 else None, after if min(window_size) >= 0 else None)
        named = zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), segments, strict=True)
        out: tuple[Tensor, Tensor] = flash_attn_varlen_func(
            q, k, v, **dict(named), softmax_scale=softmax_scale, causal=causal, window_size=window,
            softcap=softcap,
        )  # fmt: skip
        return out

    # With heads of 16, gradients of 4.0.0b36 cross documents on Hopper; other sizes were not tried.
    return VarlenKernel("flash-attn 4", varlen, capability=(9, 0), head_dims=(32, 64, 128))


def _import_kernel(
    name: str, module: str, function: str, capability: tuple[int, int] = (8, 0)
) -> VarlenKernel:
    return VarlenKernel(name, getattr(import_module(module), function), capability)


flash_attn_3 = partial(
    _import_kernel, "flash-attn 3", "flash_attn_interface", "flash_attn_varlen_func", (9, 0)
)
flash_attn_2 = partial(_import_kernel, "flash-attn 2", "flash_attn", "flash_attn_varlen_func")
torch_flash = partial(_import_kernel, "torch's FlashAttention", "torch.nn.attention.varlen", "varlen_attn")
KERNELS = (flash_attn_4, flash_attn_3, flash_attn_2, torch_flash)  # fastest first


@lru_cache(maxsize=256)
def varlen_kernel(head_dim: int, options: AttentionOptions) -> VarlenKernel | None:
    """Return the fastest kernel that imports, runs on this GPU and serves such a layer, or None."""
    here = torch.cuda.get_device_capability()
    return next((k for k in _kernels() if k.capability <= here and k.serves(head_dim, options)), None)


@lru_cache(maxsize=1)
def _kernels() -> list[VarlenKernel]:
    kernels = []
    for load in KERNELS:
        with suppress(ImportError, AttributeError):
            kernels.append(load())
    return kernels


def why_no_xformers(need: AttentionNeed) -> str | None:
    if why := _why_not_in_16_bits(need):
        return why
    if need.options.softcap is not None:
        return "it has no softcap"
    try:
        import xformers.ops  # noqa: F401
    except (ImportError, OSError) as error:
        reason = first_line(error)[:80] or type(error).__name__
        return f"xformers does not import ({reason}); pip install xformers"
    return None


def attend_by_xformers(
    q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, row: PackedRow, options: AttentionOptions
) -> Tensor:
    from xformers import ops

    refuse_int32_overflow(q_NHD, row)  # its flash operator is the same kernel
    bias = row.once(("xformers", options.window, options.causal), partial(_block_diagonal_mask, row, options))
    groups = q_NHD.shape[1] // k_NKD.shape[1]
    # Its backward pass does not take grouped heads
    k_NHD, v_NHD = (x.repeat_interleave(groups, dim=1) for x in (k_NKD, v_NKD))
    out_1NHD: Tensor = ops.memory_efficient_attention(
        q_NHD[None], k_NHD[None], v_NHD[None], attn_bias=bias, p=options.dropout, scale=options.scale
    )
    return out_1NHD[0]


def _block_diagonal_mask(row: PackedRow, options: AttentionOptions) -> object:
    """Build xformers' mask."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, BlockDiagonalMask

    kind = BlockDiagonalCausalMask if options.causal else BlockDiagonalMask
    mask = kind.from_seqlens(list(row.lengths), device=row.device)
    return mask if options.window is None else mask.make_local_attention(options.window)

"""Weights in four bits made whole again in one launch, as bitsandbytes holds them.

    x = code[q] * s      s = s₈-code[s₈] * s' + offset where the scales are held in eight bits themselves

(Dettmers et al. 2023, "QLoRA", section 3, "Double Quantization"). bitsandbytes itself makes the scales whole
first, in two launches of their own.

n blocks of some elements with one scale each; two elements a byte, the first in the upper half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .launch import jit, takes_fused_path, tl, triton
from .reference import NestedScales

_ELEMENTS = 4096  # of a program


def dequantize_4bit(
    packed: Tensor, code: Tensor, scales: Tensor | NestedScales, block: int, dtype: torch.dtype
) -> Tensor:
    """What quantised elements stand for, computed in float32 and rounded once.

    Args:
        packed: `[n * block / 2]` uint8.
        code: `[16]` float32, what each of the sixteen values stands for.
        scales: `[n]` float32, one for each block, or these in eight bits.
        block: elements of a block, a power of 2 from 32 on.
        dtype: of the result.

    Returns:
        `[n * block]`, the same bits as by bitsandbytes.

    Raises:
        ValueError: the sizes do not fit together.
    """
    n = len(scales.values if isinstance(scales, NestedScales) else scales)
    if block < 32 or block & (block - 1):
        raise ValueError(f"block is {block}: pass a power of 2 from 32 on")
    if packed.dtype != torch.uint8 or packed.shape != (n * block // 2,):
        raise ValueError(
            f"packed is {[*packed.shape]} of {packed.dtype}: pass [{n * block // 2}] of torch.uint8, for {n} "
            f"blocks of {block}"
        )
    if not takes_fused_path(code, code):
        return reference.dequantize_4bit(packed, code, scales, block, dtype)
    out = torch.empty(n * block, dtype=dtype, device=packed.device)
    blocks = max(1, _ELEMENTS // block)
    parts = (*scales[:4], scales.group) if isinstance(scales, NestedScales) else (scales, None, None, None, 1)
    with torch.cuda.device_of(packed):
        _dequantize_kernel[(triton.cdiv(n, blocks),)](
            *(packed, code, *parts, out, n, blocks, block // 2),
            num_warps=4,
            enable_fp_fusion=False,  # bitsandbytes rounds the product before it adds the offset
        )
    return out


@jit(do_not_specialize=["n"])
def _dequantize_kernel(
    packed, code, scales, scale_code, outer_scales, offset, GROUP: tl.constexpr, out, n,
    BLOCKS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """out `[n, 2 * PAIRS]`. Grid: BLOCKS blocks each."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < n
    scale = tl.load(scales + block, mask=exists, other=0)
    if scale_code is not None:
        outer = tl.load(outer_scales + block // GROUP, mask=exists, other=0.0)
        scale = tl.load(scale_code + scale.to(tl.int32)) * outer + tl.load(offset)
    places = block[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    pairs = tl.load(packed + places, mask=exists[:, None], other=0).to(tl.int32)
    first = tl.load(code + (pairs >> 4)) * scale[:, None]
    second = tl.load(code + (pairs & 15)) * scale[:, None]
    elements = tl.interleave(first, second).to(out.dtype.element_ty)
    where = block[:, None] * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)[None, :]
    tl.store(out + where, elements, mask=exists[:, None])

"""What the row-wise kernels share: whether tensors run on Triton, and their layout as rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .side_by_side import wanted_instead

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs in place of every kernel
    triton = tl = None

INTERPRETED = triton is not None and triton.knobs.runtime.interpret
FUSED_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))

PER_THREAD = 32  # elements a thread holds: four 16-byte loads of bf16 in flight
MAX_WARPS = 16


def takes_fused_path(x: Tensor, other: Tensor) -> bool:
    """Whether a kernel over these tensors runs on Triton; the reference runs otherwise."""
    if triton is None or x.dtype not in FUSED_DTYPES or other.dtype not in FUSED_DTYPES:
        return False
    return x.is_cuda or INTERPRETED


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """The memory of `[..., C]` as rows whose last dim is contiguous, and the stride between them.

    A copy is made only where the last dim is not contiguous, or the dims before it do not collapse into one.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def jit(kernel=None, **options):
    """Triton's jit; without Triton the function as it is."""
    if kernel is None:
        return lambda kernel: jit(kernel, **options)
    if triton is None:
        return kernel
    return triton.jit(kernel, **options) if INTERPRETED else Kernel(kernel, **options)


if triton is not None:

    class Kernel(triton.JITFunction):
        """A kernel that is compiled ahead where its thread asks for that, see `compiled_side_by_side`."""

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            wanted = None if warmup else wanted_instead()
            if wanted is None:
                return super().run(*args, grid=grid, warmup=warmup, **options)
            return wanted.add(self, args, options)


def floor_power_of_2(n: int) -> int:
    """The greatest power of 2 up to n; 1 where n is below 1."""
    return 1 << max(0, n.bit_length() - 1)

"""Triton's interpreter made to compute as hardware does, for tests without a GPU."""

import numpy as np
import torch


def compute_as_hardware(monkeypatch) -> None:
    """Round to nearest even: the interpreter truncates to bfloat16, and to e4m3 it loses the carry.
    Multiply the values of bfloat16 matrices: the interpreter multiplies their bits."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    right = {
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    }

    def rounding(wrong):
        def cast(self, src, dst_type, *how):
            if src.dtype.scalar != tl.float32 or dst_type.scalar not in right:
                return wrong(self, src, dst_type, *how)
            dtype, bits, stored = right[dst_type.scalar]
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(dtype)
            return TensorHandle(rounded.view(bits).numpy().view(stored), dst_type.scalar)

        return cast

    for name in ("cast_impl", "create_fp_to_fp"):
        monkeypatch.setattr(InterpreterBuilder, name, rounding(getattr(InterpreterBuilder, name)))

    dot = InterpreterBuilder.create_dot

    def values(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(
        InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, values(a), values(b), *rest)
    )


def sum_in_one_order(monkeypatch) -> None:
    """Have equal products in tiles of unequal shapes, as on hardware, whatever the CPU.

    numpy hands tiles to a BLAS, which on some CPUs sums in another order in another shape. In float64 that
    changes bits that rounding to float32 takes away.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self, a, b, d, *_):
        sums = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
        return TensorHandle(sums + d.data, d.dtype.scalar)

    multiply = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: (multiply if a.data.dtype.kind == "u" else dot)(self, a, b, *rest),
    )

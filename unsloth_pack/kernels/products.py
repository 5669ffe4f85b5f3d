"""Products of matrices in 16 bits whose result is in float32: a gradient is then rounded once."""

import torch
from torch import Tensor


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b in out's dtype, which is that of a and b or float32."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a b, likewise."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))

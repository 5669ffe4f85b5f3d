"""The product in a gated MLP, act(gate) * up, in one launch, forward and backward.

R rows of F features, seen as one row of R * F where all tensors are contiguous. Both activations are
x * σ(z(x)):

    silu       z = x
    gelu_tanh  z = 2 √(2/π) (x + 0.044715 x³), because (1 + tanh u) / 2 = σ(2u)

so that with s = σ(z) the derivative is s * (1 + x * σ(-z) * z'), where 1 - s would cancel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference_gated as reference
from .backward import once_differentiable
from .launch import as_rows, jit, takes_fused_path, tl

ACTIVATIONS = ("silu", "gelu_tanh")

_BLOCK = 1024  # elements a program takes: a 16-byte load of bf16 a thread
_WARPS = 4


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, element by element.

    Args:
        gate, up: `[..., F]`, bfloat16, float16 or float32; float64 takes the reference path. Read in place
            where the last dim is contiguous and the others collapse into rows of one stride, as in the halves
            of a fused projection. Both are saved for the backward as they are.
        activation: "silu", or "gelu_tanh" for the tanh approximation of GELU (transformers'
            `gelu_pytorch_tanh`).

    Returns:
        A fresh contiguous tensor of their shape and (promoted, if they differ) dtype, computed in float32 and
        rounded once.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or the activation is unknown.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6 (SwiGLU, GEGLU); Hendrycks & Gimpel 2016,
    "Gaussian Error Linear Units", section 2 (the approximation).
    """
    check_gated(gate, up, activation)
    if not takes_fused_path(gate, up):
        return reference.gated(gate, up, activation)
    return _Gated.apply(gate, up, activation)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, activation: str):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        dtype = gate.dtype if gate.dtype == up.dtype else torch.promote_types(gate.dtype, up.dtype)
        out = gate.new_empty(gate.shape, dtype=dtype)
        (gate, up), strides, F, programs = _lay_out(gate, up)
        with torch.cuda.device_of(gate):
            _gated_kernel[(programs,)](gate, up, out, F, *strides, activation, _BLOCK, num_warps=_WARPS)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, g_out):
        gate, up = ctx.saved_tensors
        g_gate, g_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
        tensors, strides, F, programs = _lay_out(g_out, gate, up, g_gate, g_up)
        with torch.cuda.device_of(gate):
            _gated_backward_kernel[(programs,)](
                *(*tensors, F, *strides, ctx.activation, _BLOCK), num_warps=_WARPS
            )
        return g_gate, g_up, None


def _lay_out(*tensors: Tensor) -> tuple[list[Any], list[int], int, int]:
    """The tensors as rows, their row strides, a row's length, and the programs that cover all rows."""
    n = tensors[0].numel()
    if all(x.is_contiguous() for x in tensors):
        return [*tensors], [0] * len(tensors), n, -(-n // _BLOCK)
    rows, strides = zip(*map(as_rows, tensors), strict=True)
    F = tensors[0].shape[-1]
    return [*rows], [*strides], F, n // max(1, F) * -(-F // _BLOCK)


def check_written(shape: torch.Size, **tensors: Tensor) -> None:
    """Raise ValueError unless the tensors are of this shape and a kernel can write into them."""
    for name, x in tensors.items():
        if x.shape != shape or not _is_rows(x):
            raise ValueError(
                f"{name} is {[*x.shape]} with strides {[*x.stride()]}: pass {[*shape]}, contiguous or a "
                "slice of the last dim"
            )


def _is_rows(x: Tensor) -> bool:
    """Whether `as_rows` gives x's own memory, in which no two rows overlap."""
    if x.is_contiguous():
        return True
    try:
        rows = x.view(-1, x.shape[-1])
    except RuntimeError:
        return False
    return rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]


def check_gated(gate: Tensor, up: Tensor, activation: str) -> None:
    """Raise ValueError unless the arguments fit together, by their shapes, dtypes and devices alone."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}: pass one of {', '.join(ACTIVATIONS)}")
    if gate.shape != up.shape or not gate.dim():
        raise ValueError(
            f"gate {[*gate.shape]} and up {[*up.shape]} must have one shape: pass two of [.., F]"
        )
    if not gate.is_floating_point() or not up.is_floating_point():
        raise ValueError(f"gate is {gate.dtype} and up is {up.dtype}: cast both to a floating dtype")
    if gate.device != up.device:
        raise ValueError(f"gate is on {gate.device} but up on {up.device}: move it there")


# F is specialised, unlike the kernels' other sizes: Triton must know that 16 divides it for 16-byte accesses.


@jit
def _gated_kernel(gate, up, out, F, gate_sr, up_sr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """out `[R, F]`: act(gate) * up. Grid: the blocks of BLOCK elements of each row in turn."""
    row, col = _row_and_columns(F, BLOCK)
    x = tl.load(gate + row * gate_sr + col, mask=col < F, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_sr + col, mask=col < F, other=0.0).to(tl.float32)
    acted = x * _sigmoid(_z(x, ACTIVATION), gate.dtype.element_ty)
    tl.store(out + row * F + col, (acted * u).to(out.dtype.element_ty), mask=col < F)


@jit
def _gated_backward_kernel(
    g_out, gate, up, g_gate, g_up, F, g_sr, gate_sr, up_sr, g_gate_sr, g_up_sr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """g_gate, g_up `[R, F]`: the gradients of gate and up. Grid: as in the forward."""
    row, col = _row_and_columns(F, BLOCK)
    g = tl.load(g_out + row * g_sr + col, mask=col < F, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_sr + col, mask=col < F, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_sr + col, mask=col < F, other=0.0).to(tl.float32)
    _product, gx, gu = product_and_gradients(g, x, u, gate.dtype.element_ty, ACTIVATION)
    tl.store(g_gate + row * g_gate_sr + col, gx.to(g_gate.dtype.element_ty), mask=col < F)
    tl.store(g_up + row * g_up_sr + col, gu.to(g_up.dtype.element_ty), mask=col < F)


@jit
def product_and_gradients(g, x, u, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """act(x) * u, and the gradients of x and u for its gradient g, as exact as a dtype asks for."""
    z = _z(x, ACTIVATION)
    s = _sigmoid(z, dtype)
    bend = x * _sigmoid(-z, dtype) * _slope_of_z(x, ACTIVATION)
    return x * s * u, g * u * (s * (1 + bend)), g * (x * s)


@jit
def _row_and_columns(F, BLOCK: tl.constexpr):
    """This program's row, a number, and its columns, both int64: a row may hold all of 2³¹ elements."""
    blocks = tl.cdiv(F, BLOCK)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    return row.to(tl.int64), block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@jit
def _z(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu_tanh":
        return 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 √(2/π)
    else:
        return x


@jit
def _slope_of_z(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu_tanh":
        return 1.5957691216057308 * (1 + 3 * 0.044715 * x * x)
    else:
        return 1.0


@jit
def _sigmoid(z, dtype: tl.constexpr):
    if dtype == tl.float32:
        return tl.div_rn(1.0, 1.0 + tl.exp(-z))
    else:
        return 1.0 / (1.0 + tl.exp(-z))  # quicker, and off by far less than a half-precision unit

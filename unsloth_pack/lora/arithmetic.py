"""The arithmetic of LoRA layers over one input, with no copies between their GEMMs.

    y_p = x W_pᵀ + b_p + s_p · (drop_p(x) A_pᵀ) B_pᵀ      for each of the layers p     (Hu et al. 2021)

The A of all layers are stacked, so that x is read once for all of them, forward and backward. Factors are
cast once, and s_p is the alpha of a GEMM. Layers with dropout read x one after the other, because their masks
differ; masks are drawn from a seed again and never stored.

Shapes: N tokens, I inputs, O outputs, r rank, R ranks of all layers together; W `[O, I]`, A `[r, I]`,
B `[O, r]`, h = drop(x) Aᵀ `[N, R]`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unsloth_pack.kernels import (
    Fp8Columns,
    Fp8Rows,
    LowRank,
    dropout,
    fp8_linear,
    fp8_linear_backward,
    fp8_transposed,
    quantize_rows,
)
from unsloth_pack.kernels.launch import once_differentiable
from unsloth_pack.lora.quantised import Nf4Weight

Weight = Tensor | Fp8Rows | Nf4Weight
Versions = list[tuple[Tensor | None, int]]  # tensors that a node reads again, and torch's count of changes


class Layer(NamedTuple):
    """One layer."""

    weight: Weight  # `[O, I]`, frozen
    scaling: float  # factor on the adapter's output
    p: float = 0.0  # dropout probability of the adapter's input
    seed: Tensor | None = None  # of the dropout mask; None if p is 0
    bias: Tensor | None = None  # bias, b_Or: in the compute dtype; b_Or is None before `stack_layers`
    b_Or: Any = None
    ranks: slice = slice(0)  # its slice of the R stacked ranks

    def apply_dropout(self, x_NC: Tensor, first_row: int, add_to: Tensor | None = None) -> Tensor:
        """Apply dropout to rows of the layer's input from `first_row` on, or to their gradient."""
        if self.seed is None:
            return x_NC if add_to is None else add_to.add_(x_NC)
        return dropout(x_NC, self.seed, self.p, first_row, add_to)


class Stack(NamedTuple):
    """Layers over one input, and their stacked A."""

    a_RI: Tensor
    layers: list[Layer]

    def dequantised(self, dtype: torch.dtype) -> "Stack":
        """Dequantise 4-bit weights once for all tiles."""
        layers = [
            p._replace(weight=p.weight.dequantized(dtype)) if isinstance(p.weight, Nf4Weight) else p
            for p in self.layers
        ]
        return Stack(self.a_RI, layers)


def stack_layers(dtype: torch.dtype, layers: Sequence[Layer], tensors: Sequence[Any]) -> Stack:
    """Stack A of all layers. tensors: bias, A and B of each in turn."""
    lora_as, lora_bs = list(tensors[1::3]), list(tensors[2::3])
    ranks = [len(lora_a) for lora_a in lora_as]
    if all(factor.dtype == dtype for factor in (*lora_as, *lora_bs)):
        a_RI, b_Ors = lora_as[0] if len(lora_as) == 1 else torch.cat(lora_as), lora_bs
    else:
        a_RI = lora_as[0].new_empty((sum(ranks), lora_as[0].shape[1]), dtype=dtype)
        b_Ors = [torch.empty_like(lora_b, dtype=dtype) for lora_b in lora_bs]
        torch._foreach_copy_([*a_RI.split(ranks), *b_Ors], [*lora_as, *lora_bs])  # in one launch
    stacked, start = [], 0
    for layer, bias, b_Or, rank in zip(layers, tensors[::3], b_Ors, ranks, strict=True):
        own_bias = None if bias is None else bias.to(dtype)
        stacked.append(layer._replace(bias=own_bias, b_Or=b_Or, ranks=slice(start, start + rank)))
        start += rank
    return Stack(a_RI, stacked)


def transpose_fp8(layers: Sequence[Layer]) -> Fp8Columns | None:
    """Transpose fp8 weights for the gradient of x, once for all tiles; None without fp8 weights."""
    in_fp8 = [p.weight for p in layers if isinstance(p.weight, Fp8Rows)]
    return fp8_transposed(in_fp8) if in_fp8 else None


def forward(
    x_NI: Tensor,
    a_RI: Tensor,
    layers: Sequence[Layer],
    first_row: int = 0,
    into: Sequence[Tensor] | None = None,
) -> tuple[Sequence[Tensor], Tensor]:
    """Compute every layer's output, in `into` if it is given, and h; x begins at `first_row` of the input."""
    outputs = into or [x_NI.new_empty(x_NI.shape[0], p.b_Or.shape[0]) for p in layers]
    h_NR = project_to_ranks(x_NI, a_RI, layers, first_row)
    x_fp8 = _quantise_input(layers, x_NI)
    for y_NO, p in zip(outputs, layers, strict=True):
        if isinstance(p.weight, Fp8Rows):  # first: the fp8 GEMM cannot accumulate
            _forward_fp8(x_fp8, p, y_NO).addmm_(h_NR[:, p.ranks], p.b_Or.t(), alpha=p.scaling)
            continue
        # The narrow GEMM first: the wide one reads y while it computes; a narrow one would wait for it
        start, beta = (y_NO, 0) if p.bias is None else (p.bias, 1)
        torch.addmm(start, h_NR[:, p.ranks], p.b_Or.t(), beta=beta, alpha=p.scaling, out=y_NO)
        y_NO.addmm_(x_NI, _dense(p.weight, x_NI.dtype).t())
    return outputs, h_NR


def forward_base(
    x_NI: Tensor, a_RI: Tensor, layers: Sequence[Layer], first_row: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Compute x W_pᵀ + b_p of every layer, and h; the caller adds the low-rank parts."""
    x_fp8 = _quantise_input(layers, x_NI)
    outputs = [
        _forward_fp8(x_fp8, p, x_NI.new_empty(x_NI.shape[0], p.b_Or.shape[0]))
        if isinstance(p.weight, Fp8Rows)
        else F.linear(x_NI, _dense(p.weight, x_NI.dtype), p.bias)
        for p in layers
    ]
    return outputs, project_to_ranks(x_NI, a_RI, layers, first_row)


def project_to_ranks(x_NI: Tensor, a_RI: Tensor, layers: Sequence[Layer], first_row: int = 0) -> Tensor:
    """Compute h."""
    if not _has_dropout(layers):
        return x_NI @ a_RI.t()
    h_NR = x_NI.new_empty(x_NI.shape[0], a_RI.shape[0])
    for p in layers:
        torch.mm(p.apply_dropout(x_NI, first_row), a_RI[p.ranks].t(), out=h_NR[:, p.ranks])
    return h_NR


def backward_to_ranks(g_NOs: Sequence[Tensor], a_RI: Tensor, layers: Sequence[Layer]) -> Tensor:
    """Compute the gradient of h."""
    gh_NR = g_NOs[0].new_empty(g_NOs[0].shape[0], a_RI.shape[0])
    for g_NO, p in zip(g_NOs, layers, strict=True):
        gh_Nr = gh_NR[:, p.ranks]
        torch.addmm(gh_Nr, g_NO, p.b_Or, beta=0, alpha=p.scaling, out=gh_Nr)
    return gh_NR


def backward_to_input(
    g_NOs: Sequence[Tensor],
    gh_NR: Tensor,
    a_RI: Tensor,
    layers: Sequence[Layer],
    first_row: int = 0,
    into: Tensor | None = None,
    columns: Fp8Columns | None = None,
) -> Tensor:
    """Compute the gradient of x. Callers that work in tiles give the `columns` of `transpose_fp8`."""
    gx_NI = gh_NR.new_empty(gh_NR.shape[0], a_RI.shape[1]) if into is None else into
    if not _has_dropout(layers):
        return _backward_through_weights(g_NOs, layers, gx_NI, columns, narrow=(gh_NR, a_RI))
    _backward_through_weights(g_NOs, layers, gx_NI, columns)
    for p in layers:
        p.apply_dropout(gh_NR[:, p.ranks] @ a_RI[p.ranks], first_row, add_to=gx_NI)
    return gx_NI


def backward_to_input_base(
    g_NO: Tensor,
    gh_NR: Tensor,
    a_RI: Tensor,
    layers: Sequence[Layer],
    first_row: int = 0,
    columns: Fp8Columns | None = None,
) -> tuple[Tensor, LowRank | None]:
    """Compute the gradient of one layer's x; without dropout the caller adds the low-rank part."""
    if _has_dropout(layers):
        return backward_to_input([g_NO], gh_NR, a_RI, layers, first_row, columns=columns), None
    gx_NI = gh_NR.new_empty(gh_NR.shape[0], a_RI.shape[1])
    return _backward_through_weights([g_NO], layers, gx_NI, columns), LowRank(gh_NR, a_RI.t())


def backward_to_a(gh_NR: Tensor, x_NI: Tensor, layers: Sequence[Layer], first_row: int = 0) -> Tensor:
    """Compute the gradient of the stacked A, in the dtype of x."""
    if not _has_dropout(layers):
        return gh_NR.t() @ x_NI
    grads = [gh_NR[:, p.ranks].t() @ p.apply_dropout(x_NI, first_row) for p in layers]
    return grads[0] if len(grads) == 1 else torch.cat(grads)


def backward_to_bs(g_NOs: Sequence[Tensor], h_NR: Tensor, layers: Sequence[Layer]) -> list[Tensor]:
    """Compute the gradient of every B, in the dtype of x."""
    return [
        torch.addmm(p.b_Or, g_NO.t(), h_NR[:, p.ranks], beta=0, alpha=p.scaling)
        for g_NO, p in zip(g_NOs, layers, strict=True)
    ]


def cast_in_one_launch(tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None]) -> list[Any]:
    """Cast tensors to these dtypes in one launch; autograd would launch once for each gradient."""
    cast = list[Any](tensors)
    pairs = [(i, x) for i, x in enumerate(tensors) if x is not None and x.dtype != dtypes[i]]
    if pairs:
        for i, x in pairs:
            cast[i] = torch.empty_like(x, dtype=dtypes[i])
        torch._foreach_copy_([cast[i] for i, _ in pairs], [x for _, x in pairs])
    return cast


def order_by_layer(
    factors: Sequence[Tensor], biases: Sequence[Tensor | None], layers: Sequence[Layer]
) -> list[Tensor | None]:
    """Order gradients as `stack_layers` takes tensors: bias (or None), A and B of each layer in turn."""
    grad_a_RI, *grad_bs = factors
    return [
        grad
        for p, bias, grad_b in zip(layers, biases, grad_bs, strict=True)
        for grad in (bias, grad_a_RI[p.ranks], grad_b)
    ]


def reshape_output(y_NO: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape to `[..., O]` for an input of this shape. Autograd sees no view: it may be changed in place."""
    y: Tensor = torch.ops.aten._unsafe_view(y_NO, [*shape[:-1], y_NO.shape[-1]])
    return y


def detach_all(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Detach weights for a node: a parameter's later `data` changes nothing; they share its version."""
    return [None if tensor is None else tensor.detach() for tensor in tensors]


def record_versions(weights: Iterable[Tensor | tuple[Any, ...] | None]) -> Versions:
    """Record the versions of weights that a node keeps by reference, for `check_unchanged`.

    Autograd does not save them: checkpointing would compute them again, and a quantised weight is no tensor
    but a tuple, which begins with one.
    """
    tensors = [weight[0] if isinstance(weight, tuple) else weight for weight in weights]
    return [(x, 0 if x is None or x.is_inference() else x._version) for x in tensors]


def check_unchanged(recorded: Versions) -> None:
    """Raise RuntimeError if a tensor was modified in place since the forward pass, as autograd does."""
    if any(x is not None and not x.is_inference() and x._version != version for x, version in recorded):
        raise RuntimeError("a layer's weight was modified in place between forward and backward")


def backward_pass(backward: Callable[..., Any]) -> Any:
    """Decorate like `once_differentiable`, with autocast off: the dtypes are those of the forward pass."""

    @once_differentiable
    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        device = grads[0].device.type
        if not torch.is_autocast_enabled(device):
            return backward(ctx, *grads)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return run


def _has_dropout(layers: Sequence[Layer]) -> bool:
    return any(p.seed is not None for p in layers)


def _quantise_input(layers: Sequence[Layer], x_NI: Tensor) -> Fp8Rows | None:
    """Quantise x for the layers in fp8; None without any."""
    return quantize_rows(x_NI) if any(isinstance(p.weight, Fp8Rows) for p in layers) else None


def _forward_fp8(x_fp8: Fp8Rows | None, p: Layer, out: Tensor) -> Tensor:
    """Write x W_pᵀ + b_p of a layer in fp8 to `out`."""
    assert x_fp8 is not None
    assert isinstance(p.weight, Fp8Rows)
    fp8_linear(x_fp8, p.weight, out)
    return out if p.bias is None else out.add_(p.bias)


def _backward_through_weights(
    g_NOs: Sequence[Tensor],
    layers: Sequence[Layer],
    gx_NI: Tensor,
    columns: Fp8Columns | None,
    narrow: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Write Σ g W_p, plus the product of the `narrow` pair, to gx."""
    in_fp8 = [g_NO for g_NO, p in zip(g_NOs, layers, strict=True) if isinstance(p.weight, Fp8Rows)]
    if in_fp8:  # the order is that of `forward`
        columns = columns or transpose_fp8(layers)
        assert columns is not None
        fp8_linear_backward(in_fp8, columns, gx_NI)
    is_begun = bool(in_fp8)
    if narrow is not None:
        torch.addmm(gx_NI, *narrow, beta=int(is_begun), out=gx_NI)
        is_begun = True
    for g_NO, p in zip(g_NOs, layers, strict=True):
        if not isinstance(p.weight, Fp8Rows):
            torch.addmm(gx_NI, g_NO, _dense(p.weight, g_NO.dtype), beta=int(is_begun), out=gx_NI)
            is_begun = True
    return gx_NI


def _dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    assert not isinstance(weight, Fp8Rows)
    return weight.dequantized(dtype) if isinstance(weight, Nf4Weight) else weight

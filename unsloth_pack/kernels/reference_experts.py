"""What the kernels of routed experts compute, in plain torch: their oracles, and what runs on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Scaled(NamedTuple):
    """A matrix and what it is multiplied by before it is added to another."""

    values: Tensor
    scale: float


class Gate(NamedTuple):
    """How the outputs of gate and up become their product: act(min(gate, limit)) * (clamp(up) + offset).

    Args:
        activation: as for `gated`.
        alpha: act is x * σ(alpha x); 1 for SiLU. Any other only with "silu".
        limit: gate stays below it, and up between minus it and it. None for no limit.
        offset: what is added to up.
        interleaved: gate and up alternate among the columns; otherwise gate comes first.
    """

    activation: str
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    interleaved: bool = False

    def halves(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up `[.., F]` of `[.., 2F]`, as views."""
        if self.interleaved:
            return gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate_up.chunk(2, dim=-1)
        return gate, up

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        """The product, in torch's own operations and with autograd."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        x = self.alpha * gate
        acted = F.silu(x) if self.activation == "silu" else F.gelu(x, approximate="tanh")
        return acted / self.alpha * (up + self.offset)


class InnerSum(NamedTuple):
    """The outputs of gate and up in its parts: base + scale * low_rank + bias[expert], rounded once.

    Args:
        base: `[S, 2F]`.
        low_rank: `[S, 2F]` and its scale, or None.
        bias: `[E, 2F]`, or None.
        expert: `[S]` integers: whose bias a row gets. None without a bias.
    """

    base: Tensor
    low_rank: Scaled | None = None
    bias: Tensor | None = None
    expert: Tensor | None = None

    def total(self) -> Tensor:
        """`[S, 2F]` in the dtype of `base`."""
        wide = self.base.to(_wide(self.base), copy=True)
        if self.low_rank is not None:
            wide += self.low_rank.scale * self.low_rank.values
        if self.bias is not None:
            assert self.expert is not None
            wide += self.bias[self.expert.long()]
        return wide.to(self.base.dtype)


def routed_gate_(inner: InnerSum, weight: Tensor, gate: Gate, keep: bool) -> Tensor:
    """The contract is `unsloth_pack.kernels.routed_gate_`'s."""
    total = inner.total()
    if keep:
        inner.base.copy_(total)
    product = gate.product(*gate.halves(total.to(_wide(total))))
    return (weight[:, None] * product).to(total.dtype)


def routed_gate_backward_(
    g_out: Tensor, of_g_out: Scaled | None, inner: InnerSum, weight: Tensor, gate: Gate, g_inner: Tensor
) -> Tensor:
    """The contract is `unsloth_pack.kernels.routed_gate_backward_`'s."""
    total = inner.total().to(_wide(g_out)).requires_grad_()
    g = g_out.to(total.dtype)
    if of_g_out is not None:
        g = g + of_g_out.scale * of_g_out.values
    with torch.enable_grad():
        product = gate.product(*gate.halves(total))
    wide_weight = weight.to(total.dtype)
    (g_total,) = torch.autograd.grad(product, total, wide_weight[:, None] * g)
    g_inner.copy_(g_total)
    product = product.detach()
    g_weight = (g * product).sum(-1)  # first: g may be g_out itself
    g_out.copy_(wide_weight[:, None] * product)
    return g_weight


def sum_of_rows(parts: list[Scaled], places: Tensor) -> Tensor:
    """The contract is `unsloth_pack.kernels.sum_of_rows`'s."""
    first = parts[0].values
    total = first.new_zeros(len(places), first.shape[1], dtype=_wide(first))
    for column in places.t():
        for values, scale in parts:
            total += scale * values[column].to(total.dtype)
    return total.to(first.dtype)


def grouped_mm(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """The contract is `unsloth_pack.kernels.grouped_mm`'s. Reads on the host where the groups end."""
    y_SO = x_SI.new_empty((len(x_SI), weight_EIO.shape[2]))
    for group, rows in _groups(ends_E):
        torch.mm(x_SI[rows], weight_EIO[group], out=y_SO[rows])
    return y_SO


def grouped_outer(left_SI: Tensor, right_SO: Tensor, ends_E: Tensor) -> Tensor:
    """The contract is `unsloth_pack.kernels.grouped_outer`'s. Reads on the host where the groups end."""
    product_EIO = left_SI.new_zeros((len(ends_E), left_SI.shape[1], right_SO.shape[1]))
    for group, rows in _groups(ends_E):
        torch.mm(left_SI[rows].t(), right_SO[rows], out=product_EIO[group])
    return product_EIO


def _groups(ends_E: Tensor) -> list[tuple[int, slice]]:
    """The groups that have rows."""
    ends = ends_E.tolist()
    rows = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [(group, own) for group, own in enumerate(rows) if own.start < own.stop]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)

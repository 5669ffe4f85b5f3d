"""What the kernels of MLPs compute, in plain torch: their oracles, and what runs on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LowRank(NamedTuple):
    """A matrix `[N, F]` of low rank: scale * left rightᵀ.

    Args:
        left: `[N, r]`.
        right: `[F, r]`, any strides.
    """

    left: Tensor
    right: Tensor
    scale: float = 1.0


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, where act is "silu" or "gelu_tanh".

    The contract is `unsloth_pack.kernels.gated`'s. Computes in float32, or float64 if an input is, and rounds
    once.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", eq. 6.
    """
    promoted = torch.promote_types(gate.dtype, up.dtype)
    wide = torch.promote_types(promoted, torch.float32)
    x = gate.to(wide)
    acted = F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")
    return (acted * up.to(wide)).to(promoted)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)². The contract is `unsloth_pack.kernels.relu2`'s."""
    return F.relu(x.to(torch.promote_types(x.dtype, torch.float32))).square().to(x.dtype)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU. The contract is `unsloth_pack.kernels.xielu`'s."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    beta, eps = beta.detach().to(wide.dtype), eps.detach().to(wide.dtype)
    above = F.softplus(alpha_p.to(wide.dtype)) * wide.square()
    below = (beta + F.softplus(alpha_n.to(wide.dtype))) * (torch.minimum(wide, eps).expm1() - wide)
    return (torch.where(wide >= 0, above, below) + beta * wide).to(x.dtype)


def gated_lora_(
    gate: Tensor, of_gate: LowRank, up: Tensor, of_up: LowRank, activation: str, store: bool
) -> Tensor:
    """act(gate + of_gate) * (up + of_up); with `store` gate and up become the sums.

    The contract is `unsloth_pack.kernels.gated_lora_`'s.
    """
    sums = _sum(gate, of_gate).to(gate.dtype), _sum(up, of_up).to(up.dtype)
    if store:
        gate.copy_(sums[0])
        up.copy_(sums[1])
    return gated(*sums, activation)


def gated_lora_backward_(
    g_out: Tensor,
    of_g_out: LowRank | None,
    gate: Tensor,
    of_gate: LowRank | None,
    up: Tensor,
    of_up: LowRank | None,
    activation: str,
    g_gate: Tensor,
    g_up: Tensor,
) -> list[Tensor | None]:
    """The gradients of the sums into g_gate and g_up; g_out becomes the product. Returns products with lefts.

    The contract is `unsloth_pack.kernels.gated_lora_backward_`'s.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    x, u = (_sum(*pair).to(gate.dtype).to(wide).requires_grad_() for pair in ((gate, of_gate), (up, of_up)))
    with torch.enable_grad():
        product = gated(x, u, activation)
    grads = torch.autograd.grad(product, (x, u), _sum(g_out, of_g_out))
    products: list[Tensor | None] = []
    for into, made, part in zip(
        (g_out, g_gate, g_up), (product, *grads), (of_g_out, of_gate, of_up), strict=True
    ):
        into.detach().copy_(made.detach())
        products.append(None if part is None else into.detach().t().to(wide) @ part.left.to(wide))
    return products


def _sum(x: Tensor, part: LowRank | None) -> Tensor:
    """x plus the part, in float32 or wider."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True)
    if part is None:
        return wide
    left, right = part.left.to(wide.dtype), part.right.to(wide.dtype)
    return wide.addmm_(left, right.t(), alpha=part.scale)

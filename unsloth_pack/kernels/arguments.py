"""Arguments of kernels that hold several tensors or options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from unsloth_pack.kernels.launch import wide_dtype


class Scaled(NamedTuple):
    """A matrix and its factor."""

    values: Tensor
    scale: float


class Gate(NamedTuple):
    """The product of gate and up: act(min(gate, limit)) * (clamp(up, -limit, limit) + offset).

    Args:
        activation: as for `gated`.
        alpha: act is x * σ(alpha x); 1 for SiLU. Any other only with "silu".
        limit: of gate from above, and of up from both sides; None for none.
        offset: added to up.
        interleaved: gate and up alternate among the columns; otherwise gate comes first.
    """

    activation: str
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    interleaved: bool = False

    def halves(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up `[.., F]` of `[.., 2F]`, as views."""
        if self.interleaved:
            return gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate_up.chunk(2, dim=-1)
        return gate, up

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute the product with autograd."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        x = self.alpha * gate
        acted = F.silu(x) if self.activation == "silu" else F.gelu(x, approximate="tanh")
        return acted / self.alpha * (up + self.offset)


class InnerSum(NamedTuple):
    """The outputs of gate and up in parts: base + scale * low_rank + bias[expert], rounded once.

    Args:
        base: `[S, 2F]`.
        low_rank: `[S, 2F]` and its scale, or None.
        bias: `[E, 2F]`, or None.
        expert: `[S]` integers, the expert of each row. None without a bias.
    """

    base: Tensor
    low_rank: Scaled | None = None
    bias: Tensor | None = None
    expert: Tensor | None = None

    def total(self) -> Tensor:
        """Return the sum `[S, 2F]` in the dtype of `base`."""
        wide = self.base.to(wide_dtype(self.base), copy=True)
        if self.low_rank is not None:
            wide += self.low_rank.scale * self.low_rank.values
        if self.bias is not None:
            assert self.expert is not None
            wide += self.bias[self.expert.long()]
        return wide.to(self.base.dtype)


class LowRank(NamedTuple):
    """A matrix `[N, F]` of low rank: scale * left rightᵀ.

    Args:
        left: `[N, r]`.
        right: `[F, r]`, any strides.
    """

    left: Tensor
    right: Tensor
    scale: float = 1.0


Field = Literal["entropy", "is_top1", "mean_logit", "log_sum_sq_probs"]  # of TokenScores, beside log_prob


class TokenScores(NamedTuple):
    """Scores in the shape of the labels; 0 (False) without a label, None if not in `fields`.

    Args:
        log_prob: of the label; float32 (float64 for float64), differentiable.
        entropy: of the distribution over the V outputs, in nats; likewise.
        is_top1: True if the label has the first greatest logit.
        mean_logit: over the V outputs; without gradient.
        log_sum_sq_probs: the logarithm of the sum of squared probabilities; without gradient.
    """

    log_prob: Tensor
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    mean_logit: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


@dataclass(frozen=True, eq=False)
class QKNorm:
    """RMSNorm of q and k before the rotation: x / sqrt(mean(x²) + eps) * (offset + weight).

    q_weight, k_weight: `[D]`, shared by the heads, or `[H * D]` when flat. Any float dtype, trained or not.
    offset: 0 for a weight that starts at one (qwen3), 1 for one that starts at zero (gemma3).
    flat: the mean runs over all heads of a token together (olmo2), not over each head's D.

    Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0
    flat: bool = False


class NestedScales(NamedTuple):
    """Scales of n blocks in eight bits: code[values] * scale + offset.

    Args:
        values: `[n]` uint8.
        code: `[256]` float32.
        scale: float32, one for each group of values.
        offset: `[]` float32.
        group: values of a group; the last group may have fewer.
    """

    values: Tensor
    code: Tensor
    scale: Tensor
    offset: Tensor
    group: int


class ExtraLogits(NamedTuple):
    """Change the logits by h, with either `b` or `outputs`.

    Args:
        h: `[..., R]`, a row for each of hidden's. Gets a gradient if it requires one.
        b: `[V, R]`: h bᵀ is added to the logits. Gets a gradient if it requires one, summed in float32.
        outputs: `[R]` int64, all different: h replaces the logits of these outputs. Weight and bias do not
            count there and get no gradient from there.
    """

    h: Tensor
    b: Tensor | None = None
    outputs: Tensor | None = None

"""Arguments of kernels that hold several tensors or options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Scaled(NamedTuple):
    """A matrix and its factor."""

    values: Tensor
    scale: float


class Gate(NamedTuple):
    """The product of gate and up: act(min(gate, limit)) * (clamp(up, -limit, limit) + offset)."""

    activation: str  # as for `gated`
    alpha: float = 1.0  # act is x * σ(alpha x); 1 for SiLU. Any other only with "silu"
    limit: float | None = None  # of gate from above, and of up from both sides; None for none
    offset: float = 0.0  # added to up
    interleaved: bool = False  # gate and up alternate among the columns; otherwise gate comes first

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
    """The outputs of gate and up in parts: base + scale * low_rank + bias[expert], rounded once."""

    base: Tensor  # `[S, 2F]`
    low_rank: Scaled | None = None  # `[S, 2F]` and its scale, or None
    bias: Tensor | None = None  # `[E, 2F]`, or None
    expert: Tensor | None = None  # `[S]` integers, the expert of each row. None without a bias


class LowRank(NamedTuple):
    """A matrix `[N, F]` of low rank: scale * left rightᵀ."""

    left: Tensor  # `[N, r]`
    right: Tensor  # `[F, r]`, any strides
    scale: float = 1.0


class LoraOutput(NamedTuple):
    """The output of a LoRA layer in parts: base + low_rank, rounded once to the dtype of `base`."""

    base: Tensor  # `[N, F]`
    low_rank: LowRank | None = None


Field = Literal["entropy", "is_top1", "mean_logit", "log_sum_sq_probs"]  # of TokenScores, beside log_prob


class TokenScores(NamedTuple):
    """Scores in the shape of the labels; 0 (False) without a label, None if not in `fields`."""

    log_prob: Tensor  # of the label; float32 (float64 for float64), differentiable
    entropy: Tensor | None = None  # of the distribution over the V outputs, in nats; likewise
    is_top1: Tensor | None = None  # True if the label has the first greatest logit
    mean_logit: Tensor | None = None  # over the V outputs; without gradient
    # the logarithm of the sum of squared probabilities; without gradient
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
    """Scales of n blocks in eight bits: code[values] * scale + offset."""

    values: Tensor  # `[n]` uint8
    code: Tensor  # `[256]` float32
    scale: Tensor  # float32, one for each group of values
    offset: Tensor  # `[]` float32
    group: int  # values of a group; the last group may have fewer


class ExtraLogits(NamedTuple):
    """Change the logits by h, with either `b` or `outputs`."""

    h: Tensor  # `[..., R]`, a row for each of hidden's. Gets a gradient if it requires one
    # `[V, R]`: h bᵀ is added to the logits. Gets a gradient if it requires one, summed in float32
    b: Tensor | None = None
    # `[R]` int64, all different: h replaces the logits of these outputs. Weight and bias do not count
    # there and get no gradient from there
    outputs: Tensor | None = None


Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


class TeacherHead(NamedTuple):
    """A teacher's hidden states and head; none of them gets a gradient."""

    hidden: Tensor  # `[..., C']`, a row for each of the student's
    weight: Tensor  # `[V, C']`
    bias: Tensor | None = None  # `[V]`
    softcap: float | None = None
    scale: float = 1.0
    extra: ExtraLogits | None = None


class TopLogProbs(NamedTuple):
    """A teacher's K most likely tokens. The rest of its probability lies on no token in particular."""

    ids: Tensor  # `[..., K]` integers, all different in a row
    log_probs: Tensor  # `[..., K]`, any float dtype, in nats, not renormalised


class Distillation(NamedTuple):
    """The loss, and scores in the shape of the labels: 0 (False) without a label, no gradient."""

    loss: Tensor  # `[]`, differentiable
    cross_entropy: Tensor  # of the label, in nats, at temperature 1
    divergence: Tensor  # in nats
    teacher_entropy: Tensor  # in nats, at the temperature; of `TopLogProbs` with the student's tail
    is_top1: Tensor  # True if no logit of the student is greater than the label's


def dropout_threshold(p: float) -> int:
    """Return the least 16-bit number whose element is not dropped."""
    return round(p * 2**16)


def dropout_scale(p: float) -> float:
    """Return the factor on remaining elements, 1 / (1 - p) with the rounded p; 0 if none remain."""
    n_remaining = 2**16 - dropout_threshold(p)
    return 2**16 / n_remaining if n_remaining else 0.0

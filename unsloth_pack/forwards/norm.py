"""The norm forwards that all architectures share."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.kernels import rms_norm
from unsloth_pack.lora.layers import Recipe
from unsloth_pack.modules.eager import runs_eagerly


class FastRMSNorm(nn.Module):
    """Takes the place of a transformers RMS norm's class."""

    norm_offset: float
    weight: nn.Parameter

    @runs_eagerly
    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., C]` normalised over the last dimension.

        On a GPU it carries a `recipe`, so that a projection need not keep it beside the norm's input.
        """
        eps, offset = norm_eps(self), self.norm_offset
        normed = rms_norm(hidden_states, self.weight, eps, offset)
        if normed.is_cuda and normed.requires_grad:
            vars(normed)["recipe"] = Recipe(
                lambda x, weight: rms_norm(x, weight, eps, offset), (hidden_states, self.weight)
            )
        return normed


class FastLayerNorm(nn.Module):
    """Takes the place of the class of a transformers layer norm without bias, which is written out there."""

    weight: nn.Parameter

    @runs_eagerly
    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., C]` normalised over the last dimension; computed in float32 and rounded once."""
        weight = self.weight.to(hidden_states.dtype)
        return F.layer_norm(hidden_states, weight.shape, weight, None, norm_eps(self))


NORMS: dict[str, type[nn.Module]] = {"rms": FastRMSNorm, "layer": FastLayerNorm}


def norm_eps(norm: Any) -> float:
    """The epsilon of a transformers norm, whichever name it has there."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

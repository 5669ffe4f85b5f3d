"""The norm forwards that all architectures share."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.kernels import rms_norm
from unsloth_pack.lora.layers import Recipe
from unsloth_pack.modules.eager import runs_eagerly


class FastRMSNorm(nn.Module):
    """Takes the place of a transformers RMS norm's class."""

    norm_offset: float
    norm_keeps_dtype: bool
    weight: nn.Parameter

    @runs_eagerly
    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., C]` normalised over the last dimension.

        On a GPU it carries a `recipe`, so that a projection need not keep it beside the norm's input.
        """
        eps, offset = norm_eps(self), self.norm_offset
        dtype = hidden_states.dtype if self.norm_keeps_dtype else None

        def compute(x: Tensor, weight: Tensor) -> Tensor:
            normed = rms_norm(x, weight, eps, offset)
            return normed if dtype is None else normed.to(dtype)

        normed = compute(hidden_states, self.weight)
        if normed.is_cuda and normed.requires_grad:
            vars(normed)["recipe"] = Recipe(compute, (hidden_states, self.weight))
        return normed


class FastLayerNorm(nn.Module):
    """Takes the place of the class of a transformers layer norm without bias, which is written out there."""

    weight: nn.Parameter

    @runs_eagerly
    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., C]` normalised over the last dimension; computed in float32 and rounded once."""
        x, dtype = hidden_states, hidden_states.dtype
        # In 16 bits torch sums a trained weight's gradient in them too
        wide = torch.promote_types(dtype, torch.float32) if self.weight.requires_grad else dtype
        return F.layer_norm(x.to(wide), x.shape[-1:], self.weight.to(wide), None, norm_eps(self)).to(dtype)


NORMS: dict[str, type[nn.Module]] = {"rms": FastRMSNorm, "layer": FastLayerNorm}


def norm_eps(norm: Any) -> float:
    """The epsilon of a transformers norm, whichever name it has there."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

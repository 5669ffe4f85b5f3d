"""Run the norms of all architectures."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.kernels import add_rms_norm, rms_norm
from unsloth_pack.lora.linear import with_recipe
from unsloth_pack.modules import no_compile


class FastRMSNorm(nn.Module):
    """Replaces the class of a transformers RMS norm."""

    norm_offset: float
    norm_keeps_dtype: bool
    weight: nn.Parameter

    @no_compile
    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise `[..., C]` over the last dimension.

        On a GPU the result carries a `recipe`, so that a projection need not keep it beside the norm's input.
        """
        compute = self._compute
        return with_recipe(compute(hidden_states, self.weight), compute, (hidden_states, self.weight))

    def add_and_norm(self, residual: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return residual + added and its norm, both `[..., C]`, in one launch.

        Replace the residual by the returned one: the norm's backward pass then adds the gradients of both.

        Args:
            added: None to add nothing.
        """
        total, normed = add_rms_norm(residual, added, self.weight, norm_eps(self), self.norm_offset)
        normed = normed.to(total.dtype) if self.norm_keeps_dtype else normed
        return total, with_recipe(normed, self._compute, (total, self.weight))

    @property
    def _compute(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the norm as a function of its input and the weight."""
        eps, offset, keeps_dtype = norm_eps(self), self.norm_offset, self.norm_keeps_dtype

        def compute(x: Tensor, weight: Tensor) -> Tensor:
            normed = rms_norm(x, weight, eps, offset)
            return normed.to(x.dtype) if keeps_dtype else normed

        return compute


class FastLayerNorm(nn.Module):
    """Replaces the class of a transformers layer norm without bias."""

    weight: nn.Parameter

    @no_compile
    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise `[..., C]` over the last dimension; computed in float32 and rounded once."""
        x, dtype = hidden_states, hidden_states.dtype
        # In 16 bits torch sums a trained weight's gradient in them too
        wide = torch.promote_types(dtype, torch.float32) if self.weight.requires_grad else dtype
        return F.layer_norm(x.to(wide), x.shape[-1:], self.weight.to(wide), None, norm_eps(self)).to(dtype)


NORMS: dict[str, type[nn.Module]] = {"rms": FastRMSNorm, "layer": FastLayerNorm}


def norm_eps(norm: Any) -> float:
    """Return the epsilon of a transformers norm, whatever its name."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon

"""The norm and MLP forwards that all architectures share."""

from typing import Any

from torch import Tensor, nn

from unsloth_pack.kernels import gated, rms_norm
from unsloth_pack.models.fast_lora import FastLoraLinear, Recipe, project

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' name -> the kernel's


class FastRMSNorm(nn.Module):
    """Takes the place of a transformers RMS norm's class."""

    norm_offset: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., C]` normalised over the last dimension.

        On a GPU it carries a `recipe`, so that a projection need not keep it beside the norm's input.
        """
        eps, offset = norm_eps(self), self.norm_offset
        normed = rms_norm(hidden_states, self.weight, eps, offset)
        if normed.is_cuda and normed.requires_grad:
            normed.recipe = Recipe(
                lambda x, weight: rms_norm(x, weight, eps, offset), (hidden_states, self.weight)
            )
        return normed


class FastMLP(nn.Module):
    """Takes the place of a transformers gated MLP's class."""

    activation: str

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden]` through the gate, up and down projections."""
        if hasattr(self, "gate_up_proj"):
            gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        else:
            gate, up = project(hidden_states, (self.gate_proj, self.up_proj))
        if isinstance(self.down_proj, FastLoraLinear):
            return self.down_proj.gated(gate, up, self.activation)
        return self.down_proj(gated(gate, up, self.activation))


def norm_eps(norm: Any) -> float:
    """The epsilon of a transformers RMS norm, whichever name it has there."""
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon


def activation_of(mlp: nn.Module) -> str | None:
    """The kernel's name of an MLP's activation, or None if the module is no gated MLP that can be fused."""
    has_projections = hasattr(mlp, "down_proj") and (
        hasattr(mlp, "gate_up_proj") or hasattr(mlp, "gate_proj")
    )
    if not has_projections or not hasattr(mlp, "config"):
        return None
    name = getattr(mlp.config, "hidden_activation", None) or mlp.config.hidden_act
    return ACTIVATIONS.get(name)

"""The norm and MLP forwards that all architectures share."""

from typing import Any

from torch import Tensor, nn

from unsloth_pack.kernels import gated, rms_norm
from unsloth_pack.models.fast_lora import Recipe, project, run_fused
from unsloth_pack.models.gated_mlp import gated_mlp

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' name -> the kernel's
_CHEAP_WIDTH = 1024
_MANY_BYTES = 2**27  # of gate and up in a layer


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
    """Takes the place of a transformers gated MLP's class.

    Args:
        activation: as `kernels.gated` names it.
        decoder_layer: that it is part of.
    """

    activation: str
    decoder_layer: Any

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden]` through the gate, up and down projections."""
        inner: list[Any] = (
            [self.gate_up_proj] if hasattr(self, "gate_up_proj") else [self.gate_proj, self.up_proj]
        )
        down: Any = self.down_proj
        if run_fused(hidden_states, [*inner, down]):
            keep = not (self._is_recomputed() or self._is_cheap_again(hidden_states))
            return gated_mlp(hidden_states, inner, down, self.activation, keep)
        outputs = project(hidden_states, inner)
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
        return down(gated(gate, up, self.activation))

    def _is_recomputed(self) -> bool:
        """Whether gradient checkpointing computes the layer again in the backward pass."""
        layer = self.decoder_layer
        if not (layer.gradient_checkpointing and layer.training):
            return False
        return getattr(layer._gradient_checkpointing_func, "recomputes", True)

    def _is_cheap_again(self, x: Tensor) -> bool:
        """Whether gate and up take much memory for the little time that computing them again takes.

        A byte of them costs as many FLOP as the layer is wide.
        """
        width, features = x.shape[-1], self.down_proj.in_features
        n_bytes: int = 2 * features * x.element_size() * (x.numel() // width)
        return x.is_cuda and width <= _CHEAP_WIDTH and n_bytes >= _MANY_BYTES


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

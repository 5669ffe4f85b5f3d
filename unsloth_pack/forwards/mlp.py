"""The MLP forward that all architectures share."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from unsloth_pack.forwards.gate_and_up import GateAndUpPlan, keeps_gate_and_up
from unsloth_pack.kernels import gated
from unsloth_pack.lora.gated_mlp import gate_and_up, gated_mlp
from unsloth_pack.lora.layers import project, run_fused
from unsloth_pack.modules.eager import runs_eagerly
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.names import own_names

# Attributes of transformers' modules that the forward reads, or that change nothing
_KNOWN = frozenset({
    "config", "hidden_size", "intermediate_size", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "act_fn", "activation_fn", "residual_dropout",
})  # fmt: skip
ACTIVATIONS = {  # class of the activation module -> its name in `kernels.gated`
    nn.SiLU: "silu",
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}


class FastMLP(nn.Module):
    """Takes the place of a transformers gated MLP's class.

    Args:
        decoder_layer: the layer that holds this MLP.
        number: the layer's number, from 0.
        gate_and_up_plan: of the decoder.
    """

    decoder_layer: Any
    number: int
    gate_and_up_plan: GateAndUpPlan
    gate_up_proj: nn.Linear
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    residual_dropout: float = 0.0

    @runs_eagerly
    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden]` through the gate, up and down projections."""
        activation = _activation_of(self)
        if activation is None:  # the activation was replaced, or has hooks now
            return super().forward(hidden_states)
        return F.dropout(self._gated(hidden_states, activation), self.residual_dropout, self.training)

    def _gated(self, hidden_states: Tensor, activation: str) -> Tensor:
        is_joined = hasattr(self, "gate_up_proj")
        inner: list[Any] = [self.gate_up_proj] if is_joined else [self.gate_proj, self.up_proj]
        down: Any = self.down_proj
        if run_fused(hidden_states, [*inner, down]):
            return gated_mlp(hidden_states, inner, down, activation, self._keeps(hidden_states))
        gate, up = gate_and_up(project(hidden_states, inner))
        return down(gated(gate, up, activation))

    def _keeps(self, x: Tensor) -> bool:
        features = self.down_proj.in_features
        return keeps_gate_and_up(self.gate_and_up_plan, self.decoder_layer, self.number, x, features)


def activation_of(mlp: nn.Module) -> str | None:
    """The kernel's name of an MLP's activation, or None if the module is no gated MLP that can be fused."""
    names = own_names(mlp)
    is_gated = "down_proj" in names and not names.isdisjoint(("gate_up_proj", "gate_proj"))
    return _activation_of(mlp) if is_gated and names <= _KNOWN else None


def _activation_of(mlp: nn.Module) -> str | None:
    act = mlp._modules.get("act_fn") or mlp._modules.get("activation_fn")  # Phi3's name for it
    return None if act is None or has_hooks(act) else ACTIVATIONS.get(type(act))

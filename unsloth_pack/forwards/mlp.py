"""The MLP forward that all architectures share."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from unsloth_pack.forwards.gate_and_up import GateAndUpPlan, keeps_gate_and_up
from unsloth_pack.forwards.trained_mlp import trained_gated_mlp, trains_fused
from unsloth_pack.kernels import gated
from unsloth_pack.lora.gated_mlp import gate_and_up, gated_mlp
from unsloth_pack.lora.layers import project, run_fused
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules.eager import runs_eagerly
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.names import own_names

# Attributes of transformers' modules that the forward reads, or that change nothing
_KNOWN = frozenset({
    "config", "hidden_size", "intermediate_size", "gate_proj", "up_proj", "gate_up_proj", "down_proj",
    "act_fn", "activation_fn", "residual_dropout", "input_size", "layer_idx",
})  # fmt: skip
ACTIVATIONS = {  # class of the activation module -> its name in `kernels.gated`
    nn.SiLU: "silu",
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}


class GatedProjections(NamedTuple):
    """What the linear layers of a gated MLP are called: those of gate and up, which may be one, and the one
    down."""

    inner: tuple[str, ...]
    down: str

    def features(self, mlp: nn.Module) -> int:
        """How many features gate has, and up."""
        features: int = getattr(mlp, self.down).in_features
        return features


class FastMLP(nn.Module):
    """Takes the place of a transformers gated MLP's class.

    Args:
        spec: what its activation is.
        projections: its linear layers.
        decoder_layer: the layer that holds this MLP.
        number: the layer's number, from 0.
        gate_and_up_plan: of the decoder.
    """

    spec: ArchSpec
    projections: GatedProjections
    decoder_layer: Any
    number: int
    gate_and_up_plan: GateAndUpPlan
    residual_dropout: float = 0.0

    @runs_eagerly
    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden]` through the gate, up and down projections."""
        activation = _activation_of(self, self.spec)
        if activation is None:  # the activation was replaced, or has hooks now
            return super().forward(hidden_states)
        out = self._gated(hidden_states, activation)
        return F.dropout(out, self.residual_dropout, self.training) if self.residual_dropout else out

    def _gated(self, hidden_states: Tensor, activation: str) -> Tensor:
        inner: list[Any] = [getattr(self, name) for name in self.projections.inner]
        down: Any = getattr(self, self.projections.down)
        if self.spec.mlp_multipliers is not None:
            of_gate, of_down = (getattr(self, name) for name in self.spec.mlp_multipliers)
            gate, up = gate_and_up(project(hidden_states, inner))
            return down(gated(gate * of_gate, up, activation)) * of_down
        if run_fused(hidden_states, [*inner, down]):
            return gated_mlp(hidden_states, inner, down, activation, self._keeps(hidden_states))
        if trains_fused([*inner, down]):
            return trained_gated_mlp(hidden_states, inner, down, activation, self._keeps(hidden_states))
        gate, up = gate_and_up(project(hidden_states, inner))
        return down(gated(gate, up, activation))

    def _keeps(self, x: Tensor) -> bool:
        features = self.projections.features(self)
        return keeps_gate_and_up(self.gate_and_up_plan, self.decoder_layer, self.number, x, features)


def gated_projections(mlp: nn.Module, spec: ArchSpec) -> GatedProjections | None:
    """The names of an MLP's linear layers, or None if the module is no gated MLP that can be fused."""
    joined, gate, up, down = map(spec.name, ("gate_up_proj", "gate_proj", "up_proj", "down_proj"))
    names = own_names(mlp)
    named = GatedProjections((joined,) if joined in names else (gate, up), down)
    known = {*_KNOWN, *map(spec.name, _KNOWN), *(spec.mlp_multipliers or ())}
    is_known = {*named.inner, down} <= names <= known
    return named if is_known and _activation_of(mlp, spec) is not None else None


def _activation_of(mlp: nn.Module, spec: ArchSpec) -> str | None:
    """The kernel's name of an MLP's activation, or None."""
    if spec.activation is not None:
        return spec.activation
    act = mlp._modules.get(spec.name("act_fn"))
    return None if act is None else activation_of(act)


def activation_of(act: nn.Module) -> str | None:
    """The kernel's name of an activation's module, or None where it has hooks or is not known."""
    return None if has_hooks(act) else ACTIVATIONS.get(type(act))

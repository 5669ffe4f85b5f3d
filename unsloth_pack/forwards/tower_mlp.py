"""The gated MLPs in the layers of a tower."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unsloth_pack.forwards.mlp import activation_of
from unsloth_pack.kernels import gated
from unsloth_pack.lora.gated_mlp import gated_mlp
from unsloth_pack.lora.layers import computes_in, project, run_fused
from unsloth_pack.modules.eager import runs_eagerly
from unsloth_pack.modules.hooks import has_hooks

_ALIGNMENT = 128  # bits; where rows begin at multiples of them, the hardware copies tiles of them by itself


class FastTowerMLP(nn.Module):
    """Takes the place of the class of a tower's gated MLP.

    Qwen2.5-VL's has 3,420 features, so that their rows in 16 bits do not begin where fast GEMMs need them to.
    Where nothing is kept for a backward pass, features of zero are added. The weights are copied every time,
    so that no copy can be an old one.
    """

    act_fn: nn.Module
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: Any

    @runs_eagerly
    def forward(self, hidden_state: Tensor) -> Tensor:
        """`[.., C]` through the gate, up and down projections."""
        activation = activation_of(self.act_fn)
        if activation is None:  # it was replaced, or has hooks now
            return super().forward(hidden_state)
        inner: list[Any] = [self.gate_proj, self.up_proj]
        down = self.down_proj
        if run_fused(hidden_state, [*inner, down]):
            return gated_mlp(hidden_state, inner, down, activation, keep=True)
        if missing := _missing_features(hidden_state, [*inner, down]):
            gate, up = (_with_more_features(layer, hidden_state, missing) for layer in inner)
            return F.linear(gated(gate, up, activation), F.pad(down.weight, (0, missing)), down.bias)
        gate, up = project(hidden_state, inner)
        return down(gated(gate, up, activation))


def _missing_features(x: Tensor, layers: list[Any]) -> int:
    """How many features to add so that rows are aligned; 0 where a backward pass would keep the copies."""
    if not all(type(layer) is nn.Linear and not has_hooks(layer) for layer in layers):
        return 0
    if torch.is_grad_enabled() and (x.requires_grad or any(layer.weight.requires_grad for layer in layers)):
        return 0
    return -layers[-1].in_features % (_ALIGNMENT // torch.finfo(computes_in(x)).bits)


def _with_more_features(layer: nn.Linear, x: Tensor, missing: int) -> Tensor:
    bias = None if layer.bias is None else F.pad(layer.bias, (0, missing))
    return F.linear(x, F.pad(layer.weight, (0, 0, 0, missing)), bias)

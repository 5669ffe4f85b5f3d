"""Run decoder layers, their norms and MLPs, and decide which layers keep gate and up for the backward pass.

Some 70 decoder layers in transformers have Llama's forward, word for word. They run fused: a residual is
added and normed in one launch. Any other layer keeps transformers' forward.

Gate and up are the largest of a layer's activations. Computing them again costs a GEMM as large as the first,
so layers do so only where memory is short, and not all of them.

Shapes: B rows of T tokens, C features.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2CLS, ACT2FN

from unsloth_pack.cuda_graphs.capture_decision import free_bytes
from unsloth_pack.kernels import add_rms_norm, gated, relu2, rms_norm, xielu
from unsloth_pack.layers.trained_mlp import trained_gated_mlp, trains_fused
from unsloth_pack.lora.linear import can_run_fused, project, with_recipe
from unsloth_pack.lora.mlp import gate_and_up, gated_mlp
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import has_hooks, is_gathered_by_module, no_compile, own_names


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
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


class FastLayer(nn.Module):
    """Replaces the class of a decoder layer for which `is_plain` holds."""

    input_layernorm: FastRMSNorm  # or any module, which is called then
    self_attn: nn.Module
    post_attention_layernorm: FastRMSNorm
    mlp: Callable[[Tensor], Tensor]

    @no_compile
    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run `[B, T, C]` through the layer; a packed row fused, with the results of `_plain_forward`."""
        before, between = self.input_layernorm, self.post_attention_layernorm
        if args or kwargs.get("packed_row") is None or not (_runs_fused(before) and _runs_fused(between)):
            plain: Tensor = super().forward(hidden_states, *args, **kwargs)
            return plain
        residual, normed = before.add_and_norm(hidden_states, None)
        mixed, _ = self.self_attn(hidden_states=normed, **kwargs)
        residual, normed = between.add_and_norm(residual, mixed)
        return residual + self.mlp(normed)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer's forward is `_plain_forward`, instruction for instruction."""
    forward = inspect.unwrap(type(layer).forward)
    return "forward" not in vars(layer) and _instructions(forward) == _instructions(_plain_forward)


def _runs_fused(norm: nn.Module) -> bool:
    return isinstance(norm, FastRMSNorm) and not (has_hooks(norm) or is_gathered_by_module(norm.weight))


def _instructions(function: Callable[..., object]) -> tuple[object, ...]:
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    constants = tuple(constant for constant in code.co_consts if constant != function.__doc__)
    return code.co_code, code.co_names, code.co_varnames, constants, function.__defaults__


def _plain_forward(
    self: FastLayer,
    hidden_states: Tensor,
    attention_mask: object = None,
    position_ids: object = None,
    past_key_values: object = None,
    use_cache: object = False,
    position_embeddings: object = None,
    **kwargs: object,
) -> Tensor:
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states  # noqa: RET504 - the instructions are compared


_SHARE = 0.25  # of the free memory, for gate and up; the rest of a step needs about as much again
_MANY_BYTES = 2**27  # of gate and up in a layer; fewer are always kept
_SPARING = 448  # one layer in (width / 448), at least one in two, recomputes gate and up


class GateAndUpPlan:
    """Decides for every step which layers keep gate and up, by its tokens and the free memory."""

    def __init__(self, features: Sequence[int]):
        self._features = list(features)  # of gate, for a token, in every module that may keep them
        self._has_room = False

    def decide(self, tokens: int, element_size: int, device: torch.device) -> None:
        """Decide for the next step. Asks the driver only where a layer might not keep them."""
        bytes_per_feature = 2 * tokens * element_size
        if device.type == "cuda" and max(self._features, default=0) * bytes_per_feature >= _MANY_BYTES:
            self.decide_by(bytes_per_feature, free_bytes(device))

    def decide_by(self, bytes_per_feature: int, free: float) -> None:
        """Decide by the bytes that are free, for gate and up of `bytes_per_feature`."""
        self._has_room = sum(self._features) * bytes_per_feature <= _SHARE * free

    def keeps(self, number: int, width: int, n_bytes: int) -> bool:
        """Return whether layer `number`, on a GPU with an input of this width, keeps its `n_bytes` of them.

        Where memory is short, every second layer of a narrow model recomputes them, and every ninth of one
        that is 4,096 wide: a byte of them costs as many FLOP as the layer is wide.
        """
        return self._has_room or n_bytes < _MANY_BYTES or number % max(2, width // _SPARING) > 0


def keeps_gate_and_up(plan: GateAndUpPlan, layer: nn.Module, number: int, x: Tensor, features: int) -> bool:
    """Return whether a module keeps them for the backward pass; never in a layer that is recomputed.

    `x` `[.., width]` is its input, `features` counts those of gate; `number` is that of its `layer`, from 0.
    """
    if layer.gradient_checkpointing:  # in eval mode too: it may be set between forward and recomputation
        return not getattr(layer._gradient_checkpointing_func, "recomputes", True)
    width = x.shape[-1]
    n_bytes: int = 2 * features * x.element_size() * (x.numel() // width)
    return not x.is_cuda or plan.keeps(number, width, n_bytes)


# Attributes of transformers' MLPs that the forward reads, or that change nothing
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
    """The names of a gated MLP's layers: gate and up, perhaps joined; down; and its activation."""

    inner: tuple[str, ...]
    down: str
    act: str

    def count_features(self, mlp: nn.Module) -> int:
        """Return how many features gate has, and up."""
        features: int = getattr(mlp, self.down).in_features
        return features


class FastMLP(nn.Module):
    """Replaces the class of a transformers gated MLP."""

    spec: ArchSpec
    projections: GatedProjections
    decoder_layer: nn.Module  # the layer that holds this MLP, of this `number` from 0
    number: int
    gate_and_up_plan: GateAndUpPlan
    residual_dropout: float = 0.0

    @no_compile
    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run `[..., hidden]` through the gate, up and down projections."""
        activation = _find_activation(self, self.spec, self.projections.act)
        if activation is None:  # the activation was replaced, or has hooks now
            plain: Tensor = super().forward(hidden_states)
            return plain
        inner: list[Any] = [getattr(self, name) for name in self.projections.inner]
        down: Any = getattr(self, self.projections.down)
        out: Tensor
        if self.spec.mlp_multipliers is not None:
            gate_scale, down_scale = (getattr(self, name) for name in self.spec.mlp_multipliers)
            gate, up = gate_and_up(project(hidden_states, inner))
            out = down(gated(gate * gate_scale, up, activation)) * down_scale
        elif can_run_fused(hidden_states, [*inner, down]):
            out = gated_mlp(hidden_states, inner, down, activation, self._keeps(hidden_states))
        elif trains_fused([*inner, down]):
            out = trained_gated_mlp(hidden_states, inner, down, activation, self._keeps(hidden_states))
        else:
            out = down(gated(*gate_and_up(project(hidden_states, inner)), activation))
        return F.dropout(out, self.residual_dropout, self.training) if self.residual_dropout else out

    def _keeps(self, x: Tensor) -> bool:
        features = self.projections.count_features(self)
        return keeps_gate_and_up(self.gate_and_up_plan, self.decoder_layer, self.number, x, features)


def find_gated_projections(mlp: nn.Module, spec: ArchSpec) -> GatedProjections | None:
    """Return the names of an MLP's linear layers, or None if it is no gated MLP that can be fused."""
    usual = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "act_fn")
    joined, gate, up, down, act = map(spec.name, usual)
    names = own_names(mlp)
    projections = GatedProjections((joined,) if joined in names else (gate, up), down, act)
    known = {*_KNOWN, *map(spec.name, _KNOWN), *(spec.mlp_multipliers or ())}
    is_known = {*projections.inner, down} <= names <= known
    return projections if is_known and _find_activation(mlp, spec, act) is not None else None


def _find_activation(mlp: nn.Module, spec: ArchSpec, name: str) -> str | None:
    """Return the kernel's name of an MLP's activation, or None."""
    if spec.activation is not None:
        return spec.activation
    act = mlp._modules.get(name)
    return None if act is None else name_activation(act)


def name_activation(act: nn.Module) -> str | None:
    """Return the kernel's name of an activation module, or None if it has hooks or is unknown."""
    return None if has_hooks(act) else ACTIVATIONS.get(type(act))


class FastReLU2(nn.Module):
    """Replaces transformers' squared ReLU."""

    @no_compile
    def forward(self, input: Tensor) -> Tensor:
        """Return `[...]` from `[...]`; as for an RMS norm, the result need not be kept beside the input."""
        return with_recipe(relu2(input), relu2, (input,))


class FastXIELU(nn.Module):
    """Replaces transformers' xIELU."""

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter
    beta: Tensor
    eps: Tensor

    @no_compile
    def forward(self, input: Tensor) -> Tensor:
        """Return `[...]` from `[...]`; as for an RMS norm, the result need not be kept beside the input."""
        inputs = (input, self.alpha_p, self.alpha_n, self.beta, self.eps)
        return with_recipe(xielu(*inputs), xielu, inputs)


FAST_ACTIVATIONS: dict[object, type[nn.Module]] = {  # by transformers' class
    ACT2CLS["relu2"]: FastReLU2,
    ACT2CLS["xielu"]: FastXIELU,
}

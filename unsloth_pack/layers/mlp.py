"""The MLP forward that all architectures share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2CLS, ACT2FN

from unsloth_pack.cuda_graphs.capture_decision import free_bytes
from unsloth_pack.kernels import gated, gated_lora_backward_, relu2, xielu
from unsloth_pack.kernels.launch import is_last_pass, multiply
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.linear import computes_in, project, run_fused, with_recipe
from unsloth_pack.lora.mlp import Start, gate_and_up, gated_mlp
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules.hooks import has_hooks, no_compile
from unsloth_pack.modules.sharding import is_gathered_by_module
from unsloth_pack.modules.walk import own_names

# Whether layers keep gate and up for the backward pass: all of them do while memory is free.
#
# Gate and up are the largest of what a layer keeps. Computing them again costs a GEMM as large as the first,
# so
# that is done only where memory is short, and not in every layer.

_SHARE = 0.25  # of the free memory may hold gate and up; the rest of a step needs about as much again
_MANY_BYTES = 2**27  # of gate and up in a layer; below it they are always kept
_SPARING = 448  # one layer in (width / 448), at least one in two, computes gate and up again


class GateAndUpPlan:
    """Which layers of a decoder keep gate and up, decided for every step by its tokens and the free memory.

    Args:
        features: of gate, for a token, in every module that may keep them.
    """

    def __init__(self, features: Sequence[int]):
        self._features = list(features)
        self._has_room = False

    def decide(self, tokens: int, element_size: int, device: torch.device) -> None:
        """Decide for the step that begins. The driver is asked only where a layer may not keep them."""
        a_feature = 2 * tokens * element_size
        if device.type == "cuda" and max(self._features, default=0) * a_feature >= _MANY_BYTES:
            self._has_room = sum(self._features) * a_feature <= _SHARE * free_bytes(device)

    def keeps(self, number: int, width: int, n_bytes: int) -> bool:
        """Whether a layer on a GPU keeps them.

        Where memory is short every second layer of a narrow model computes them again, and every ninth of one
        that is 4,096 wide: computing a byte of them costs as many FLOP as the layer is wide.

        Args:
            number: the layer's, from 0.
            width: features of the layer's input.
            n_bytes: of gate and up in the layer.
        """
        return self._has_room or n_bytes < _MANY_BYTES or number % max(2, width // _SPARING) > 0


def keeps_gate_and_up(plan: GateAndUpPlan, layer: Any, number: int, x: Tensor, features: int) -> bool:
    """Whether a module keeps them for the backward pass; never in a layer that is recomputed.

    Args:
        layer: the decoder layer that holds it, of this number from 0.
        x: its input, `[.., width]`.
        features: of gate, for a token.
    """
    if layer.gradient_checkpointing:  # in eval mode too: it may be set between forward and recomputation
        return not getattr(layer._gradient_checkpointing_func, "recomputes", True)
    width = x.shape[-1]
    n_bytes: int = 2 * features * x.element_size() * (x.numel() // width)
    return not x.is_cuda or plan.keeps(number, width, n_bytes)


# A gated MLP whose own weights are trained, as one autograd node.
#
#     y = down(act(gate(x)) * up(x))
#
# The product of gate and up is computed again in the backward pass, where its gradient is. Gate and up are
# kept
# or computed again, as in the node of LoRA layers. The gradients of x through gate and up are summed by the
# GEMMs, and those of weights in float32 are not rounded to 16 bits.
#
# Shapes: N tokens, I inputs, F features inside, O outputs of a layer.


def trains_fused(layers: Sequence[nn.Module]) -> bool:
    """Whether the layers of an MLP are linear ones of which a weight is trained, and nothing more."""
    if any(type(layer) is not nn.Linear or has_hooks(layer) for layer in layers):
        return False
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    is_trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return is_trained and not any(map(is_gathered_by_module, weights))


def trained_gated_mlp(
    x: Tensor, inner: Sequence[nn.Linear], down: nn.Linear, activation: str, keep: bool
) -> Tensor:
    """`[..., O]` from `[..., I]`, for layers for which `trains_fused`.

    Args:
        inner: the layers of gate and up, or one layer of both, gate first.
        activation: as `kernels.gated` names it.
        keep: whether gate and up are kept for the backward pass.
    """
    dtype = computes_in(x)
    x = x.to(dtype)
    plan = _Plan(activation, dtype, keep)
    if x.requires_grad and not keep:  # see `lora.gated_mlp`: a checkpoint stops where this saves
        x = Start.apply(x, (x,))
        plan.start = x.grad_fn
    tensors = [tensor for layer in (*inner, down) for tensor in (layer.weight, layer.bias)]
    return _TrainedGatedMLP.apply(x, plan, *tensors)


@dataclass
class _Plan:
    """What one call of the node needs beside tensors.

    Args:
        dtype: that is computed in.
        start: the autograd node of `Start`, where that saved x.
    """

    activation: str
    dtype: torch.dtype
    keep: bool
    start: Any = None


@dataclass
class _Held:
    """A weight, as the version check of `arithmetic.unchanged` wants it."""

    weight: Tensor


class _TrainedGatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *tensors: Tensor | None) -> Tensor:
        held = arithmetic.as_they_are(tensors)
        x_NI = x.reshape(-1, x.shape[-1])
        outputs = _inner(x_NI, held, plan.dtype)
        product_NF = gated(*gate_and_up(outputs), plan.activation)
        y_NO = _linear(product_NF, held[-2], held[-1], plan.dtype)
        if plan.start is None:
            ctx.save_for_backward(x, *(outputs if plan.keep else []))
        ctx.plan, ctx.held, ctx.shape = plan, held, x.shape
        ctx.versions = arithmetic.versions([_Held(weight) for weight in held[::2]], held[1::2])
        return arithmetic.shaped(y_NO, x.shape)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic.unchanged(ctx.versions)
        plan: _Plan = ctx.plan
        held, needed = ctx.held, ctx.needs_input_grad
        x, *kept = (ctx if plan.start is None else plan.start).saved_tensors
        x_NI, g_NO = x.reshape(-1, ctx.shape[-1]), grad.reshape(-1, grad.shape[-1])
        outputs = kept or _inner(x_NI, held, plan.dtype)
        # What may be read again stays; anything else makes room for its gradient
        grads = [torch.empty_like(y_NO) for y_NO in kept] if kept and not is_last_pass() else outputs
        product_NF = g_NO @ held[-2].to(plan.dtype)  # its gradient, until the kernel has run
        gate, up = gate_and_up(outputs)
        gated_lora_backward_(product_NF, None, gate, None, up, None, plan.activation, *gate_and_up(grads))
        of_down = _gradients(g_NO, product_NF, held[-2:], needed[-2:])
        del product_NF
        of_inner = [
            gradient
            for i, g in enumerate(grads)
            for gradient in _gradients(g, x_NI, held[2 * i : 2 * i + 2], needed[2 + 2 * i : 4 + 2 * i])
        ]
        grad_x = _through(grads, held[:-2:2], plan.dtype).view(ctx.shape) if needed[0] else None
        return grad_x, None, *of_inner, *of_down


def _linear(x_NI: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    with torch.autocast(x_NI.device.type, enabled=False):
        return F.linear(x_NI, weight.to(dtype), None if bias is None else bias.to(dtype))


def _inner(x_NI: Tensor, held: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """The outputs of the layers of gate and up."""
    return [_linear(x_NI, held[i], held[i + 1], dtype) for i in range(0, len(held) - 2, 2)]


def _gradients(
    g_NO: Tensor, x_NI: Tensor, held: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Of a layer's weight and bias, in their dtypes."""
    weight, bias = held
    g_weight = g_bias = None
    if needed[0]:
        g_weight = torch.empty_like(weight)
        multiply(g_NO.t(), x_NI, g_weight)
    if needed[1]:
        g_bias = g_NO.sum(0, dtype=torch.promote_types(g_NO.dtype, torch.float32)).to(bias.dtype)
    return g_weight, g_bias


def _through(grads: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Σ g W, the gradient of x."""
    gx_NI = grads[0] @ weights[0].to(dtype)
    for g_NO, weight in zip(grads[1:], weights[1:], strict=True):
        gx_NI.addmm_(g_NO, weight.to(dtype))
    return gx_NI


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

    @no_compile
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


# The forwards of activations that stand alone, in MLPs without a gate.


class FastReLU2(nn.Module):
    """Takes the place of transformers' squared ReLU."""

    @no_compile
    def forward(self, input: Tensor) -> Tensor:
        """`[...]` from `[...]`; as an RMS norm's, the result need not be kept beside the input."""
        return with_recipe(relu2(input), relu2, (input,))


class FastXIELU(nn.Module):
    """Takes the place of transformers' xIELU."""

    alpha_p: nn.Parameter
    alpha_n: nn.Parameter
    beta: Tensor
    eps: Tensor

    @no_compile
    def forward(self, input: Tensor) -> Tensor:
        """`[...]` from `[...]`; as an RMS norm's, the result need not be kept beside the input."""
        inputs = (input, self.alpha_p, self.alpha_n, self.beta, self.eps)
        return with_recipe(xielu(*inputs), xielu, inputs)


FAST_ACTIVATIONS: dict[Any, type[nn.Module]] = {  # by transformers' class
    ACT2CLS["relu2"]: FastReLU2,
    ACT2CLS["xielu"]: FastXIELU,
}

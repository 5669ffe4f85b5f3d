"""Run the MLPs of all architectures, and decide which layers keep gate and up for the backward pass.

Gate and up are the largest of a layer's activations. Computing them again costs a GEMM as large as the first,
so layers do so only where memory is short, and not all of them.

A gated MLP y = down(act(gate(x)) * up(x)) whose own weights are trained is one autograd node. It computes the
product of gate and up again in the backward pass, in the memory of its gradient. The GEMMs sum the gradients
of x through gate and up, and those of float32 weights are not rounded to 16 bits.

Shapes: N tokens, I inputs, F features inside, O outputs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2CLS, ACT2FN

from unsloth_pack.cuda_graphs.capture_decision import free_bytes
from unsloth_pack.kernels import LoraOutput, gated, gated_lora_backward_, relu2, xielu
from unsloth_pack.kernels.launch import apply, is_last_pass, multiply
from unsloth_pack.lora import arithmetic
from unsloth_pack.lora.linear import can_run_fused, get_compute_dtype, project, with_recipe
from unsloth_pack.lora.mlp import SaveInputs, gate_and_up, gated_mlp
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules import has_hooks, is_gathered_by_module, no_compile, own_names

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
            self._has_room = sum(self._features) * bytes_per_feature <= _SHARE * free_bytes(device)

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


def trains_fused(layers: Sequence[nn.Module]) -> bool:
    """Return whether the layers of an MLP are plain linear ones of which a weight is trained."""
    if any(type(layer) is not nn.Linear or has_hooks(layer) for layer in layers):
        return False
    weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    is_trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    return is_trained and not any(map(is_gathered_by_module, weights))


def trained_gated_mlp(
    x: Tensor, inner: Sequence[nn.Linear], down: nn.Linear, activation: str, keep: bool
) -> Tensor:
    """Compute `[..., O]` from `[..., I]`, for layers for which `trains_fused`.

    `inner` are the layers of gate and up, or one layer of both, gate first; `keep` keeps gate and up for the
    backward pass.
    """
    dtype = get_compute_dtype(x)
    x = x.to(dtype)
    plan = _Plan(activation, dtype, keep)
    if x.requires_grad and not keep:  # see `lora.gated_mlp`: a checkpoint stops where this saves
        x = apply(SaveInputs, x, (x,))
        plan.start = x.grad_fn
    tensors = [tensor for layer in (*inner, down) for tensor in (layer.weight, layer.bias)]
    return apply(_TrainedGatedMLP, x, plan, *tensors)


@dataclass
class _Plan:
    """The settings of one call. `start` is the autograd node of `SaveInputs`, if it saved x."""

    activation: str
    dtype: torch.dtype
    keep: bool
    start: Any = None


class _TrainedGatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *tensors: Tensor | None) -> Tensor:
        params = arithmetic.detach_all(tensors)
        x_NI = x.reshape(-1, x.shape[-1])
        outputs = _project_inner(x_NI, params, plan.dtype)
        product_NF = gated(*gate_and_up(outputs), plan.activation)
        y_NO = _project(product_NF, params[-2], params[-1], plan.dtype)
        if plan.start is None:
            ctx.save_for_backward(x, *(outputs if plan.keep else []))
        ctx.plan, ctx.params, ctx.shape = plan, params, x.shape
        ctx.versions = arithmetic.record_versions(params)
        return arithmetic.reshape_output(y_NO, x.shape)

    @staticmethod
    @arithmetic.backward_pass
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        arithmetic.check_unchanged(ctx.versions)
        plan: _Plan = ctx.plan
        params, needed = ctx.params, ctx.needs_input_grad
        x, *saved = (ctx if plan.start is None else plan.start).saved_tensors
        x_NI, g_NO = x.reshape(-1, ctx.shape[-1]), grad.reshape(-1, grad.shape[-1])
        outputs = saved or _project_inner(x_NI, params, plan.dtype)
        # Kept tensors may be read again; any other gives its memory to its gradient
        grads = [torch.empty_like(y_NO) for y_NO in saved] if saved and not is_last_pass() else outputs
        product_NF = g_NO @ params[-2].to(plan.dtype)  # holds its gradient until the kernel has run
        g_out, gate, up = map(LoraOutput, (product_NF, *gate_and_up(outputs)))
        gated_lora_backward_(g_out, gate, up, plan.activation, *gate_and_up(grads))
        down_gradients = _weight_gradients(g_NO, product_NF, params[-2:], needed[-2:])
        del product_NF
        inner_gradients = [
            gradient
            for i, g in enumerate(grads)
            for gradient in _weight_gradients(
                g, x_NI, params[2 * i : 2 * i + 2], needed[2 + 2 * i : 4 + 2 * i]
            )
        ]
        grad_x = None
        if needed[0]:  # Σ g W
            grad_x = grads[0] @ params[0].to(plan.dtype)
            for g_NO, weight in zip(grads[1:], params[2:-2:2], strict=True):
                grad_x.addmm_(g_NO, weight.to(plan.dtype))
            grad_x = grad_x.view(ctx.shape)
        return grad_x, None, *inner_gradients, *down_gradients


def _project(x_NI: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    with torch.autocast(x_NI.device.type, enabled=False):
        return F.linear(x_NI, weight.to(dtype), None if bias is None else bias.to(dtype))


def _project_inner(x_NI: Tensor, params: Sequence[Any], dtype: torch.dtype) -> list[Tensor]:
    """Compute the outputs of the layers of gate and up."""
    return [_project(x_NI, params[i], params[i + 1], dtype) for i in range(0, len(params) - 2, 2)]


def _weight_gradients(
    g_NO: Tensor, x_NI: Tensor, params: Sequence[Any], needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of a layer's weight and bias, in their dtypes."""
    weight, bias = params
    g_weight = g_bias = None
    if needed[0]:
        g_weight = torch.empty_like(weight)
        multiply(g_NO.t(), x_NI, g_weight)
    if needed[1]:
        g_bias = g_NO.sum(0, dtype=torch.promote_types(g_NO.dtype, torch.float32)).to(bias.dtype)
    return g_weight, g_bias


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
        out = self._run_gated(hidden_states, activation)
        return F.dropout(out, self.residual_dropout, self.training) if self.residual_dropout else out

    def _run_gated(self, hidden_states: Tensor, activation: str) -> Tensor:
        inner: list[Any] = [getattr(self, name) for name in self.projections.inner]
        down: Any = getattr(self, self.projections.down)
        if self.spec.mlp_multipliers is not None:
            gate_scale, down_scale = (getattr(self, name) for name in self.spec.mlp_multipliers)
            gate, up = gate_and_up(project(hidden_states, inner))
            scaled: Tensor = down(gated(gate * gate_scale, up, activation)) * down_scale
            return scaled
        if can_run_fused(hidden_states, [*inner, down]):
            return gated_mlp(hidden_states, inner, down, activation, self._keeps(hidden_states))
        if trains_fused([*inner, down]):
            return trained_gated_mlp(hidden_states, inner, down, activation, self._keeps(hidden_states))
        gate, up = gate_and_up(project(hidden_states, inner))
        out: Tensor = down(gated(gate, up, activation))
        return out

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


FAST_ACTIVATIONS: dict[Any, type[nn.Module]] = {  # by transformers' class
    ACT2CLS["relu2"]: FastReLU2,
    ACT2CLS["xielu"]: FastXIELU,
}

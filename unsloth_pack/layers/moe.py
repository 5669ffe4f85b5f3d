"""Run routed experts, fused where kernels can."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from unsloth_pack.errors import InputError
from unsloth_pack.kernels import Gate
from unsloth_pack.kernels.moe import why_not_grouped
from unsloth_pack.layers.layer import ACTIVATIONS, GateAndUpPlan, keeps_gate_and_up
from unsloth_pack.lora.expert_stacks import (
    STACKS,
    ExpertsModule,
    PeftStack,
    QuantisedStack,
    dequantised_stacks,
    get_stored_stack,
    is_quantised,
    iterate_wrappers,
    list_active_adapters,
    why_adapter_not_fused,
)
from unsloth_pack.lora.experts import Stack, routed_experts
from unsloth_pack.lora.linear import get_compute_dtype
from unsloth_pack.modules import GATHERED_BY_MODULE, has_hooks, is_gathered_by_module, no_compile


class FastExperts(ExpertsModule):
    """Replaces the class of a module of stacked experts."""

    gate: Gate  # how gate and up become their product
    gate_module: nn.Module | None  # the activation from which `gate` was read, or None
    decoder_layer: nn.Module  # the layer that holds it, of this `number` from 0
    number: int
    gate_and_up_plan: GateAndUpPlan

    @no_compile
    def forward(self, hidden_states: Tensor, *args: Tensor, **kwargs: object) -> Tensor:
        """Compute `[N, C]` from `[N, C]`; `args` are the experts of each token and their weights."""
        if not self.runs_fused(hidden_states, args, kwargs):
            plain: Tensor = super().forward(hidden_states, *args, **kwargs)
            return plain
        experts_Nk, weights_Nk = args
        return self.run_fused(hidden_states, experts_Nk, weights_Nk, [])

    def runs_fused(self, x: Tensor, args: Sequence[Tensor], kwargs: Mapping[str, object]) -> bool:
        """Return whether a call can be one autograd node, adapters aside."""
        if kwargs or len(args) != 2 or x.dim() != 2 or args[0].dim() != 2:
            return False
        return why_experts_not_fused(self) is None and _stack(
            self, "gate_up_proj"
        ).dtype == get_compute_dtype(x)

    def run_fused(
        self, x_NC: Tensor, experts_Nk: Tensor, weights_Nk: Tensor, adapters: Sequence[PeftStack]
    ) -> Tensor:
        """Run `forward` as one autograd node; `adapters` wrap the stacks, each with one adapter in use."""
        by_name = {wrapper.parameter_name: wrapper for wrapper in adapters}
        stacks, factors = zip(*(self._stack(name, by_name.get(name)) for name in STACKS), strict=True)
        features = experts_Nk.shape[1] * count_gate_features(self)
        keep = keeps_gate_and_up(self.gate_and_up_plan, self.decoder_layer, self.number, x_NC, features)
        x = x_NC.to(stacks[0].weight.dtype)
        y = routed_experts(x, experts_Nk, weights_Nk, stacks, [*factors[0], *factors[1]], self.gate, keep)
        return y.to(x_NC.dtype)

    def _stack(self, name: str, wrapper: PeftStack | None) -> tuple[Stack, Sequence[Tensor | None]]:
        weight = _stack(self, name)
        weight = weight.detach() if isinstance(weight, Tensor) else weight
        bias = getattr(self, f"{name}_bias").detach() if self.has_bias else None
        if wrapper is None:
            return Stack(weight, self.is_transposed, bias, None), (None, None)
        (adapter,) = list_active_adapters(wrapper)
        stack = Stack(weight, self.is_transposed, bias, wrapper.scaling[adapter])
        return stack, (wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight)


class FastExpertsLora(PeftStack):
    """Replaces the class of a `ParamWrapper` around stacked experts; else PEFT's own forward runs."""

    def merge(self, *args: object, **kwargs: object) -> None:
        """Merge as PEFT does, but not into quantised experts: PEFT would add to a copy, and lose it."""
        if is_quantised(self.get_base_layer()):
            raise InputError("experts in few bits cannot be merged in place; use save_pretrained_merged")
        super().merge(*args, **kwargs)

    @no_compile
    def forward(self, x: Tensor, *args: Tensor, **kwargs: object) -> Tensor:
        """Compute `[N, C]`, as the experts inside do."""
        base: Any = self.get_base_layer()
        wrappers = list(iterate_wrappers(self))
        is_fused = isinstance(base, FastExperts) and base.runs_fused(x, args, kwargs)
        if not is_fused or has_hooks(base, *wrappers[1:]) or any(map(why_adapter_not_fused, wrappers)):
            with dequantised_stacks(base):
                plain: Tensor = super().forward(x, *args, **kwargs)
                return plain
        experts_Nk, weights_Nk = args
        active = [wrapper for wrapper in wrappers if list_active_adapters(wrapper)]
        out: Tensor = base.run_fused(x, experts_Nk, weights_Nk, active)
        return out


def count_gate_features(experts: ExpertsModule) -> int:
    """Count the features of gate in an expert."""
    n_joined: int = _stack(experts, "gate_up_proj").shape[2 if experts.is_transposed else 1]
    return n_joined // 2


def why_experts_not_fused(experts: Any) -> str | None:
    """Return why stacked experts run as transformers wrote them, or None."""
    if any(get_stored_stack(experts, name) is None for name in STACKS):
        return "PEFT folds the adapter into the weights"
    if (act := getattr(experts, "act_fn", None)) is not getattr(experts, "gate_module", act):
        return "the activation was replaced"
    if isinstance(act, nn.Module) and has_hooks(act):  # some have a function
        return "hooks inside"
    if getattr(experts, "has_post_expert_norm", False):
        return "a norm after every expert"
    if getattr(experts, "_is_expert_parallel", False):
        return "the experts are spread over processes"
    if any(map(is_gathered_by_module, experts.parameters())):
        return GATHERED_BY_MODULE
    if any(parameter.requires_grad for parameter in experts.parameters()):
        return "the weights are trained"
    return None


def why_reads_host(experts: ExpertsModule) -> str | None:
    """Return why fused experts wait for the device, which prevents capture, or None."""
    stacks = [_stack(experts, name) for name in STACKS]
    device = next(experts.parameters()).device
    return why_not_grouped(stacks[0].dtype, device, *(size for stack in stacks for size in stack.shape[1:]))


def _stack(experts: ExpertsModule, name: str) -> Tensor | QuantisedStack:
    stack = get_stored_stack(experts, name)
    assert stack is not None
    return stack


def read_gate(experts: Any) -> Gate | None:
    """Read how gate and up of stacked experts become their product; None if no kernel computes that.

    Candidates come from the activation, `alpha` and `limit`; the module's result on a few numbers decides.
    """
    if not getattr(experts, "has_gate", False):
        return None
    activation = ACTIVATIONS.get(type(getattr(experts, "act_fn", None)), "silu")
    alphas, limits = ({None, _number(experts, name)} for name in ("alpha", "limit"))
    is_interleaved = not getattr(experts, "is_concatenated", True)
    farthest = 2 * max(8.0, _number(experts, "limit") or 0.0)
    numbers = torch.linspace(-farthest, farthest, 32 * 16, dtype=torch.float64, device="cpu")
    probe = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))].view(32, 16)
    with torch.no_grad():
        expected = experts._apply_gate(probe)
        for alpha, limit, offset in product(alphas, limits, (0.0, 1.0)):
            gate = Gate(activation, 1.0 if alpha is None else alpha, limit, offset, is_interleaved)
            if torch.allclose(gate.product(*gate.halves(probe)), expected, rtol=1e-6, atol=1e-9):
                return gate
    return None


def _number(module: nn.Module, name: str) -> float | None:
    value = getattr(module, name, None)
    return float(value) if isinstance(value, int | float) else None

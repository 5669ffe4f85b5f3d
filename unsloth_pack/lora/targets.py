"""Which layers an adapter is put on, by the names that people use.

Since transformers 5 the experts of a layer are stacked parameters, and no layers of their own. So the names
of an expert's layers mean the stack that holds them, which PEFT takes as `target_parameters`. PEFT 0.21
translates these names itself for some model types, and then leaves out the linear layers of the same names:
the MLPs of layers without experts, and shared experts. Here they are adapted too, through their parameter
`weight`, which PEFT does not translate. Routers are never adapted by such a name.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unsloth_pack.errors import InputError
from unsloth_pack.lora.stacks import is_experts

PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "qkv_proj",
    "gate_up_proj",
)
_STACK_OF = {  # the name of an expert's layer -> the stack that holds it
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "gate_up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}
_HALVES = ({"gate_proj", "up_proj"}, {"w1", "w3"})  # of gate_up_proj

logger = logging.getLogger("unsloth_pack")


@dataclass(frozen=True)
class Targets:
    """What of a model is adapted, as PEFT's `LoraConfig` takes it.

    Args:
        modules: `target_modules`.
        parameters: `target_parameters`.
        doubled: names of stacks whose rank is twice that of the adapter: each of gate and up has it once.
    """

    modules: str | list[str]
    parameters: list[str] = field(default_factory=list)
    doubled: tuple[str, ...] = ()

    def config_fields(self, r: int, lora_alpha: float, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a `LoraConfig`.

        Args:
            given: fields that the caller sets; they go before those of the same meaning here.
        """
        fields: dict[str, Any] = {"target_modules": self.modules}
        if parameters := [*dict.fromkeys([*(given.get("target_parameters") or ()), *self.parameters])]:
            fields["target_parameters"] = parameters
        for name, value in (("rank_pattern", 2 * r), ("alpha_pattern", 2 * lora_alpha)):
            patterns = {**(given.get(name) or {})}
            for stack in self.doubled:
                patterns.setdefault(rf".*\.{stack}", value)
            if patterns:
                fields[name] = patterns
        return fields


def lora_targets(
    model: nn.Module,
    target_modules: str | Collection[str] | None,
    *,
    layers: int | Sequence[int] | None = None,
    exclude: str | Collection[str] | None = None,
    only_linear: bool = False,
) -> Targets:
    """What an adapter is put on.

    Args:
        target_modules: names of layers, of whole paths or their ends; a regular expression of whole paths;
            "all-linear"; or None for those of `PROJECTIONS` that the model has.
        layers, exclude: as `layers_to_transform` and `exclude_modules` of PEFT's `LoraConfig`.
        only_linear: None means linear layers alone: the caller names the parameters.

    Raises:
        InputError: a target that the model does not have.
    """
    experts = [path for path, module in model.named_modules() if is_experts(module)]
    if target_modules is None:
        target_modules = _default_names(model, bool(experts) and not only_linear)
    wanted = _matcher(model, target_modules, experts)
    if not experts:
        return Targets(target_modules if isinstance(target_modules, str) else list(target_modules))
    stacks, doubled = _stacks(experts, wanted)
    modules = _linear_layers(model, experts, target_modules, wanted)
    in_mlps = [path for path in modules if path.rpartition(".")[2] in _STACK_OF]
    kept = [*stacks, *(f"{path}.weight" for path in in_mlps)]
    is_whole = layers is None and exclude is None
    parameters = [p for p in kept if is_whole or _is_kept(p, layers, exclude)]
    names = _as_given(target_modules, [path for path in modules if path not in in_mlps])
    return Targets(names, _ends(parameters) if is_whole else parameters, doubled)

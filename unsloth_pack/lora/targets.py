"""Choose the layers for an adapter from the names that people use.

transformers 5 stacks the experts of a layer into one parameter. A name such as `gate_proj` means that stack,
which PEFT takes as `target_parameters`, and never a router. For some model types PEFT 0.21 translates the
names itself and leaves out linear layers of the same names: MLPs of layers without experts, shared experts.
Here these are adapted through their parameter `weight`, which PEFT does not translate.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.other import get_pattern_key
from torch import nn
from transformers import PreTrainedModel

from unsloth_pack.errors import InputError
from unsloth_pack.lora.expert_stacks import is_experts, list_ungated_stacks
from unsloth_pack.models import arch_spec_for

NO_LAYERS = DUMMY_TARGET_MODULES
Names = str | Collection[str]  # of layers, or a pattern
Options = Mapping[str, Any]  # fields of a `LoraConfig`


def make_order_independent(patterns: Options, adapted: Sequence[str]) -> dict[str, Any]:
    """Make patterns independent of their order, by one pattern for each path if necessary.

    PEFT takes the first one that matches, and a saved config has them sorted.
    """
    keys = list(patterns)
    chosen = {path: get_pattern_key(keys, path) for path in adapted}  # the path itself without a match
    if all(get_pattern_key(sorted(keys), path) == key for path, key in chosen.items()):
        return dict(patterns)
    return {re.escape(path): patterns[key] for path, key in chosen.items() if key in patterns}


PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj"),
)
_STACK_OF = {  # the name of an expert's layer -> its stack
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "gate_up_proj"),
    **dict.fromkeys(("down_proj", "w2"), "down_proj"),
}
_JOINED = {  # layers of Llama -> the one layer in some models
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
}
_HALVES = ({"gate_proj", "up_proj"}, {"w1", "w3"})  # of gate_up_proj
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")  # for None and "all-linear"
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Targets:
    """The targets of an adapter, for PEFT's `LoraConfig`."""

    modules: str | list[str]  # `target_modules`
    parameters: tuple[str, ...] = ()  # `target_parameters`
    # True if the stacks of gate and up get twice the rank, once for each of the two
    doubles_gate_and_up: bool = False
    paths: tuple[str, ...] = ()  # of the adapted layers and stacked parameters
    notes: tuple[str, ...] = ()  # on names that are adapted differently, or not at all

    def config_fields(self, r: int, lora_alpha: float, options: Options) -> dict[str, Any]:
        """Return the fields of a `LoraConfig`; the caller's fields in `options` take precedence."""
        fields = {**options, "target_modules": self.modules}
        if self.parameters:
            own = options.get("target_parameters") or ()
            fields["target_parameters"] = sorted({*own, *self.parameters})
        for name, value in (("rank_pattern", 2 * r), ("alpha_pattern", 2 * lora_alpha)):
            patterns = dict(options.get(name) or {})
            if self.doubles_gate_and_up:
                patterns.setdefault(r".*\.gate_up_proj", value)  # PEFT's own pattern
            fields[name] = make_order_independent(patterns, self.paths)
        return fields


def list_default_names(model: PreTrainedModel) -> list[str]:
    """List the model's layers among `PROJECTIONS` and the architecture's own names."""
    named = list(model.named_modules())
    names = {path.rpartition(".")[2] for path, module in named if isinstance(module, nn.Linear)}
    if any(is_experts(module) for _, module in named):
        names.update(_EXPERT_NAMES)
    own = arch_spec_for(model.get_decoder().config.model_type).projections
    return [name for name in dict.fromkeys((*PROJECTIONS, *own)) if name in names]


def list_expert_layers(model: PreTrainedModel) -> list[str]:
    """List the paths that mean layers of routed experts, for `lora_targets`."""
    stacks = [path for path, module in model.named_modules() if is_experts(module)]
    return [f"{path}.{name}" for path in stacks for name in _EXPERT_NAMES]


def _join_names(model: PreTrainedModel, names: Names, notes: list[str]) -> Names:
    """Replace the names of layers that the model joins by the joined layer's."""
    if isinstance(names, str) or not isinstance(names, Collection):
        return names
    modules = _inside(model, model.get_decoder())
    linear = {_leaf(path) for path, module in modules if isinstance(module, nn.Linear)}
    result = list(names)
    for parts, joined in _JOINED.items():
        if joined in linear and linear.isdisjoint(parts) and set(parts) <= {*result}:
            notes.append(f"{', '.join(parts)} are one layer here, {joined}, which is adapted in their place")
            result = [name for name in result if name not in (*parts, joined)] + [joined]
    return result


def _choose_ungated_stacks(
    model: nn.Module, names: Names, options: Options, notes: list[str]
) -> tuple[str, ...]:
    """Choose `target_parameters` for experts without a gate."""
    if options.get("target_parameters"):
        return ()
    paths = filter(_make_matcher(names), list_ungated_stacks(model))
    chosen = tuple(path for path in paths if _is_selected(options, *path.rpartition(".")[::2]))
    refused = [name for name in ("lora_dropout", "use_dora") if options.get(name)]
    if chosen and refused:
        notes.append(f"{chosen[0]} and the other experts are not adapted: PEFT has no {refused[0]} for them")
        return ()
    return chosen


def lora_targets(
    model: PreTrainedModel, target_modules: Names | None, options: Options | None = None
) -> Targets:
    """Choose the targets of an adapter; InputError for one that the model does not have.

    Args:
        target_modules: names of layers, whole paths or their ends; a regular expression of whole paths;
            "all-linear"; None for the model's layers among `PROJECTIONS`; or `NO_LAYERS`, PEFT's word for an
            adapter of `modules_to_save` alone.
        options: further fields of the `LoraConfig`. With `target_parameters`, None leaves the experts to it.
    """
    options = options or {}
    own = options.get("target_parameters") or ()
    parameters = [path for path, _ in model.named_parameters()]
    for name in own:
        if not any(_ends_with(path, name) for path in parameters):
            raise InputError(f"target_parameters names {name!r}, and no parameter's path ends so")
    notes: list[str] = []
    targets = _choose_targets(model, target_modules, options, notes)
    is_target, is_all = _make_matcher(targets.modules), targets.modules == "all-linear"
    kinds, head = nn.Linear if is_all else (nn.Linear, nn.Embedding), model.get_output_embeddings()
    layers = [
        path
        for path, layer in model.named_modules()
        if isinstance(layer, kinds) and is_target(path) and not (is_all and layer is head)
    ]
    names = (*targets.parameters, *own)
    stacks = [path for path in parameters if any(_ends_with(path, name) for name in names)]
    return replace(targets, paths=(*layers, *stacks), notes=tuple(notes))


def _choose_targets(
    model: PreTrainedModel, target_modules: Names | None, options: Options, notes: list[str]
) -> Targets:
    if target_modules == NO_LAYERS or (target_modules == [] and options.get("target_parameters")):
        return Targets(target_modules)
    names = list_default_names(model) if target_modules is None else _join_names(model, target_modules, notes)
    experts = {path: module for path, module in model.named_modules() if is_experts(module)}
    _check_targets(model, names, experts)
    if not experts:
        modules = limit_to_text_model(model, names if isinstance(names, str) else list(names), options, notes)
        return Targets(modules, _choose_ungated_stacks(model, names, options, notes))
    if target_modules is None and options.get("target_parameters"):
        experts = {}
    return _choose_beside_experts(model, names, experts, options, notes)


def _choose_beside_experts(
    model: PreTrainedModel, names: Names, experts: Mapping[str, nn.Module], options: Options, notes: list[str]
) -> Targets:
    """Choose the targets in a model with routed experts; `experts` are those to choose from, by path."""
    decoder, is_all = model.get_decoder(), names == "all-linear"
    is_pattern = isinstance(names, str) and not is_all  # may also mean layers of a tower
    is_wanted, is_selected = _make_matcher(names), partial(_is_selected, options)
    wanted = {
        path: module
        for path, module in (model.named_modules() if is_pattern else _inside(model, decoder))
        if isinstance(module, nn.Linear) and is_wanted(path) and not (is_all and _is_router(model, path))
    }
    # Names mean ends of paths, as in PEFT; anything else is spelt out
    chooses_layers = options.get("layers_to_transform") is not None or options.get("exclude_modules")
    by_name = not chooses_layers and model.base_model is decoder and not isinstance(names, str)

    named, doubles = _choose_stacks(filter(is_selected, experts), is_wanted, is_all)
    if by_name and {path for path, _ in named} == experts.keys():
        parameters = sorted({stack for _, stack in named})
    else:
        parameters = [f"{path}.{stack}" for path, stack in named if is_selected(path, stack)]
    mlps = [path for path in wanted if _leaf(path) in _STACK_OF]
    if quantised := [path for path in mlps if type(wanted[path]) is not nn.Linear]:
        notes.append(
            f"{quantised[0]} and {len(quantised) - 1} more layers beside the experts are not adapted: "
            "PEFT cannot adapt both while they are quantised"
        )
    if is_all:
        notes.append("all-linear leaves the routers of experts as they are")
    # Through their weights, since PEFT would translate the names
    plain = [path for path in mlps if path not in quantised]
    if by_name:
        weights = [name for name in names if any(_ends_with(path, name) for path in plain)]
    else:
        weights = [path for path in plain if is_selected(path)]
    if isinstance(names, str):
        modules = [path for path in wanted if path not in mlps and is_selected(path)]
    else:
        modules = [name for name in names if _leaf(name) not in _STACK_OF]
    return Targets(modules, (*parameters, *(f"{name}.weight" for name in weights)), doubles)


def _choose_stacks(
    experts: Iterable[str], is_wanted: Callable[[str], bool], is_all: bool
) -> tuple[list[tuple[str, str]], bool]:
    """Choose the stacks of experts, with their paths; True if gate and up were named separately."""
    chosen, doubles = [], False
    for path in experts:
        named = {name for name in (_EXPERT_NAMES if is_all else _STACK_OF) if is_wanted(f"{path}.{name}")}
        for halves in _HALVES:
            if len(missing := halves - named) == 1:
                (half,) = halves & named
                said = f"target_modules names {half!r} of experts without {missing.pop()!r}"
                raise InputError(f"{said}, but one stack holds both; name both or neither")
            doubles |= halves <= named
        chosen += [(path, stack) for stack in sorted({_STACK_OF[name] for name in named})]
    return chosen, doubles


def _is_selected(options: Options, *parts: str) -> bool:
    """True if `layers_to_transform` and `exclude_modules` let a path be adapted."""
    path, layers = ".".join(parts), options.get("layers_to_transform")
    if layers is not None:
        number = _LAYER_NUMBER.search(f".{path}")
        if number is None or int(number[1]) not in ([layers] if isinstance(layers, int) else layers):
            return False
    if not (excluded := options.get("exclude_modules")):
        return True
    is_excluded = _make_matcher(excluded)
    others = [f"{parts[0]}.{name}" for name, stack in _STACK_OF.items() if stack == parts[-1]]
    return not any(map(is_excluded, [path, parts[0], *others]))


def limit_to_text_model(
    model: PreTrainedModel, targets: str | list[str], options: Options, notes: list[str]
) -> str | list[str]:
    """Limit targets to the text model inside a model of vision and language.

    A vision tower has projections of the same names, which rows of text never reach. A regular expression
    stays as it is.
    """
    decoder = model.get_decoder()
    refused = arch_spec_for(decoder.config.model_type).refused_by_peft if targets == "all-linear" else ()
    is_whole = model.base_model is decoder and not refused
    if is_whole or (isinstance(targets, str) and targets != "all-linear"):
        return targets
    linear = [path for path, module in _inside(model, decoder) if isinstance(module, nn.Linear)]
    if refused:
        notes.append(f"all-linear leaves out {', '.join(refused)}, which PEFT refuses to adapt")
        return [path for path in linear if _leaf(path) not in refused and _is_selected(options, path)]
    return [path for path in linear if targets == "all-linear" or _leaf(path) in targets]


def check_names(model: nn.Module, name: str, wanted: Collection[str], others: Iterable[str] = ()) -> None:
    """Raise InputError for names of no module and of no path among `others`; `name` is the argument's."""
    paths = [*(path for path, _ in model.named_modules()), *others]
    absent = [end for end in wanted if not any(_ends_with(path, end) for path in paths)]
    if absent:
        weighted = [path for path, module in model.named_modules() if [*module.parameters(recurse=False)]]
        known = {_leaf(path) for path in [*weighted, *others]}
        wrong = ", ".join(map(repr, absent))
        raise InputError(f"{name} names {wrong}; the model has {', '.join(sorted(known))}")


def _check_targets(model: nn.Module, target_modules: Names, experts: Mapping[str, nn.Module]) -> None:
    """Refuse targets that the model does not have."""
    expert_paths = [f"{path}.{name}" for path in experts for name in _STACK_OF] + list_ungated_stacks(model)
    if isinstance(target_modules, str):
        paths = [*(path for path, _ in model.named_modules()), *expert_paths]
        try:
            matches = target_modules == "all-linear" or any(re.fullmatch(target_modules, p) for p in paths)
        except re.error as error:
            raise InputError(f"target_modules is {target_modules!r}: {error}; correct the pattern") from None
        if not target_modules or not matches:
            remedy = "give 'all-linear', names, or a regular expression of whole paths"
            raise InputError(f"target_modules is {target_modules!r}, which matches nothing; {remedy}")
        return
    if not isinstance(target_modules, Sequence | Set) or not target_modules:
        raise InputError(f"target_modules is {target_modules!r}; give the names of linear layers")
    check_names(model, "target_modules", target_modules, expert_paths)


def _make_matcher(names: Names) -> Callable[[str], bool]:
    """Return a predicate: names or a pattern mean this path, as in PEFT."""
    if names == "all-linear":
        return lambda path: True
    if isinstance(names, str):
        pattern = re.compile(names)
        return lambda path: pattern.fullmatch(path) is not None
    return lambda path: any(_ends_with(path, name) for name in names)


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _inside(model: nn.Module, decoder: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the modules of a decoder with their paths in the model."""
    (prefix,) = (path for path, module in model.named_modules() if module is decoder)
    return [(f"{prefix}.{path}" if prefix else path, module) for path, module in decoder.named_modules()]


def _is_router(model: nn.Module, path: str) -> bool:
    """True for a linear layer beside experts with one output for each of them, or one for the shared expert.

    It may be the only linear layer of a module beside them.
    """
    beside = model.get_submodule(path.rpartition(".")[0])
    linear: Any = model.get_submodule(path)
    inside = [layer for layer in beside.modules() if isinstance(layer, nn.Linear)]
    if not any(map(is_experts, beside.children())) and inside == [linear]:
        beside = model.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
    experts: list[Any] = [module for module in beside.children() if is_experts(module)]
    return any(linear.out_features in (1, len(module.down_proj)) for module in experts)


_LINEAR_ONLY = ("lora_dropout", "use_dora", "lora_bias", "loftq_config")  # PEFT has them not for stacks
_WEIGHTLESS_INITS = (True, False, "gaussian")  # the others read a layer's weight


def refuse_on_stacks(targets: Targets, options: Options) -> None:
    """Raise InputError for options of `LoraConfig` that PEFT does not have on stacks of experts."""
    stacks = [*targets.parameters, *(options.get("target_parameters") or ())]
    refused = [name for name in _LINEAR_ONLY if options.get(name)]
    if options.get("init_lora_weights", True) not in _WEIGHTLESS_INITS:
        refused.append("init_lora_weights")
    if stacks and refused:
        name = refused[0]
        said = f"{name} is {options[name]!r}, which PEFT's LoRA does not have on stacks of experts"
        raise InputError(f"{said}; drop it, or give target_modules without layers of experts")

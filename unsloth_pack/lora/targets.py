"""Which layers an adapter is put on, by the names that people use.

Since transformers 5 the experts of a layer are stacked parameters, and no layers of their own. So the names
of an expert's layers mean the stack that holds them, which PEFT takes as `target_parameters`. PEFT 0.21
translates these names itself for some model types, and then leaves out the linear layers of the same names:
the MLPs of layers without experts, and shared experts. Here they are adapted too, through their parameter
`weight`, which PEFT does not translate. Routers are never adapted by such a name.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from peft.utils.constants import DUMMY_TARGET_MODULES as NO_LAYERS
from peft.utils.other import get_pattern_key
from torch import nn

from unsloth_pack.errors import InputError, about, at_once
from unsloth_pack.lora.expert_stacks import is_experts, ungated_stacks
from unsloth_pack.models import arch_spec_for

# Names and patterns of a `LoraConfig`, of which PEFT passes over what matches nothing.

_FIELDS = ("rank_pattern", "alpha_pattern")


def check_patterns(adapted: Sequence[str], given: Mapping[str, Any]) -> None:
    """Refuse a pattern that no adapted layer matches, for example q_proj in a model with one qkv_proj.

    Args:
        adapted: the paths of what an adapter is put on.
        given: fields of the `LoraConfig`.

    Raises:
        InputError: names the pattern.
    """
    for field in _FIELDS:
        for pattern in given.get(field) or {}:
            try:
                matches = re.compile(rf"(.*\.)?({pattern})$").match  # as PEFT reads it
            except re.error as error:
                raise InputError(
                    f"{field} has {pattern!r}, which is no pattern: {error}; correct it"
                ) from None
            if not any(map(matches, adapted)):
                names = ", ".join(sorted({path.rpartition(".")[2] for path in adapted})) or "no layers"
                raise InputError(f"{field} has {pattern!r}, which matches none of what is adapted: {names}")


def in_any_order(patterns: Mapping[str, Any], adapted: Sequence[str]) -> dict[str, Any]:
    """Patterns that say the same of what is adapted in every order.

    PEFT takes the first one that matches, and a saved config has them sorted. Where another one would come
    first then, each path has a pattern of its own.
    """
    keys = list(patterns)
    found = {path: get_pattern_key(keys, path) for path in adapted}  # the path itself where none matches
    if all(get_pattern_key(sorted(keys), path) == key for path, key in found.items()):
        return dict(patterns)
    return {re.escape(path): patterns[key] for path, key in found.items() if key in patterns}


def check_parameters(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse `target_parameters` that the model does not have.

    Raises:
        InputError: names them.
    """
    if isinstance(names, str):
        raise InputError(f"target_parameters is {names!r}; give a list of ends of paths")
    sizes = {path: parameter.dim() for path, parameter in model.named_parameters()}
    paths = sorted(sizes, key=sizes.__getitem__)  # stacks of experts last
    absent = [name for name in names if not any(f".{path}".endswith(f".{name}") for path in paths)]
    if absent:
        raise InputError(
            f"target_parameters names {', '.join(map(repr, absent))}, and no path of a parameter ends so; "
            f"give ends of paths, such as {paths[-1]}"
        )


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
_JOINED = {  # layers of Llama -> the one that holds them all in some models
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
}
_HALVES = ({"gate_proj", "up_proj"}, {"w1", "w3"})  # of gate_up_proj
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # what None and "all-linear" mean of an expert
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Targets:
    """What of a model is adapted, as PEFT's `LoraConfig` takes it.

    Args:
        modules: `target_modules`.
        parameters: `target_parameters`.
        doubles_gate_and_up: whether the stacks of gate and up have twice the rank, once for each of the two.
        paths: of the layers and the stacked parameters that these are.
        notes: what was asked for and is adapted otherwise, or not at all.
    """

    modules: str | list[str]
    parameters: tuple[str, ...] = ()
    doubles_gate_and_up: bool = False
    paths: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def config_fields(self, r: int, lora_alpha: float, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a `LoraConfig`.

        Args:
            given: fields of the caller, which go before those of the same meaning here.
        """
        fields = {**given, "target_modules": self.modules}
        if self.parameters:
            fields["target_parameters"] = sorted({*(given.get("target_parameters") or ()), *self.parameters})
        for name, value in (("rank_pattern", 2 * r), ("alpha_pattern", 2 * lora_alpha)):
            patterns = dict(given.get(name) or {})
            if self.doubles_gate_and_up:
                patterns.setdefault(r".*\.gate_up_proj", value)  # the pattern that PEFT itself makes
            fields[name] = in_any_order(patterns, self.paths)
        return fields


def default_names(model: Any) -> list[str]:
    """The names in `PROJECTIONS`, and of the architecture's own, that the model has."""
    named = list(model.named_modules())
    names = {path.rpartition(".")[2] for path, module in named if isinstance(module, nn.Linear)}
    if any(is_experts(module) for _, module in named):
        names.update(_OF_EXPERTS)
    own = arch_spec_for(model.get_decoder().config.model_type).projections
    return [name for name in dict.fromkeys((*PROJECTIONS, *own)) if name in names]


def expert_layers(model: Any) -> list[str]:
    """Paths that mean the layers of routed experts, in `lora_targets`."""
    stacks = [path for path, module in model.named_modules() if is_experts(module)]
    return [f"{path}.{name}" for path in stacks for name in _OF_EXPERTS]


def _as_joined(model: Any, names: str | Collection[str], notes: list[str]) -> str | Collection[str]:
    """The names, with that of a joined layer in place of all those that it holds."""
    if isinstance(names, str) or not isinstance(names, Collection):
        return names
    inside = _inside(model, model.get_decoder())
    has, found = {_leaf(path) for path, module in inside if isinstance(module, nn.Linear)}, list(names)
    for parts, joined in _JOINED.items():
        if joined in has and has.isdisjoint(parts) and set(parts) <= {*found}:
            notes.append(f"{', '.join(parts)} are one layer here, {joined}, which is adapted in their place")
            found = [name for name in found if name not in (*parts, joined)] + [joined]
    return found


def _wanted_stacks(
    model: nn.Module, names: str | Collection[str], given: Mapping[str, Any], notes: list[str]
) -> tuple[str, ...]:
    """`target_parameters` for experts without a gate."""
    if given.get("target_parameters"):
        return ()
    is_wanted = _matcher(names)
    found = [
        path
        for path in filter(is_wanted, ungated_stacks(model))
        if _is_kept(given, *path.rpartition(".")[::2])
    ]
    refused = [name for name in ("lora_dropout", "use_dora") if given.get(name)]
    if found and refused:
        notes.append(f"{found[0]} and the other experts are not adapted: PEFT has no {refused[0]} for them")
        return ()
    return tuple(found)


def lora_targets(
    model: Any, target_modules: str | Collection[str] | None, given: Mapping[str, Any] | None = None
) -> Targets:
    """What an adapter is put on.

    Args:
        target_modules: names of layers, whole paths or their ends; a regular expression of whole paths;
            "all-linear"; None for those of `PROJECTIONS` that the model has; or `NO_LAYERS`, PEFT's word for
            an adapter of `modules_to_save` alone.
        given: further fields of the `LoraConfig`. With `target_parameters`, None leaves the experts to it.

    Raises:
        InputError: a target that the model does not have, a pattern that matches nothing, or gate without up.
    """
    given = given or {}
    check_parameters(model, given.get("target_parameters") or ())
    notes: list[str] = []
    found = _targets_of(model, target_modules, given, notes)
    paths = _adapted_paths(model, found, given)
    check_patterns(paths, given)
    return replace(found, paths=tuple(paths), notes=tuple(notes))


def _adapted_paths(model: Any, targets: Targets, given: Mapping[str, Any]) -> list[str]:
    """The paths of the layers and the stacked parameters that PEFT will adapt."""
    is_meant, is_all = _matcher(targets.modules), targets.modules == "all-linear"
    kinds = nn.Linear if is_all else (nn.Linear, nn.Embedding)
    layers = [
        path
        for path, one in model.named_modules()
        if isinstance(one, kinds) and is_meant(path) and not (is_all and one is model.get_output_embeddings())
    ]
    names = {*targets.parameters, *(given.get("target_parameters") or ())}
    stacks = [path for path, _ in model.named_parameters() if any(_ends_with(path, name) for name in names)]
    return layers + stacks


def _targets_of(
    model: Any, target_modules: str | Collection[str] | None, given: Mapping[str, Any], notes: list[str]
) -> Targets:
    if target_modules == NO_LAYERS or (target_modules == [] and given.get("target_parameters")):
        return Targets(target_modules)
    names = default_names(model) if target_modules is None else _as_joined(model, target_modules, notes)
    experts = {path: module for path, module in model.named_modules() if is_experts(module)}
    with about("target_modules"):
        _check_targets(model, names, experts)
    if not experts:
        modules = of_text_model(model, names if isinstance(names, str) else list(names), given, notes)
        return Targets(modules, _wanted_stacks(model, names, given, notes))
    if target_modules is None and given.get("target_parameters"):
        experts = {}
    return _Choice(model, names, experts, given, notes).targets()


class _Choice:
    """What an adapter is put on in a model with routed experts.

    Args:
        experts: the modules of stacked experts that are adapted by names, by path.
        given: fields of the `LoraConfig`.
        notes: see `Targets`; lines are added.
    """

    def __init__(
        self,
        model: Any,
        names: str | Collection[str],
        experts: Mapping[str, nn.Module],
        given: Mapping[str, Any],
        notes: list[str],
    ):
        self._names, self._experts, self._notes = names, experts, notes
        decoder = model.get_decoder()
        is_pattern = isinstance(names, str) and names != "all-linear"  # which may mean layers of a tower, too
        self._linear = {
            path: module
            for path, module in (model.named_modules() if is_pattern else _inside(model, decoder))
            if isinstance(module, nn.Linear) and not (names == "all-linear" and _is_router(model, path))
        }
        self._is_kept = partial(_is_kept, given)
        self._is_wanted = _matcher(names)
        # Names choose as PEFT does, by the ends of paths; anything else is spelt out
        chooses_layers = given.get("layers_to_transform") is not None or given.get("exclude_modules")
        is_whole = not chooses_layers and model.base_model is decoder
        self._by_name = is_whole and not isinstance(names, str)

    def targets(self) -> Targets:
        """The choice; an `InputError` for gate without up."""
        stacks, doubles = self._stacks()
        of_mlps = [path for path in self._wanted_linear() if _leaf(path) in _STACK_OF]
        quantised = [path for path in of_mlps if type(self._linear[path]) is not nn.Linear]
        if quantised:
            self._notes.append(
                f"{quantised[0]} and {len(quantised) - 1} more layers beside the experts are not adapted: "
                "PEFT cannot adapt both while they are quantised"
            )
        if self._names == "all-linear":
            self._notes.append("all-linear leaves the routers of experts as they are")
        plain = [path for path in of_mlps if path not in quantised]
        return Targets(self._modules(), (*stacks, *self._weights(plain)), doubles)

    def _modules(self) -> list[str]:
        """`target_modules`: without the names that PEFT would translate."""
        if isinstance(self._names, str):
            wanted = [path for path in self._wanted_linear() if _leaf(path) not in _STACK_OF]
            return [path for path in wanted if self._is_kept(path)]
        return [name for name in self._names if _leaf(name) not in _STACK_OF]

    def _wanted_linear(self) -> list[str]:
        return [path for path in self._linear if self._is_wanted(path)]

    def _weights(self, paths: Sequence[str]) -> list[str]:
        """`target_parameters` for linear layers of these paths."""
        if not self._by_name:
            return [f"{path}.weight" for path in paths if self._is_kept(path)]
        ends = [name for name in self._names if any(_ends_with(path, name) for path in paths)]
        return [f"{name}.weight" for name in ends]

    def _stacks(self) -> tuple[list[str], bool]:
        """`target_parameters` for experts, and whether their gate and up were named apart."""
        chosen, doubles = [], False
        for path in filter(self._is_kept, self._experts):
            named = {name for name in self._expert_names() if self._is_wanted(f"{path}.{name}")}
            for halves in _HALVES:
                if len(missing := halves - named) == 1:
                    (found,) = halves & named
                    raise InputError(
                        f"target_modules names {found!r} of experts without {missing.pop()!r}, but one stack "
                        "holds both; name both or neither",
                        about="target_modules",
                    )
                doubles |= halves <= named
            chosen += [(path, stack) for stack in sorted({_STACK_OF[name] for name in named})]
        if self._by_name and {path for path, _ in chosen} == self._experts.keys():
            return sorted({stack for _, stack in chosen}), doubles
        return [f"{path}.{stack}" for path, stack in chosen if self._is_kept(path, stack)], doubles

    def _expert_names(self) -> Iterable[str]:
        return _OF_EXPERTS if self._names == "all-linear" else _STACK_OF


def _is_kept(given: Mapping[str, Any], *parts: str) -> bool:
    """Whether `layers_to_transform` and `exclude_modules` let a path be adapted."""
    path, layers, excluded = ".".join(parts), given.get("layers_to_transform"), given.get("exclude_modules")
    if layers is not None:
        number = _LAYER_NUMBER.search(f".{path}")
        if number is None or int(number[1]) not in ([layers] if isinstance(layers, int) else layers):
            return False
    if not excluded:
        return True
    is_excluded = _matcher(excluded)
    others = [f"{parts[0]}.{name}" for name, stack in _STACK_OF.items() if stack == parts[-1]]
    return not any(map(is_excluded, [path, parts[0], *others]))


def of_text_model(
    model: Any, targets: str | list[str], given: Mapping[str, Any], notes: list[str]
) -> str | list[str]:
    """Targets of the text model alone, where it is inside a model of vision and language.

    A vision tower has projections of the same names, which rows of text never reach. A regular expression is
    taken as it is.

    Args:
        given: further fields of the `LoraConfig`.
        notes: a line is added for what is left out.
    """
    decoder = model.get_decoder()
    refused = arch_spec_for(decoder.config.model_type).refused_by_peft if targets == "all-linear" else ()
    is_whole = model.base_model is decoder and not refused
    if is_whole or (isinstance(targets, str) and targets != "all-linear"):
        return targets
    linear = [path for path, module in _inside(model, decoder) if isinstance(module, nn.Linear)]
    if refused:
        notes.append(f"all-linear leaves out {', '.join(refused)}, which PEFT refuses to adapt")
        return [path for path in linear if _leaf(path) not in refused and _is_kept(given, path)]
    return [path for path in linear if targets == "all-linear" or _leaf(path) in targets]


def check_names(model: nn.Module, name: str, wanted: Collection[str], others: Iterable[str] = ()) -> None:
    """Refuse names of modules that the model does not have.

    Args:
        name: of the argument that holds them.
        others: paths that are taken beside those of modules.

    Raises:
        InputError: one is not there.
    """
    paths = [*(path for path, _ in model.named_modules()), *others]
    absent = [one for one in wanted if not any(_ends_with(path, one) for path in paths)]
    if absent:
        weighted = [path for path, module in model.named_modules() if [*module.parameters(recurse=False)]]
        known = {_leaf(path) for path in [*weighted, *others]}
        raise InputError(
            f"{name} names {', '.join(map(repr, absent))}; the model has {', '.join(sorted(known))}",
            about=name,
        )


def _check_targets(
    model: nn.Module, target_modules: str | Collection[str], experts: Mapping[str, nn.Module]
) -> None:
    """Refuse targets that the model does not have."""
    of_experts = [f"{path}.{name}" for path in experts for name in _STACK_OF] + ungated_stacks(model)
    if isinstance(target_modules, str):
        paths = [*(path for path, _ in model.named_modules()), *of_experts]
        try:
            matches = target_modules == "all-linear" or any(re.fullmatch(target_modules, p) for p in paths)
        except re.error as error:
            raise InputError(f"target_modules is {target_modules!r}: {error}; correct the pattern") from None
        if not target_modules or not matches:
            raise InputError(
                f"target_modules is {target_modules!r}, which matches nothing; give 'all-linear', a list of "
                "names, or a regular expression of whole paths"
            )
        return
    if not isinstance(target_modules, Sequence | Set) or not target_modules:
        raise InputError(f"target_modules is {target_modules!r}; give the names of linear layers")
    check_names(model, "target_modules", target_modules, of_experts)


def _matcher(names: str | Collection[str]) -> Callable[[str], bool]:
    """Whether a path is meant by names or a pattern, as PEFT reads them."""
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
    """The modules of a decoder, by their paths in the model."""
    (prefix,) = (path for path, module in model.named_modules() if module is decoder)
    return [(f"{prefix}.{path}" if prefix else path, module) for path, module in decoder.named_modules()]


def _is_router(model: nn.Module, path: str) -> bool:
    """Whether a linear layer decides about experts: it stands beside them, itself or as all that a module
    holds, and makes one number for each of them, or one for the shared expert."""
    beside = model.get_submodule(path.rpartition(".")[0])
    linear: Any = model.get_submodule(path)
    if not any(map(is_experts, beside.children())) and _only_linear(beside) is linear:
        beside = model.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
    experts: list[Any] = [module for module in beside.children() if is_experts(module)]
    return any(linear.out_features in (1, len(module.down_proj)) for module in experts)


def _only_linear(module: nn.Module) -> nn.Module | None:
    found = [one for one in module.modules() if isinstance(one, nn.Linear)]
    return found[0] if len(found) == 1 else None


# What PEFT's LoRA does for linear layers, and not for the stacked parameters of experts.

_NONE_THERE = ("lora_dropout", "use_dora", "lora_bias", "loftq_config")
_BEGINNINGS = (True, False, "gaussian")  # the others look at a layer's weight


def refuse_on_stacks(targets: Targets, given: Mapping[str, Any]) -> None:
    """Refuse what an adapter on stacked parameters cannot have.

    Args:
        given: fields of the `LoraConfig`, `loftq_config` aside as `get_peft_model` takes it.

    Raises:
        InputError: names the argument, and a parameter.
    """
    stacks = [*targets.parameters, *(given.get("target_parameters") or ())]
    if not stacks:
        return
    wanted = {name: given[name] for name in _NONE_THERE if given.get(name)}
    beginning = given.get("init_lora_weights", True)
    if beginning not in _BEGINNINGS:
        wanted["init_lora_weights"] = beginning
    at_once([partial(_refuse, name, value, stacks[0]) for name, value in wanted.items()])


def _refuse(name: str, value: Any, stack: str) -> None:
    raise InputError(
        f"{name} is {value!r}, which PEFT's LoRA does not have on stacked parameters of experts ({stack}); "
        f"drop {name}, or give target_modules without layers of experts",
        about=(name, "target_modules"),
    )

"""A model's modules and parameters, listed once, since trainers walk over all of them several times a step.

Every step transformers' `Trainer` sets the mode, counts parameters, clips gradients and clears them. Each of
these walks over all modules, some two thousand in a small model with its adapters. Together they take a third
of a captured step.
"""

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from unsloth_pack.errors import InputError, written

if TYPE_CHECKING:

    class _TransformersModel(nn.Module):
        def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int: ...
else:
    _TransformersModel = nn.Module  # the transformers class comes behind, when a model is patched

_MODE = attrgetter("training")


class Walkable(Protocol):
    """Has modules and parameters that can be walked over, as every `torch.nn.Module` has."""

    def modules(self) -> Iterator[nn.Module]:
        """As `torch.nn.Module.modules`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As `torch.nn.Module.parameters`."""


class ModuleWalk:
    """All that lies below one module, as long as no module or parameter is added, removed or renamed.

    Whether the lists are still right is asked several times a step. So they are compared in C, and of dicts
    that are empty, as most are, only that they still are.
    """

    def __init__(self) -> None:
        self.modules: list[tuple[str, nn.Module]] = []  # by path; a module at two paths is listed twice
        self.each: list[nn.Module] = []  # likewise, without the path
        # By path; each is read from the dict of its module, under its name there
        self.parameters: list[tuple[str, dict[str, nn.Parameter | None], str]] = []
        self.n_parameters: dict[bool, int] = {}  # as counted without embeddings, or with them
        self._empty: list[dict[str, Any]] = []  # what holds no module or no parameter
        self._inner: list[dict[str, nn.Module | None]] = []  # what holds modules
        self._children: list[dict[str, nn.Module | None]] = []  # copies of these
        self._holders: list[dict[str, nn.Parameter | None]] = []  # what holds parameters
        self._keys: list[str] = []  # of these
        self._once: list[nn.Parameter] = []
        self._ids: list[int] = []  # of all that modules held then, None among them

    def is_current(self, root: nn.Module) -> bool:
        """Whether the lists are still right, but for the order in which one module holds others."""
        return (
            bool(self.modules)
            and self.modules[0][1] is root
            and not any(self._empty)
            and self._inner == self._children  # modules are compared by identity
            and list(chain.from_iterable(self._holders)) == self._keys
        )

    def renew(self, modules: list[tuple[str, nn.Module]]) -> None:
        """List these modules, by path, the module itself first, and their parameters."""
        self.modules = modules
        self.each = [module for _, module in modules]
        self.parameters = [
            (f"{name}.{key}" if name else key, module._parameters, key)
            for name, module in modules
            for key in module._parameters
        ]
        self.n_parameters.clear()
        children = [module._modules for module in self.each]
        holders = [module._parameters for module in self.each]
        self._empty = [*(held for held in children if not held), *(held for held in holders if not held)]
        self._inner = [held for held in children if held]
        self._children = [dict(held) for held in self._inner]
        self._holders = [held for held in holders if held]
        self._keys = list(chain.from_iterable(self._holders))

    def parameters_once(self) -> list[nn.Parameter]:
        """The parameters that the modules hold now, each once."""
        held_now = list(chain.from_iterable(map(dict.values, self._holders)))
        ids = list(map(id, held_now))  # `==` of parameters would compare their numbers
        if ids != self._ids:
            by_id = {id(parameter): parameter for parameter in held_now if parameter is not None}
            self._ids, self._once = ids, list(by_id.values())
        return self._once


class ListedModules(nn.Module):
    """Gives the same modules and parameters as any `torch.nn.Module`, from lists instead of by recursion."""

    module_walk: ModuleWalk

    def _walk(self) -> ModuleWalk:
        if not self.module_walk.is_current(self):
            self.module_walk.renew(list(super().named_modules(remove_duplicate=False)))
        return self.module_walk

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As `torch.nn.Module.named_modules`."""
        memo = set() if memo is None else memo
        if not self.module_walk.is_current(self):
            # One by one, as most ask for the first alone while modules are added: PEFT does for each layer.
            yield from super().named_modules(memo, prefix, remove_duplicate)
            self._walk()
            return
        for name, module in self.module_walk.modules:
            if module in memo:
                continue
            if remove_duplicate:
                memo.add(module)
            yield f"{prefix}.{name}" if prefix and name else prefix or name, module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `torch.nn.Module.named_parameters`."""
        if not recurse or not self.module_walk.is_current(self):
            yield from super().named_parameters(prefix, recurse, remove_duplicate)
            return
        seen = set()
        for name, held, key in self.module_walk.parameters:
            parameter = held[key]
            if parameter is None or id(parameter) in seen:
                continue
            if remove_duplicate:
                seen.add(id(parameter))
            yield f"{prefix}.{name}" if prefix else name, parameter

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As `torch.nn.Module.parameters`."""
        if not recurse or not self.module_walk.is_current(self):
            return super().parameters(recurse)
        return iter(self.module_walk.parameters_once())

    def train(self, mode: bool = True) -> Any:
        """As `torch.nn.Module.train`; sets nothing where all modules are in this mode already."""
        modes = map(_MODE, self._walk().each)
        if (mode is True and all(modes)) or (mode is False and not any(modes)):
            return self
        return super().train(mode)


class CountedParameters(ListedModules, _TransformersModel):
    """Goes before a transformers model's class: `num_parameters` counts only after a module has changed."""

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As transformers' `num_parameters`."""
        if only_trainable:
            return super().num_parameters(only_trainable, exclude_embeddings)
        counted = self._walk().n_parameters
        if exclude_embeddings not in counted:
            counted[exclude_embeddings] = super().num_parameters(exclude_embeddings=exclude_embeddings)
        return counted[exclude_embeddings]


# Modules and parameters that regular expressions over their names choose.


def compile_patterns(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a module's path is chosen, or that of a module that holds it.

    A pattern stands for whole parts of a path: `model.layers.[01]` chooses these two layers and all that is
    in them, `norm` every module of that name, and `.*norm` every module whose name ends so.
    """
    compiled = [re.compile(rf"(?:.*\.)?(?:{pattern})(?:\..*)?") for pattern in patterns]
    return lambda path: any(pattern.fullmatch(path) for pattern in compiled)


def check_matches(
    option: str,
    patterns: Sequence[str],
    paths: Iterable[str],
    which: str = "has weights",
    remedy: str = "give a regular expression, or a JSON list of several",
) -> None:
    """Refuse a pattern that chooses nothing.

    Args:
        option: that holds the patterns.
        paths: of all parameters that may be chosen.
        which: what their modules have in common.
        remedy: what to do about a pattern that chooses none of them.

    Raises:
        InputError: names the pattern, and a few names that the model has.
    """
    known = [*paths]
    for pattern in patterns:
        if not any(map(compile_patterns([pattern]), known)):
            some = ", ".join(dict.fromkeys(path.rpartition(".")[0] for path in known[:3]))
            raise InputError(
                f"{option} holds {pattern!r}, which matches no module that {which}; {remedy} (the model has "
                f"{some}, ...)",
                about=option,
            )


def parameter_paths(model: nn.Module) -> list[str]:
    """The paths of all parameters; of one that two modules share, both."""
    return [path for path, _ in model.named_parameters(remove_duplicate=False)]


def chosen_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The paths of the chosen modules that hold parameters of their own."""
    is_chosen = compile_patterns(patterns)
    return [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if is_chosen(path) and any(True for _ in module.parameters(recurse=False))
    ]


def train_only(model: nn.Module, train: Sequence[str] | None, freeze: Sequence[str] | None) -> None:
    """Let the parameters that `train` chooses train, or all without it, but for those that `freeze` chooses.

    Raises:
        InputError: nothing is left to train.
    """
    is_trained = compile_patterns(train) if train else lambda path: True
    is_frozen = compile_patterns(freeze or ())
    parameters = [*model.named_parameters(remove_duplicate=False)]
    model.requires_grad_(False)
    for path, parameter in parameters:
        parameter.requires_grad_(parameter.requires_grad or is_trained(path))
    for path, parameter in parameters:
        if is_frozen(path):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise InputError(
            f"train_modules is {written(train)} and freeze_modules is {written(freeze)}, which leaves "
            "nothing to train; freeze less",
            about=("train_modules", "freeze_modules"),
        )


# What a module is made of, by name.


def own_names(module: nn.Module) -> set[str]:
    """The names of a module's own parameters, buffers, submodules and public attributes."""
    attributes = {name for name in vars(module) if not name.startswith("_") and name != "training"}
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return attributes | {name for name, _ in (*tensors, *module.named_children())}


# What a caller gives for a model.


def require_model(model: Any, remedy: str = "give a transformers model, or a PEFT model of one") -> None:
    """Refuse what is no module: None, a name, a config, a class.

    Args:
        remedy: what to give instead.

    Raises:
        InputError: it is none.
    """
    if not isinstance(model, nn.Module):
        shown = " ".join(reprlib.repr(model).split())  # a config has many lines
        raise InputError(f"model is {shown}; {remedy}")

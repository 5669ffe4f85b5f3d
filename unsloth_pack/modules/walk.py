"""A model's modules and parameters, listed once, since trainers walk over all of them several times a step.

Every step transformers' `Trainer` sets the mode, counts parameters, clips gradients and clears them. Each of
these walks over all modules, some two thousand in a small model with its adapters. Together they take a third
of a captured step.
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

if TYPE_CHECKING:

    class _TransformersModel(nn.Module):
        def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int: ...
else:
    _TransformersModel = nn.Module  # the transformers class comes behind, when a model is patched


class Walkable(Protocol):
    """Has modules and parameters that can be walked over, as every `torch.nn.Module` has."""

    def modules(self) -> Iterator[nn.Module]:
        """As `torch.nn.Module.modules`."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As `torch.nn.Module.parameters`."""


class ModuleWalk:
    """All that lies below one module, as long as no module or parameter is added, removed or renamed."""

    def __init__(self) -> None:
        self.modules: list[tuple[str, nn.Module]] = []  # by path; a module at two paths is listed twice
        # By path; each is read from the dict of its module, under its name there
        self.parameters: list[tuple[str, dict[str, nn.Parameter | None], str]] = []
        self.n_parameters: dict[bool, int] = {}  # as counted without embeddings, or with them
        self._inner: list[dict[str, nn.Module | None]] = []
        self._leaves: list[dict[str, nn.Module | None]] = []
        self._holders: list[dict[str, nn.Parameter | None]] = []
        self._look: tuple[list[Any], ...] = ()

    def is_current(self, root: nn.Module) -> bool:
        """Whether the lists are still right. They are compared in C, which is far cheaper than a walk."""
        if not self.modules or self.modules[0][1] is not root or any(self._leaves):
            return False
        return self._take_look() == self._look

    def renew(self, modules: list[tuple[str, nn.Module]]) -> None:
        """List these modules, by path, the module itself first, and their parameters."""
        self.modules = modules
        self.parameters = [
            (f"{name}.{key}" if name else key, module._parameters, key)
            for name, module in modules
            for key in module._parameters
        ]
        self.n_parameters.clear()
        children = [module._modules for _, module in modules]
        self._inner = [held for held in children if held]
        self._leaves = [held for held in children if not held]
        self._holders = [module._parameters for _, module in modules]
        self._look = self._take_look()

    def _take_look(self) -> tuple[list[Any], ...]:
        children = list(chain.from_iterable(map(dict.values, self._inner)))
        return children, list(chain.from_iterable(self._inner)), list(chain.from_iterable(self._holders))


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
        for name, module in self._walk().modules:
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
        for name, held, key in self._walk().parameters:
            parameter = held[key]
            if parameter is None or id(parameter) in seen:
                continue
            if remove_duplicate:
                seen.add(id(parameter))
            yield f"{prefix}.{name}" if prefix else name, parameter

    def train(self, mode: bool = True) -> Any:
        """As `torch.nn.Module.train`; sets nothing where all modules are in this mode already."""
        if all(module.training is mode for _, module in self._walk().modules):
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

"""What a graph takes for granted of any module: where its parameters lie, and what its adapters do."""

from itertools import chain, repeat
from operator import attrgetter, contains

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, UntypedStorage

from unsloth_pack.modules.hooks import HOOKS, is_harmless
from unsloth_pack.modules.walk import Walkable

_IS_TRAINED = attrgetter("requires_grad")


class ModuleState:
    """A module as it was when this was made. Graphs that were captured then are right while it matches."""

    def __init__(self, module: Walkable):
        modules = list(module.modules())
        self._module = module
        self._hooks = [getattr(m, name) for m in modules for name in HOOKS]
        self._attributes = [vars(m) for m in modules]
        self._children = [m._modules for m in modules if m._modules]
        self._children_seen = [dict(held) for held in self._children]
        self._holders = [m._parameters for m in modules if m._parameters]
        self._kept_alive = self._parameters()  # so that no other parameter gets the id of one of these
        self._memory: list[UntypedStorage] = []
        self._adapted = [m for m in modules if isinstance(m, BaseTunerLayer)]
        scalings = (getattr(m, "scaling", None) for m in self._adapted)  # IA³ has none
        self._scalings: list[dict[str, float]] = [scaling for scaling in scalings if scaling is not None]
        self._seen = self.look()

    def keep_memory(self) -> None:
        """Keep the memory of the parameters while this lives, even where they get other memory.

        Graphs may be launched before anybody looks whether the parameters lie there still.
        """
        self._memory = [p.untyped_storage() for p in self._kept_alive]

    def matches(self, module: Walkable) -> bool:
        """Whether nothing has changed. Called every step, so it compares little of a module."""
        return self._module is module and self._children == self._children_seen and self.look() == self._seen

    @property
    def has_hooks(self) -> bool:
        """Whether a hook, or a forward that was set on a module, may change what the module computes."""
        hooks = (hook for held in filter(None, self._hooks) for hook in held.values())
        return not all(map(is_harmless, hooks)) or any(map(contains, self._attributes, repeat("forward")))

    def _parameters(self) -> list[Tensor]:
        held = chain.from_iterable(map(dict.values, self._holders))
        return [p for p in held if p is not None]

    def look(self) -> list[list[object]]:
        """Of parameters and adapters, mostly in C: it reads thousands of objects."""
        parameters = self._parameters()
        adapters = [(m._disable_adapters, m._active_adapter, *m.merged_adapters) for m in self._adapted]
        return [
            list(map(id, parameters)),
            list(map(Tensor.data_ptr, parameters)),
            list(map(_IS_TRAINED, parameters)),
            adapters,
            list(chain.from_iterable(map(dict.values, self._scalings))),
        ]

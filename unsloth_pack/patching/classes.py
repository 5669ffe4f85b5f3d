"""The classes of patched modules: each is made once, and pickles find it by what it was made of."""

import copy
from functools import cache
from typing import Any
from weakref import WeakSet

_MADE: WeakSet[type] = WeakSet()


@cache
def subclass(fast: type, original: type) -> type:
    """`original` with the forward of `fast`, under the original's name: `save_pretrained` writes it.

    A call of the class makes a plain `original`, as its forward needs attributes that only a patch sets.
    """

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:  # pickles and torch's replicas give no arguments
            return object.__new__(kind)
        return original(*map(_for_any_class, args), **kwargs)

    names: dict[str, Any] = {
        name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    made = type(original.__name__, (fast, original), {**names, "__new__": new, "__reduce_ex__": _reduce})
    _MADE.add(made)
    return made


def _for_any_class(argument: Any) -> Any:
    """A patched model's configuration says "sdpa", for its masks, even if its own class takes none."""
    if getattr(argument, "_attn_implementation", None) == "sdpa":
        argument = copy.deepcopy(argument)
        argument._attn_implementation = None
    return argument


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    """For pickles: the class is not to be found under its name."""
    return _new, type(module).__bases__, *object.__reduce_ex__(module, protocol)[2:]


def _new(fast: type, original: type) -> Any:
    made: Any = subclass(fast, original)
    return made.__new__(made)


def is_made(kind: type) -> bool:
    """Whether a patch has put in this class."""
    return kind in _MADE

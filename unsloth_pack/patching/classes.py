"""The classes of patched modules: each is made once, and pickles find it by what it was made of."""

from functools import cache
from typing import Any
from weakref import WeakSet

_MADE: WeakSet[type] = WeakSet()


@cache
def subclass(fast: type, original: type) -> type:
    """`original` with the forward of `fast`, under the original's name: `save_pretrained` writes it."""
    names: dict[str, Any] = {
        name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    made = type(original.__name__, (fast, original), {**names, "__reduce_ex__": _reduce})
    _MADE.add(made)
    return made


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    """For pickles: the class is not to be found under its name."""
    return _new, type(module).__bases__, *object.__reduce_ex__(module, protocol)[2:]


def _new(fast: type, original: type) -> Any:
    made: Any = subclass(fast, original)
    return made.__new__(made)


def is_made(kind: type) -> bool:
    """Whether a patch has put in this class."""
    return kind in _MADE

"""Triton's interpreter without work that it repeats, which takes half of its time.

It looks through all of `triton.language` at every call of a function inside a kernel, and describes the shape
of every intermediate value anew. Here the language is replaced once, and equal types share one description.
What a kernel computes stays the same to the bit.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

core = tl.core


@contextmanager
def without_repeated_work() -> Iterator[None]:
    """Kernels run inside, on a CPU. The language is as before when it ends."""
    everything = SimpleNamespace(__globals__={"tl": tl, "core": core})
    replaced = interpreter._patch_lang(everything)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
        patch.setattr(interpreter, "_get_np_dtype", _dtype(interpreter._get_np_dtype))
        patch.setattr(core.block_type, "__init__", _block_type(core.block_type.__init__))
        patch.setattr(core.tensor, "__init__", _tensor)
        yield
    replaced.restore()


def _dtype(of_triton):
    made: dict[str, np.dtype] = {}

    def shared(type):
        name = type.scalar.name
        if name not in made:
            made[name] = of_triton(type)
        return made[name]

    return shared


def _block_type(initialise):
    made: dict[tuple, dict] = {}

    def shared(self, element_ty, shape):
        shape = core._unwrap_shape(shape)
        key = (element_ty.name, *shape)  # pointers in one kernel lead to one address space
        if key not in made:
            initialise(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    return shared


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(tuple(type.shape) if type.is_block() else ())


@cache
def _shape(sizes: tuple[int, ...]) -> tuple:
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

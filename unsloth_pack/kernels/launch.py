"""What the row-wise kernels share: whether tensors run on Triton, and their layout as rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.errors import InputError

# The backward pass of a fused operation: it can be differentiated once, and may be the last one.


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The `backward` of an autograd function, which refuses to run with create_graph=True.

    torch's decorator of this name refuses a second derivative only where the incoming gradient depends on
    something. Where that is a constant, as a loss's own, it returns constants, and the second derivative
    silently lacks their terms.

    Raises:
        InputError: the backward pass runs with create_graph=True.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True: a fused operation has no second derivative; undo the patch, or use "
                "torch's own operations"
            )
        return backward(ctx, *grads)

    return run


def is_last_pass() -> bool:
    """Whether the backward pass that runs now frees what its nodes have saved: it may be overwritten.

    Not so with retain_graph=True.
    """
    return not torch._C._autograd._get_current_graph_task_keep_graph()


# Products of matrices in 16 bits whose result is in float32: a gradient is then rounded once.


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b in out's dtype, which is that of a and b or float32."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a b, likewise."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


# Kernels that are compiled side by side, before anything launches them.
#
# A kernel is compiled when it is first launched, and a first step launches a dozen, one behind the other. In
# here a launch only says which kernel will be needed. Threads compile them all at once: most of that time
# Triton is in its compiler, in `ptxas` or in `gcc`, where threads do not wait for each other.

_here = threading.local()  # other threads go on launching


class _Wanted:
    """The kernels that would have been launched, and the threads that compile them.

    Args:
        device: on which they will run.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._asked: set[tuple[Any, ...]] = set()
        self._threads = ThreadPoolExecutor(thread_name_prefix="compiles a kernel")

    def add(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Have a kernel compiled for such arguments, once.

        Args:
            kernel: a function of Triton's jit.
            options: its further arguments, by name.
        """
        form = (id(kernel), *map(_form, args), *((name, _form(value)) for name, value in options.items()))
        if form not in self._asked:
            self._asked.add(form)
            small = tuple(map(_small, args)), {name: _small(value) for name, value in options.items()}
            self._threads.submit(self._compile, kernel, *small)

    def _compile(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A kernel's launcher, which is made when it is asked for, and loads the kernel."""
        with torch.cuda.device(self._device):
            return kernel.warmup(*args, grid=(1,), **options).run

    def await_all(self) -> None:
        """Wait for the threads. What could not be compiled fails again where it is launched."""
        self._threads.shutdown()


@contextmanager
def compiled_side_by_side(device: torch.device) -> Iterator[None]:
    """Launch nothing in this thread meanwhile: have all kernels compiled that would have been launched.

    So what they write stays as it was allocated, and nothing may be kept that was computed from it. The
    backward pass has to run in the same thread.
    """
    wanted = _here.wanted = _Wanted(device)
    try:
        yield
    finally:
        _here.wanted = None
        wanted.await_all()


def wanted_instead() -> _Wanted | None:
    """What is told of a kernel instead of launching it; None where kernels are launched."""
    return getattr(_here, "wanted", None)


def _form(value: Any) -> Any:
    """What Triton may compile a kernel anew for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return tuple(map(_form, value)) if isinstance(value, tuple | list) else value


def _small(value: Any) -> Any:
    """Of the same form, for a thread to hold: the step goes on meanwhile, and frees what it does not need."""
    if isinstance(value, Tensor):
        n_before = value.data_ptr() % 16 // value.element_size()
        return value.new_empty(n_before + 1)[n_before:]
    return type(value)(map(_small, value)) if isinstance(value, tuple | list) else value


try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs in place of every kernel
    triton = tl = None

INTERPRETED = triton is not None and triton.knobs.runtime.interpret
FUSED_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))

PER_THREAD = 32  # elements a thread holds: four 16-byte loads of bf16 in flight
MAX_WARPS = 16


def takes_fused_path(x: Tensor, other: Tensor) -> bool:
    """Whether a kernel over these tensors runs on Triton; the reference runs otherwise."""
    if triton is None or x.dtype not in FUSED_DTYPES or other.dtype not in FUSED_DTYPES:
        return False
    return x.is_cuda or INTERPRETED


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """The memory of `[..., C]` as rows whose last dim is contiguous, and the stride between them.

    A copy is made only where the last dim is not contiguous, or the dims before it do not collapse into one.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def jit(kernel=None, **options):
    """Triton's jit; without Triton the function as it is."""
    if kernel is None:
        return lambda kernel: jit(kernel, **options)
    if triton is None:
        return kernel
    return triton.jit(kernel, **options) if INTERPRETED else Kernel(kernel, **options)


if triton is not None:

    class Kernel(triton.JITFunction):
        """A kernel that is compiled ahead where its thread asks for that, see `compiled_side_by_side`."""

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            wanted = None if warmup else wanted_instead()
            if wanted is None:
                return super().run(*args, grid=grid, warmup=warmup, **options)
            return wanted.add(self, args, options)


def floor_power_of_2(n: int) -> int:
    """The greatest power of 2 up to n; 1 where n is below 1."""
    return 1 << max(0, n.bit_length() - 1)

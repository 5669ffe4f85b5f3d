"""Launch kernels: choose Triton or the reference, lay out rows, compile ahead; bring numbers to the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from unsloth_pack.errors import InputError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)


class _Function(Protocol[_P, _R_co]):
    """The class of an autograd function."""

    @staticmethod
    def forward(ctx: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    @classmethod
    def apply(cls, *args: object) -> Any: ...


def apply(function: _Function[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call an autograd function; torch leaves `Function.apply` untyped."""
    output: _R = function.apply(*args)
    return output


def once_differentiable(backward: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate the `backward` of an autograd function: refuse create_graph=True.

    torch's decorator of this name refuses a second derivative only if the incoming gradient requires one. For
    a constant, such as a loss's own, it returns constants, and the second derivative silently lacks their
    terms.

    Raises:
        InputError: the backward pass runs with create_graph=True.
    """

    @wraps(backward)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.is_grad_enabled():
            remedy = "undo the patch, or use torch's own operations"
            raise InputError(f"create_graph=True: a fused operation has no second derivative; {remedy}")
        return backward(*args, **kwargs)

    return run


def is_last_pass() -> bool:
    """True if this backward pass frees its saved tensors (no retain_graph=True): they may be overwritten."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute out = a b in out's dtype: that of a and b, or float32, so that a gradient is rounded once."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute out += a b, likewise."""
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


class _Local(threading.local):  # other threads go on launching
    # in place of a launch
    compile: Callable[[Any, tuple[object, ...], dict[str, object]], None] | None = None


_local = _Local()


@contextmanager
def compile_in_parallel(device: torch.device) -> Iterator[None]:
    """Compile the kernels that this thread would launch, each once for a set of arguments; launch none.

    Triton compiles a kernel at its first launch, and a first step launches a dozen, one after the other. Most
    of that time Triton is in its compiler, `ptxas` or `gcc`, where threads do not wait for each other. A
    failed compilation fails again at its launch.

    Outputs stay uninitialised: discard all that is computed from them. Run the backward pass in the same
    thread.
    """
    signatures = set()

    def warm_up(kernel: Any, args: tuple[object, ...], options: dict[str, object]) -> object:
        with torch.cuda.device(device):
            return kernel.warmup(*args, grid=(1,), **options).run  # reading `run` loads the kernel

    def add(kernel: Any, args: tuple[object, ...], options: dict[str, object]) -> None:
        arguments = args, tuple(options.items())
        signature = id(kernel), _signature(arguments)
        if signature not in signatures:
            signatures.add(signature)
            args, named = _shrink(arguments)
            threads.submit(warm_up, kernel, args, dict(named))

    with ThreadPoolExecutor(thread_name_prefix="compiles a kernel") as threads:
        _local.compile = add
        try:
            yield
        finally:
            _local.compile = None


def _signature(value: object) -> object:
    """Return the properties of an argument for which Triton may compile anew."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return tuple(map(_signature, value)) if isinstance(value, tuple | list) else value


def _shrink(value: Any) -> Any:
    """Return a small stand-in of the same signature: the step may free the tensor meanwhile."""
    if isinstance(value, Tensor):
        n_before = value.data_ptr() % 16 // value.element_size()
        return value.new_empty(n_before + 1)[n_before:]
    return tuple(map(_shrink, value)) if isinstance(value, tuple | list) else value


try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the reference runs in place of every kernel
    triton = tl = None

INTERPRETED = triton is not None and triton.knobs.runtime.interpret
FUSED_DTYPES = frozenset((torch.bfloat16, torch.float16, torch.float32))

PER_THREAD = 32  # elements a thread holds: four 16-byte loads of bf16 in flight
MAX_WARPS = 16
_WEIGHT_GRAD_PROGRAMS = 512  # at most


def takes_fused_path(x: Tensor, other: Tensor) -> bool:
    """True if a kernel over these tensors runs on Triton, not on the reference."""
    if triton is None or x.dtype not in FUSED_DTYPES or other.dtype not in FUSED_DTYPES:
        return False
    return x.is_cuda or INTERPRETED


def check_shapes(**tensors: tuple[str, Tensor | None]) -> None:
    """Raise ValueError unless every letter means one size, and all tensors are on one device.

    Args:
        tensors: by name, their dims and the tensor, such as `x=("NC", x)`; None fits. A first `*` stands for
            any dims, the same for all.
    """
    sizes: dict[str, object] = {}
    for name, (dims, x) in tensors.items():
        if x is None:
            continue
        n_before = x.dim() - len(dims) + 1
        shape = (x.shape[:n_before], *x.shape[n_before:]) if dims[0] == "*" else x.shape
        own = {"device": x.device, **dict(zip(dims, shape, strict=False))}
        wrong = [dim for dim, size in own.items() if sizes.setdefault(dim, size) != size]
        if wrong or len(shape) != len(dims):
            of = f" of {', '.join(f'{dim} = {sizes[dim]}' for dim in wrong)}" if wrong else ""
            raise ValueError(f"{name} is {[*x.shape]} on {x.device}: pass [{', '.join(dims)}]{of}")


def check_dtypes(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors are of one floating dtype."""
    dtypes = [x.dtype for x in tensors.values() if x is not None]
    if dtypes.count(dtypes[0]) < len(dtypes) or not dtypes[0].is_floating_point:
        listed = ", ".join(f"{name} is {x.dtype}" for name, x in tensors.items() if x is not None)
        raise ValueError(f"{listed}: cast all to one floating dtype")


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def as_rows(x: Tensor) -> tuple[Tensor, int]:
    """View `[..., C]` as rows with a contiguous last dim; return them and their stride.

    Copies only if the last dim is not contiguous, or the dims before it do not collapse into one.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


# mypy skips kernels: they are in Triton's language. One with options needs `no_type_check` as well.
if TYPE_CHECKING:
    from typing import no_type_check as jit
else:

    def jit(kernel=None, **options):
        """Apply Triton's jit; without Triton return the function."""
        if kernel is None:
            return lambda kernel: jit(kernel, **options)
        if triton is None:
            return kernel
        return triton.jit(kernel, **options) if INTERPRETED else Kernel(kernel, **options)


if triton is not None:

    class Kernel(triton.JITFunction):  # type: ignore[misc]  # Triton has no types
        """A kernel that runs on its tensors' device; `compile_in_parallel` compiles it without a launch."""

        def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if _local.compile is not None and not warmup:
                return _local.compile(self, args, options)
            with torch.cuda.device_of(next(x for x in args if isinstance(x, Tensor))):
                return super().run(*args, grid=grid, warmup=warmup, **options)


def floor_power_of_2(n: int) -> int:
    """Return the greatest power of 2 up to n; 1 for n below 1."""
    return 1 << max(0, n.bit_length() - 1)


def share_programs(blocks: int) -> tuple[int, int]:
    """Return the programs over so many blocks that sum a weight's gradient, and the blocks of each.

    Each writes a partial sum, to be added in a fixed order: the same bits every run, unlike atomics.
    """
    steps = int(triton.next_power_of_2(max(1, -(-blocks // _WEIGHT_GRAD_PROGRAMS))))
    return -(-blocks // steps), steps


class HostCopy:
    """Copy a tensor to the host now, to read it later.

    Start the copy before the decoder and read it after the decoder's launch, so that the GPU stays busy.
    """

    def __init__(self, tensor: Tensor):
        self._copy, self._arrived = tensor, None
        if tensor.is_cuda:
            with torch.cuda.device_of(tensor):
                self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                self._copy.copy_(tensor, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record()

    def read(self) -> Tensor:
        """Return the tensor on the host; waits for the copy only."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy

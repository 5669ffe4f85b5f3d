"""How the tests of the row-wise kernels judge a result, and the layouts they try it on."""

import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Results = Sequence[Tensor]


def run(fn: Callable[..., Tensor], inputs: Sequence[Tensor], g_out: Tensor, *options) -> list[Tensor]:
    """The output, and the gradients of the inputs that require one."""
    out = fn(*inputs, *options)
    leaves = [x for x in inputs if x.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, g_out)]


def leaf(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous copy, a leaf of a graph of its own."""
    return x.detach().to(dtype or x.dtype).contiguous().clone().requires_grad_(x.requires_grad)


def assert_no_worse(
    fn, plain, inputs: Sequence[Tensor], g_out: Tensor, *options, exact=None, has_oracle: bool = True
) -> None:
    """The largest error of each of fn's results against float64 is at most that of the plain path in the
    inputs' dtypes, plus one float32 unit in the last place of the largest value: both round last to the same
    dtype, and what they round may differ by so much. `exact` is plain, unless plain cancels in float64.

    In float64 fn is its oracle, and agrees with the truth."""
    wide = [leaf(x, torch.float64) for x in inputs], leaf(g_out, torch.float64)
    ours = run(fn, inputs, g_out, *options)
    theirs = run(plain, [leaf(x) for x in inputs], leaf(g_out), *options)
    truth = run(exact or plain, *wide, *options)
    oracle = run(fn, *wide, *options) if has_oracle else truth
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]
    for i, (x, y, o, t) in enumerate(zip(ours, theirs, oracle, truth, strict=True)):
        if t.numel():
            error, yardstick, of_oracle = ((r.double() - t).abs().max().item() for r in (x, y, o))
            largest = t.abs().max().item()
            limit = yardstick + torch.finfo(torch.float32).eps * largest
            assert error <= limit, f"result {i}: {error:.3e} against {yardstick:.3e} of plain torch"
            assert of_oracle <= 1e-10 * largest, f"result {i} of the oracle: {of_oracle:.3e}"


def divergences(log_p: Tensor, log_q: Tensor) -> dict[str, Tensor]:
    """Every divergence of a student p from a teacher q, by token."""
    p, q, log_m = log_p.exp(), log_q.exp(), torch.logaddexp(log_p, log_q) - math.log(2)
    return {
        "forward_kl": (q * (log_q - log_p)).sum(-1),
        "reverse_kl": (p * (log_p - log_q)).sum(-1),
        "jsd": (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1) / 2,
    }


def assert_same(ours: Results, theirs: Results) -> None:
    assert len(ours) == len(theirs)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def assert_no_sync(step: Callable[[], object]) -> None:
    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def saved_by(fn: Callable[[], object]) -> set[int]:
    """The addresses of the tensors that fn saves for its backward."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fn()
    return {x.data_ptr() for x in saved}


# Layouts: the same values elsewhere in memory, NaN around them


def _filled(shape: Sequence[int], x: Tensor) -> Tensor:
    return torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)


def _moved(x: Tensor, place: Tensor) -> Tensor:
    place.copy_(x.detach())
    return place.requires_grad_(x.requires_grad)


def contiguous(x: Tensor) -> Tensor:
    return _moved(x, _filled([x.numel() + 64], x)[32:-32].view(x.shape))


def column_slice(x: Tensor) -> Tensor:
    """One stride between the rows, as in a slice of a fused projection; not aligned to 16 bytes."""
    return _moved(x, _filled([*x.shape[:-1], 2 * x.shape[-1] + 3], x)[..., 1 : 1 + x.shape[-1]])


def every_second_row(x: Tensor) -> Tensor:
    return _moved(x, _filled([*x.shape[:-1], 2, x.shape[-1]], x)[..., 0, :])


def rows_of_two_strides(x: Tensor) -> Tensor:
    """The dims before the last do not collapse."""
    rows, tokens, C = x.shape
    return _moved(x, _filled([rows, tokens + 2, C], x)[:, 1:-1])


def transposed(x: Tensor) -> Tensor:
    """The last dim outermost in memory."""
    order = list(reversed(range(x.dim())))
    return _moved(x, _filled([x.shape[i] for i in order], x).permute(order))


def every_second_column(x: Tensor) -> Tensor:
    return _moved(x, _filled([*x.shape[:-1], 2 * x.shape[-1]], x)[..., ::2])


LAYOUTS = (contiguous, column_slice, every_second_row, rows_of_two_strides, transposed, every_second_column)


def far_rows(x: Tensor, start: int = 0) -> Tensor:
    """The rows of `[R, C]` so far apart that the last ones' offsets pass 2³¹."""
    stride = 2**31 // (x.shape[0] - 1) + 8
    buffer = large_buffer(stride * x.shape[0], x.dtype)
    return _moved(x, buffer.as_strided(x.shape, (stride, 1), start))


def large_buffer(n_elements: int, dtype: torch.dtype) -> Tensor:
    """Memory that the system provides only when it is written to."""
    if DEVICE == "cuda":
        return torch.empty(n_elements, dtype=dtype, device=DEVICE)
    return torch.frombuffer(mmap.mmap(-1, n_elements * dtype.itemsize), dtype=dtype)

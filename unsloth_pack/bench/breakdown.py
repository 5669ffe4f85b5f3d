"""Break a training step down by category, from the names in torch's profile.

On a GPU it counts kernels, including those replayed from a CUDA graph. A kernel that the loss or the
optimizer launches belongs to it; any other to the category of its name. On a CPU, an operator's own time
belongs to the outermost operator around it with a category.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch.autograd import DeviceType

from unsloth_pack import kernels

CATEGORIES = ("attention", "GEMMs", "fused kernels", "loss", "optimizer", "other")
HOST_GAPS = "host gaps"  # the rest of the step, when the device is idle

_OF_CALLER = (
    ("optimizer", re.compile(r"^Optimizer\.|clip_grad|_foreach_norm")),
    ("loss", re.compile(r"LogProb|TokenScores|CrossEntropy|cross_entropy|nll_loss")),
)
_OF_OPERATOR = (
    *_OF_CALLER,
    ("attention", re.compile(r"scaled_dot_product|ScaledDotProduct|_attention_|varlen_attn|flash_attn")),
    ("GEMMs", re.compile(r"^aten::(linear|matmul|mm|bmm|addmm_?|baddbmm|_scaled_mm|_grouped_mm)$")),
)
_OF_KERNEL = (
    ("attention", re.compile(r"flash|fmha|sdpa|attention|^(forward|q_gradient|kv_gradient)_kernel", re.I)),
    ("loss", re.compile(r"cross_entropy|nll_loss|log_?softmax|logprob", re.I)),
    ("loss", re.compile(r"^(_forward|_backward|score|score_gradient)_kernel")),  # TRL's, and ours
    ("optimizer", re.compile(r"adam|lamb|lion|sgd|LpNorm", re.I)),
    ("GEMMs", re.compile(r"gemm|gemv|cutlass|nvjet|cublas|xmma|splitk", re.I)),
)


def break_down(events: Iterable[Any], steps: int, on_gpu: bool) -> tuple[dict[str, float], float]:
    """Sort the time of profiled steps into categories.

    Args:
        events: of a stopped profile.

    Returns:
        Milliseconds of a step by category, all of `CATEGORIES`; and those with any activity, which are less
        than their sum if kernels overlap.
    """
    times: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in events:
        if not on_gpu:
            times[_first_match(_OF_OPERATOR, _callers(event)) or "other"] += event.self_cpu_time_total
        elif event.device_type == DeviceType.CPU:
            caller = _first_match(_OF_CALLER, _callers(event)) if event.kernels else None
            for kernel in event.kernels if caller is not None else ():
                times[str(caller)] += kernel.duration
                times[kernel_category(kernel.name)] -= kernel.duration  # the branch below adds it
        elif not event.is_user_annotation:
            times[kernel_category(event.name)] += event.time_range.elapsed_us()
            spans.append((event.time_range.start, event.time_range.end))
    busy = _union(spans) if on_gpu else sum(times.values())
    return {name: times[name] / steps / 1e3 for name in CATEGORIES}, busy / steps / 1e3


def kernel_category(name: str) -> str:
    """Return the category of a GPU kernel."""
    return "fused kernels" if name in _FUSED else _first_match(_OF_KERNEL, [name]) or "other"


def _callers(event: Any) -> list[str]:
    """List the names of an operator and of all operators around it, the outermost first."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names[::-1]


def _first_match(rules: Sequence[tuple[str, re.Pattern[str]]], names: Sequence[str]) -> str | None:
    matches = (category for name in names for category, pattern in rules if pattern.search(name))
    return next(matches, None)


def _union(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _fused_kernels() -> Iterator[str]:
    """List this package's Triton kernels by the profiler's names, without those that `_OF_KERNEL` sorts."""
    for module in iter_modules(kernels.__path__, f"{kernels.__name__}."):
        if not module.name.endswith((".attention", ".attention_kernels", ".token_scores")):
            yield from (name for name in vars(import_module(module.name)) if name.endswith("_kernel"))


_FUSED = frozenset(_fused_kernels())

"""Chunks of logits for the kernels over a language model's head: only rows with a label, one chunk at a time.

A chunk's logits are one GEMM into a buffer that all chunks share, so the T x V logits of all rows never
exist. An adapter adds h bᵀ to the logits; trained tokens replace the logits of a few outputs by h. h has few
columns, so its gradients are computed chunk by chunk, without a gradient of the size of the head's weight.

Shapes: T tokens, N of them with a label, L of a chunk, C features, R columns of h, V outputs of the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.host_copy import HostCopy
from unsloth_pack.kernels.launch import (
    MAX_WARPS,
    PER_THREAD,
    add_product,
    floor_power_of_2,
    jit,
    multiply,
    tl,
    triton,
)


class ExtraLogits(NamedTuple):
    """Change the logits by h, with either `b` or `outputs`.

    Args:
        h: `[..., R]`, a row for each of hidden's. Gets a gradient if it requires one.
        b: `[V, R]`: h bᵀ is added to the logits. Gets a gradient if it requires one, summed in float32.
        outputs: `[R]` int64, all different: h replaces the logits of these outputs. Weight and bias do not
            count there and get no gradient from there.
    """

    h: Tensor
    b: Tensor | None = None
    outputs: Tensor | None = None

    def check(self, hidden: Tensor, weight: Tensor) -> None:
        """Raise ValueError unless they fit the head."""
        (V, _), R = weight.shape, self.h.shape[-1]
        if (self.b is None) == (self.outputs is None):
            raise ValueError("extra has both b and outputs, or neither: pass one of them")
        if self.h.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(f"extra.h {[*self.h.shape]}, hidden {[*hidden.shape]}: pass one row a row")
        if self.b is not None and self.b.shape != (V, R):
            raise ValueError(f"extra.b {[*self.b.shape]}, extra.h {[*self.h.shape]}: pass [{V}, {R}]")
        if self.outputs is not None and (self.outputs.shape != (R,) or self.outputs.dtype != torch.int64):
            shape, dtype = [*self.outputs.shape], self.outputs.dtype
            raise ValueError(f"extra.outputs {shape} of {dtype}: pass [{R}] of torch.int64")
        for name, x in zip(self._fields, self, strict=True):
            if x is not None and x.device != hidden.device:
                raise ValueError(
                    f"hidden is on {hidden.device} but extra.{name} on {x.device}: move it there"
                )
            if x is not None and name != "outputs" and x.dtype != hidden.dtype:
                raise ValueError(f"hidden is {hidden.dtype} and extra.{name} {x.dtype}: cast both to one")


class ExtraRows:
    """The labelled rows of one call's `ExtraLogits`, and their gradients.

    Args:
        h, b, outputs: of `ExtraLogits`; an h of None changes nothing.
        rows: `[N]`.
        needed: whether h and b get gradients.

    Attributes:
        g_h: `[N, R]`, wide, or None where it is not needed.
        g_b: `[V, R]`, likewise.
    """

    def __init__(
        self, h: Tensor | None, b: Tensor | None, outputs: Tensor | None, rows: Tensor, needed: Sequence[bool]
    ):
        self.g_h: Tensor | None = None
        self.g_b: Tensor | None = None
        self._b, self._outputs = b, outputs
        if h is None:
            return
        self._h_NR = h.reshape(-1, h.shape[-1]).index_select(0, rows)
        wide = torch.promote_types(h.dtype, torch.float32)
        if needed[0]:
            self.g_h = torch.empty_like(self._h_NR, dtype=wide)
        if needed[1] and b is not None:
            self.g_b = torch.zeros_like(b, dtype=wide)

    def apply_to(self, logits_LV: Tensor, chunk: slice) -> Tensor:
        """Change a chunk's logits in place and return them."""
        if self._b is not None:
            return logits_LV.addmm_(self._h_NR[chunk], self._b.t())
        if self._outputs is not None:
            return logits_LV.index_copy_(1, self._outputs, self._h_NR[chunk])
        return logits_LV

    def collect_gradients(self, g_LV: Tensor, chunk: slice) -> None:
        """Add up a chunk's gradients of h and b. What stays in g_LV is the head's part."""
        if self._b is not None:
            if self.g_h is not None:
                multiply(g_LV, self._b, self.g_h[chunk])
            if self.g_b is not None:
                add_product(g_LV.t(), self._h_NR[chunk], self.g_b)
        elif self._outputs is not None:
            if self.g_h is not None:
                self.g_h[chunk] = g_LV.index_select(1, self._outputs)
            g_LV.index_fill_(1, self._outputs, 0)


IGNORE_INDEX = -100

_CHUNK_BYTES = 2**28  # of logits at a time, unless _MIN_ROWS take more
_MIN_ROWS = 1024  # on a GPU, where a GEMM of fewer rows is slow
_STEP = 128  # rows of a chunk are a multiple of this, for fast GEMMs
_BLOCK = 8192  # logits that a program holds at a time


class LabelledRows:
    """The rows with a label, located on the device.

    The host needs their number. Create this before the decoder runs and the number arrives meanwhile, see
    `HostCopy`; created by the loss, it waits for the decoder.

    Args:
        labels: int32 or int64, any shape; row i's label is the i-th, already shifted.
        ignore_index: the value that means no label.
    """

    def __init__(self, labels: Tensor, ignore_index: int = IGNORE_INDEX):
        self.labels = labels
        has_label = labels.reshape(-1) != ignore_index
        self._order = has_label.logical_not().argsort(stable=True)
        self._count = HostCopy(has_label.sum())

    @cached_property
    def count(self) -> int:
        """Return N; waits for the device."""
        return int(self._count.read())

    @property
    def rows(self) -> Tensor:
        """Return the rows `[N]`, int64, ascending."""
        return self._order[: self.count]


def max_chunk_rows(V: int, like: Tensor) -> int:
    """Return the rows of logits that fit into the budget."""
    fit = _CHUNK_BYTES // (V * like.element_size())
    return max(_MIN_ROWS if like.is_cuda else _STEP, fit - fit % _STEP)


def split_evenly(N: int, most: int) -> Iterator[slice]:
    """Split N rows into as few chunks of at most `most` as possible, with no small one at the end."""
    size = -(-N // max(1, -(-N // most)))
    size = max(1, -(-size // _STEP)) * _STEP
    return (slice(start, min(start + size, N)) for start in range(0, N, size))


def prepare_head_inputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor | LabelledRows,
    softcap: float | None,
    extra: ExtraLogits | None,
) -> tuple[Tensor, Tensor, Tensor | None, ExtraLogits | None, LabelledRows]:
    """Check hidden, weight, bias, extra and labels, and cast them as autocast does."""
    device = hidden.device.type
    hidden, weight = _as_autocast(hidden, device), _as_autocast(weight, device)
    bias = None if bias is None else _as_autocast(bias, device)
    labelled = labels if isinstance(labels, LabelledRows) else LabelledRows(labels)
    check_head(hidden, weight, labelled, bias, softcap)
    if extra is not None:
        own_b = None if extra.b is None else _as_autocast(extra.b, device)
        extra = extra._replace(h=_as_autocast(extra.h, device), b=own_b)
        extra.check(hidden, weight)
    return hidden, weight, bias, extra, labelled


def _as_autocast(x: Tensor, device: str) -> Tensor:
    """Cast x as autocast does for a GEMM, if it is on; float64 stays."""
    casts = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


def project_to_logits(x_LC: Tensor, weight: Tensor, bias: Tensor | None, buffer_LV: Tensor) -> Tensor:
    """Compute logits `[L, V]` into the first rows of the buffer."""
    logits_LV = buffer_LV[: len(x_LC)]
    if bias is None:
        return torch.mm(x_LC, weight.t(), out=logits_LV)
    return torch.addmm(bias, x_LC, weight.t(), out=logits_LV)


def scatter_rows(x_NX: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `[*shape, X]` with 0 in the rows without a label."""
    X = x_NX.shape[-1]
    return x_NX.new_zeros((math.prod(shape), X)).index_copy_(0, rows, x_NX).view(*shape, X)


def scale_and_cap(logits: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """Return z in float32 or better, and dz/dl, in plain torch. Logits of that dtype are overwritten."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(scale)
    if softcap is None:
        return z, scale
    z.div_(softcap).tanh_()
    slope = (1 - z.square()).mul_(scale)
    return z.mul_(softcap), slope


def block_and_warps(V: int) -> tuple[int, int]:
    """Choose the logits that a program holds at a time, and its warps."""
    block = min(_BLOCK, triton.next_power_of_2(V))
    return block, min(MAX_WARPS, floor_power_of_2(block // (32 * PER_THREAD)))


def check_head(hidden: Tensor, weight: Tensor, labelled: LabelledRows, bias: Tensor | None, softcap) -> None:
    """Raise ValueError (InputError for labels) unless the arguments fit together.

    Label values are checked on a CPU only: on a GPU that would wait for the device.
    """
    labels = labelled.labels
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or not weight.numel():
        raise ValueError(f"hidden {[*hidden.shape]} and weight {[*weight.shape]}: pass [.., C] and [V, C]")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {[*labels.shape]}, hidden {[*hidden.shape]}: pass one label a row")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {[*bias.shape]}, weight {[*weight.shape]}: pass one number an output")
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels are {labels.dtype}: cast them to int64")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and (x.dtype != hidden.dtype or not x.is_floating_point()):
            raise ValueError(
                f"hidden is {hidden.dtype} and {name} {x.dtype}: cast both to one floating dtype"
            )
    for name, x in (("weight", weight), ("bias", bias), ("labels", labels)):
        if x is not None and x.device != hidden.device:
            raise ValueError(f"hidden is on {hidden.device} but {name} on {x.device}: move it there")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}: pass a positive one, or None")
    if labels.device.type == "cpu" and labelled.count:
        low, high = labels.reshape(-1)[labelled.rows].aminmax()
        if low < 0 or high >= len(weight):
            span = f"labels reach from {low} to {high}, the head has {len(weight)} outputs"
            raise InputError(f"{span}; give smaller ids, or -100 for none")


@jit
def load_block(start, first, V, BLOCK: tl.constexpr):
    column_B = first + tl.arange(0, BLOCK)
    return tl.load(start + column_B, mask=column_B < V, other=0.0).to(tl.float32), column_B < V


@jit
def logit_and_slope(x, scale, softcap, CAPPED: tl.constexpr):
    """Return z of logits x, and dz/dx."""
    if CAPPED:
        u = x * (scale / softcap)
        e = tl.exp(-2 * tl.abs(u))
        r = 1 / (1 + e)
        far = (1 - e) * r
        far = tl.where(u < 0, -far, far)
        u2 = u * u  # near 0 the difference cancels: tanh's series
        near = u * (1 + u2 * (-1 / 3 + u2 * (2 / 15 + u2 * (-17 / 315 + u2 * (62 / 2835)))))
        return softcap * tl.where(tl.abs(u) < 0.25, near, far), scale * (4 * e * r * r)
    else:
        return x * scale, scale

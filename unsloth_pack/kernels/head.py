"""What the kernels over a language model's head share: the rows that have a label, in chunks of logits.

The logits of all rows would be T x V numbers. A chunk's logits are one GEMM into a buffer that all chunks
share, so that only those of one chunk exist at a time.

Shapes: T tokens, N of them with a label, L of a chunk, C features, V outputs of the head.
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

# Logits that a small matrix makes beside those of a head's weight: of an adapter, or of trained tokens.
#
# An adapter adds h Bᵀ to the logits. Trained tokens replace the logits of a few outputs by h. Both times h
# has
# few columns, so their gradients are made chunk by chunk, and none of the size of the head's weight is
# needed.
#
# Shapes: T tokens, N of them with a label, L of a chunk, R columns of h, V outputs of the head.


class ExtraLogits(NamedTuple):
    """What h changes in the logits: either `b` or `outputs` is given.

    Args:
        h: `[..., R]`, a row for each of hidden's. Gets a gradient if it requires one.
        b: `[V, R]`: h bᵀ is added to the logits. Gets a gradient if it requires one, summed in float32.
        outputs: `[R]` int64, all different: the logits of these outputs are h. Neither weight nor bias
            counts there, and they get no gradient from there.
    """

    h: Tensor
    b: Tensor | None = None
    outputs: Tensor | None = None

    def check(self, hidden: Tensor, weight: Tensor) -> None:
        """Raise ValueError unless they fit to a head."""
        (V, _), R = weight.shape, self.h.shape[-1]
        if (self.b is None) == (self.outputs is None):
            raise ValueError("extra has both b and outputs, or neither: pass one of them")
        if self.h.shape[:-1] != hidden.shape[:-1]:
            raise ValueError(f"extra.h {[*self.h.shape]}, hidden {[*hidden.shape]}: pass one row a row")
        if self.b is not None and self.b.shape != (V, R):
            raise ValueError(f"extra.b {[*self.b.shape]}, extra.h {[*self.h.shape]}: pass [{V}, {R}]")
        if self.outputs is not None and (self.outputs.shape != (R,) or self.outputs.dtype != torch.int64):
            raise ValueError(
                f"extra.outputs {[*self.outputs.shape]} of {self.outputs.dtype}: pass [{R}] of torch.int64"
            )
        for name, x in (("h", self.h), ("b", self.b)):
            if x is not None and x.dtype != hidden.dtype:
                raise ValueError(f"hidden is {hidden.dtype} and extra.{name} {x.dtype}: cast both to one")
        for name, x in (("h", self.h), ("b", self.b), ("outputs", self.outputs)):
            if x is not None and x.device != hidden.device:
                raise ValueError(
                    f"hidden is on {hidden.device} but extra.{name} on {x.device}: move it there"
                )


class ExtraRows:
    """The rows of `ExtraLogits` that have a label, and the sums of their gradients.

    Args:
        extra: of one call; None changes nothing.
        rows: `[N]`.
        needed: whether h and b get gradients.

    Attributes:
        g_h: `[N, R]`, wide, or None where it is not needed.
        g_b: `[V, R]`, likewise.
    """

    def __init__(self, extra: ExtraLogits | None, rows: Tensor, needed: tuple[bool, bool]):
        self.g_h: Tensor | None = None
        self.g_b: Tensor | None = None
        self._extra = extra
        if extra is None:
            return
        self._h_NR = extra.h.reshape(-1, extra.h.shape[-1]).index_select(0, rows)
        wide = torch.promote_types(extra.h.dtype, torch.float32)
        if needed[0]:
            self.g_h = torch.empty_like(self._h_NR, dtype=wide)
        if needed[1] and extra.b is not None:
            self.g_b = torch.zeros_like(extra.b, dtype=wide)

    def put_into(self, logits_LV: Tensor, chunk: slice) -> Tensor:
        """Change the logits of a chunk, and return them."""
        if self._extra is None:
            return logits_LV
        _, b, outputs = self._extra
        if b is not None:
            return logits_LV.addmm_(self._h_NR[chunk], b.t())
        assert outputs is not None  # `check` has made sure
        return logits_LV.index_copy_(1, outputs, self._h_NR[chunk])

    def take_from(self, g_LV: Tensor, chunk: slice) -> Tensor:
        """Note the gradients that those of a chunk's logits make, and return what is left for the head."""
        if self._extra is None:
            return g_LV
        _, b, outputs = self._extra
        if b is not None:
            if self.g_h is not None:
                multiply(g_LV, b, self.g_h[chunk])
            if self.g_b is not None:
                add_product(g_LV.t(), self._h_NR[chunk], self.g_b)
            return g_LV
        assert outputs is not None
        if self.g_h is not None:
            self.g_h[chunk] = g_LV.index_select(1, outputs)
        return g_LV.index_fill_(1, outputs, 0)


IGNORE_INDEX = -100

_CHUNK_BYTES = 2**28  # of logits that exist at a time, or these rows if they take more
_LEAST_ROWS = 1024  # on a GPU, where a GEMM of fewer is far from the device's best
_STEP = 128  # rows of a chunk are a multiple of this, as GEMMs like them
_BLOCK = 8192  # logits that a program holds at a time


class LabelledRows:
    """Which rows carry a label, found on the device without waiting for it.

    Skipping the others needs their number on the host. Made before the decoder runs, this asks for it then,
    see `HostCopy`; made by the loss itself, it waits for all before it.

    Args:
        labels: int32 or int64, any shape; row i's label is the i-th, already shifted.
        ignore_index: what stands for no label.
    """

    def __init__(self, labels: Tensor, ignore_index: int = IGNORE_INDEX):
        self.labels = labels
        has_label = labels.reshape(-1) != ignore_index
        self._order = has_label.logical_not().argsort(stable=True)
        self._count = HostCopy(has_label.sum())

    @cached_property
    def count(self) -> int:
        """N, once the device has counted."""
        return int(self._count.read())

    @property
    def rows(self) -> Tensor:
        """`[N]` int64, ascending."""
        return self._order[: self.count]


def most_rows(V: int, like: Tensor) -> int:
    """Rows of logits that the budget holds."""
    fit = _CHUNK_BYTES // (V * like.element_size())
    return max(_LEAST_ROWS if like.is_cuda else _STEP, fit - fit % _STEP)


def even_chunks(N: int, most: int) -> Iterator[slice]:
    """As few chunks as can be, with no small one at the end."""
    size = -(-N // max(1, -(-N // most)))
    size = max(1, -(-size // _STEP)) * _STEP
    return (slice(start, min(start + size, N)) for start in range(0, N, size))


def as_head_inputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor | LabelledRows,
    softcap: float | None,
    extra: ExtraLogits | None,
) -> tuple[Tensor, Tensor, Tensor | None, ExtraLogits | None, LabelledRows]:
    """hidden, weight, bias and extra, cast as autocast casts them, and the rows with a label, all checked."""
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
    """x as autocast, if it is on, casts it for a GEMM: float64 stays."""
    casts = torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


def project_to_logits(x_LC: Tensor, weight: Tensor, bias: Tensor | None, buffer_LV: Tensor) -> Tensor:
    """`[L, V]` in the first rows of the buffer."""
    logits_LV = buffer_LV[: len(x_LC)]
    if bias is None:
        return torch.mm(x_LC, weight.t(), out=logits_LV)
    return torch.addmm(bias, x_LC, weight.t(), out=logits_LV)


def spread(x_NX: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """`[*shape, X]` with 0 in the rows that have no label."""
    spread_X = x_NX.new_zeros((*shape, x_NX.shape[-1]))
    spread_X.view(-1, x_NX.shape[-1]).index_copy_(0, rows, x_NX)
    return spread_X


def plain_logits(logits: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | float]:
    """z in float32 or better, and dz/dl, in plain torch; z takes the place of logits of its own dtype."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(scale)
    if softcap is None:
        return z, scale
    z.div_(softcap).tanh_()
    slope = (1 - z.square()).mul_(scale)
    return z.mul_(softcap), slope


def block_and_warps(V: int) -> tuple[int, int]:
    """Logits that a program holds at a time, and its warps."""
    block = min(_BLOCK, triton.next_power_of_2(V))
    return block, min(MAX_WARPS, floor_power_of_2(block // (32 * PER_THREAD)))


def check_head(hidden: Tensor, weight: Tensor, labelled: LabelledRows, bias: Tensor | None, softcap) -> None:
    """Raise ValueError (InputError for labels) unless the arguments fit together.

    Label values are looked at on a CPU only: on a GPU that would wait for it.
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
            raise InputError(
                f"labels reach from {low} to {high}, the head has {len(weight)} outputs; give smaller ids, "
                "or -100 for none"
            )


@jit
def load_block(start, first, V, BLOCK: tl.constexpr):
    column_B = first + tl.arange(0, BLOCK)
    return tl.load(start + column_B, mask=column_B < V, other=0.0).to(tl.float32), column_B < V


@jit
def logit_and_slope(x, scale, softcap, CAPPED: tl.constexpr):
    """z of logits x, and dz/dx."""
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

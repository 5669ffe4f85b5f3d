"""Logits that a small matrix makes beside those of a head's weight: of an adapter, or of trained tokens.

An adapter adds h Bᵀ to the logits. Trained tokens replace the logits of a few outputs by h. Both times h has
few columns, so their gradients are made chunk by chunk, and none of the size of the head's weight is needed.

Shapes: T tokens, N of them with a label, L of a chunk, R columns of h, V outputs of the head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .products import add_product, multiply


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

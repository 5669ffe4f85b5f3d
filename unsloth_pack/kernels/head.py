"""Hidden states through a language model's head, without its T x V logits.

For each row x of hidden, l = W x + b, and z = softcap * tanh(scale * l / softcap), or scale * l without one.
With the gradient gl of l:

    gx = Wᵀ gl,  gW = Σ gl xᵀ,  gb = Σ gl

Only rows with a label count, and one chunk of them at a time: a chunk's logits are one GEMM into a buffer
that all chunks share. A kernel reads them and overwrites them by gl; one or two more GEMMs turn gl into
gradients.

An adapter adds h bᵀ to the logits; trained tokens replace the logits of a few outputs by h. h has few
columns, so its gradients need no gradient of the size of the head's weight.

Shapes: T tokens, N of them with a label, L of a chunk, C features, R columns of h, V outputs of the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.kernels.arguments import ExtraLogits, Field, TokenScores, TopLogProbs
from unsloth_pack.kernels.launch import (
    HostCopy,
    add_product,
    check_dtypes,
    check_shapes,
    jit,
    multiply,
    tl,
    wide_dtype,
)

IGNORE_INDEX = -100

_CHUNK_BYTES = 2**28  # of logits at a time, unless _MIN_ROWS take more
_MIN_ROWS = 1024  # on a GPU, where a GEMM of fewer rows is slow
_STEP = 128  # rows of a chunk are a multiple of this, for fast GEMMs


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


Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Options = tuple[float, float | None]  # scale and softcap


def prepare_head_inputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor | LabelledRows,
    softcap: float | None,
    extra: ExtraLogits | None,
) -> tuple[Inputs, LabelledRows]:
    """Return hidden, weight, bias, h, b and outputs as autocast casts them, and the labelled rows.

    Label values are checked on a CPU only: on a GPU that would wait for the device.
    """
    h, b, outputs = (None, None, None) if extra is None else extra
    device = hidden.device.type
    hidden, weight = _as_autocast(hidden, device), _as_autocast(weight, device)
    bias, h, b = (x if x is None else _as_autocast(x, device) for x in (bias, h, b))
    labelled = labels if isinstance(labels, LabelledRows) else LabelledRows(labels)
    labels = labelled.labels
    shapes = dict(hidden=("*C", hidden), weight=("VC", weight), bias=("V", bias), labels=("*", labels))
    check_shapes(**shapes, h=("*R", h), b=("VR", b), outputs=("R", outputs))
    check_dtypes(hidden=hidden, weight=weight, bias=bias, h=h, b=b)
    if labels.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"labels are {labels.dtype}: cast them to int64")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}: pass a positive one, or None")
    if labels.device.type == "cpu" and labelled.count:
        low, high = labels.reshape(-1)[labelled.rows].aminmax()
        if low < 0 or high >= len(weight):
            span = f"labels reach from {low} to {high}, the head has {len(weight)} outputs"
            raise InputError(f"{span}; give smaller ids, or -100 for none")
    return (hidden, weight, bias, h, b, outputs), labelled


def _as_autocast(x: Tensor, device: str) -> Tensor:
    """Cast x as autocast does for a GEMM, if it is on; float64 stays."""
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


def max_chunk_rows(n_outputs: int, logits: torch.dtype, hidden: torch.dtype, is_cuda: bool = True) -> int:
    """Return how many rows of logits exist at a time, of a head with `n_outputs`."""
    fit = _CHUNK_BYTES // (n_outputs * logits.itemsize)
    least = min(_MIN_ROWS, _MIN_ROWS * hidden.itemsize // logits.itemsize)
    return max(least if is_cuda else _STEP, fit - fit % _STEP)


class HeadPass:
    """The labelled rows of one call through the head, chunk by chunk, and gradients of its inputs.

    Args:
        inputs: hidden, weight, bias, h, b and outputs.
        needed: whether hidden, weight, bias, h and b get gradients.
        is_wide: whether logits are float32 (float64 for float64); else they are of hidden's dtype.

    Attributes:
        gradients: of those five, wide, of hidden and h in the labelled rows alone; None if not needed.
    """

    def __init__(
        self,
        inputs: Inputs,
        labelled: LabelledRows,
        needed: Sequence[bool],
        options: Options,
        is_wide: bool = False,
    ):
        hidden, self._weight, self._bias, h, self._b, self._outputs = inputs
        self._rows, self._options = labelled.rows, options
        self._labels_N = labelled.labels.reshape(-1).index_select(0, self._rows)
        self._hidden_TC = hidden.reshape(-1, hidden.shape[-1])
        wide, (V, C), N = wide_dtype(hidden), self._weight.shape, labelled.count
        self._logits_dtype = wide if is_wide else hidden.dtype
        shapes = [(N, C), (V, C), (V,)]
        if h is not None:
            self._h_NR = h.reshape(-1, h.shape[-1]).index_select(0, self._rows)
            shapes += [(N, h.shape[-1]), (V, h.shape[-1])]
        self.gradients: list[Tensor | None] = [None] * 5
        for i, shape in enumerate(shapes):
            if needed[i]:  # rows are written, the others summed up
                allocate = hidden.new_empty if i in (0, 3) else hidden.new_zeros
                self.gradients[i] = allocate(shape, dtype=wide)

    def run(
        self,
        turn: Callable[[Tensor, Tensor, slice], Tensor | None],
        log_probs_N: Tensor | None = None,
    ) -> None:
        """Compute each chunk's logits and let `turn` compute their gradient.

        Args:
            turn: called with logits `[L, V]`, labels `[L]` and the chunk. Returns their gradient in hidden's
                dtype, or None if it has overwritten the logits.
            log_probs_N: written by `turn`, if their sum is what gets the gradient.
        """
        V, N, g_h = len(self._weight), len(self._rows), self.gradients[3]
        most = max_chunk_rows(V, self._logits_dtype, self._hidden_TC.dtype, self._hidden_TC.is_cuda)
        # Sized by T, not N: PyTorch reuses the memory of a size that recurs every step.
        buffer_LV = self._hidden_TC.new_empty((min(most, len(self._hidden_TC)), V), dtype=self._logits_dtype)
        # As few chunks as possible, with no small one at the end
        size = max(1, -(-N // (_STEP * max(1, -(-N // most))))) * _STEP
        with torch.autocast(buffer_LV.device.type, enabled=False):
            for start in range(0, N, size):
                chunk = slice(start, min(start + size, N))
                logits_LV, x_LC = self.compute_logits(buffer_LV, chunk)
                labels_L = self._labels_N[chunk]
                label_logits_L1 = None
                if self._outputs is not None and g_h is not None and log_probs_N is not None:
                    label_logits_L1 = logits_LV.gather(1, labels_L.long().clamp(0, V - 1)[:, None])
                g_LV = turn(logits_LV, labels_L, chunk)
                if any(g is not None for g in self.gradients):
                    self._add_gradients(logits_LV if g_LV is None else g_LV, x_LC, chunk)
                if label_logits_L1 is not None and g_h is not None and log_probs_N is not None:
                    g_h[chunk] = self._gradient_of_outputs(label_logits_L1, log_probs_N[chunk, None], chunk)

    def compute_logits(self, buffer_LV: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """Compute logits `[L, V]` into the buffer; return them and the rows `[L, C]` of hidden."""
        x_LC = self._hidden_TC.index_select(0, self._rows[chunk])
        logits_LV = buffer_LV[: len(x_LC)]
        if self._bias is None or logits_LV.dtype != x_LC.dtype:
            multiply(x_LC, self._weight.t(), logits_LV)
            if self._bias is not None:
                logits_LV += self._bias
        else:
            torch.addmm(self._bias, x_LC, self._weight.t(), out=logits_LV)
        if self._b is not None:
            add_product(self._h_NR[chunk], self._b.t(), logits_LV)
        if self._outputs is not None:
            logits_LV.index_copy_(1, self._outputs, self._h_NR[chunk].to(logits_LV.dtype))
        return logits_LV, x_LC

    def _add_gradients(self, g_LV: Tensor, x_LC: Tensor, chunk: slice) -> None:
        g_hidden, g_weight, g_bias, g_h, g_b = self.gradients
        if self._b is not None:
            if g_h is not None:
                multiply(g_LV, self._b, g_h[chunk])
            if g_b is not None:
                add_product(g_LV.t(), self._h_NR[chunk], g_b)
        elif self._outputs is not None:
            if g_h is not None:
                g_h[chunk] = g_LV.index_select(1, self._outputs)
            g_LV.index_fill_(1, self._outputs, 0)
        if g_hidden is not None:
            multiply(g_LV, self._weight, g_hidden[chunk])
        if g_weight is not None:
            add_product(g_LV.t(), x_LC, g_weight)
        if g_bias is not None:
            g_bias += g_LV.sum(0, dtype=g_bias.dtype)

    def _gradient_of_outputs(self, label_logits_L1: Tensor, log_probs_L1: Tensor, chunk: slice) -> Tensor:
        """Compute d log_prob / dh; that in the logits' dtype would be rounded again once it is weighed."""
        assert self._outputs is not None
        scale, softcap = self._options
        h_LR = self._h_NR[chunk].to(log_probs_L1.dtype)
        z_label_L1, z_LR = (scale_and_cap(x, *self._options) for x in (label_logits_L1, h_LR))
        slope_LR = scale if softcap is None else scale / (scale / softcap * h_LR).cosh().square()
        is_label_LR = torch.eq(self._labels_N[chunk, None], self._outputs)
        return (is_label_LR.to(z_LR.dtype) - (z_LR - z_label_L1 + log_probs_L1).exp()) * slope_LR


def spread_gradients(
    gradients: Sequence[Tensor | None], rows: Tensor, shape: Sequence[int]
) -> list[Tensor | None]:
    """Put those of hidden and h back to their tokens, `[*shape, X]`; 0 in rows without a label."""
    spread = list(gradients)
    for i in (0, 3):
        if (x_NX := spread[i]) is not None:
            width = x_NX.shape[-1]
            total = x_NX.new_zeros((math.prod(shape), width))
            spread[i] = total.index_copy_(0, rows, x_NX).view(*shape, width)
    return spread


def scale_gradients(ctx: Any, g: Tensor) -> list[Tensor | None]:
    """Return the gradients of a node that saved the rows and a pass's `gradients`, times g `[]`."""
    rows, *gradients = ctx.saved_tensors
    if not len(rows):
        g = torch.zeros_like(g)  # infinite for the mean over no row
    gradients = [scale_rounded_once(x, g.view(1), ctx.dtype) for x in gradients]
    return spread_gradients(gradients, rows, ctx.shape)


def scale_rounded_once(x: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Compute x * factor in `dtype`. x stays: the backward may run again."""
    return None if x is None else torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def scale_and_cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return scale * logits in float32 or wider; softcap * tanh(scale * logits / softcap) with a softcap."""
    z = scale * logits.to(wide_dtype(logits))
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def score(z: Tensor, labels: Tensor, fields: Collection[Field]) -> TokenScores:
    """Score labels `[...]` under logits `[..., V]`."""
    log_p = z.log_softmax(-1)
    has_no_label = labels == -100
    scores = {"log_prob": log_p.gather(-1, labels.clamp(min=0).long()[..., None])[..., 0]}
    if "entropy" in fields:  # 0 * -inf would be NaN
        scores["entropy"] = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
    if "is_top1" in fields:
        scores["is_top1"] = z.argmax(-1) == labels
    if "mean_logit" in fields:
        scores["mean_logit"] = z.mean(-1)
    if "log_sum_sq_probs" in fields:
        scores["log_sum_sq_probs"] = (2 * log_p).logsumexp(-1)
    return TokenScores(**{name: x.masked_fill(has_no_label, 0) for name, x in scores.items()})


def expect(weights: Tensor, values: Tensor) -> Tensor:
    """Sum weights * values over the last dimension; values may be infinite where weights are 0."""
    return torch.where(weights > 0, weights * values, 0).sum(-1)


def complete_teacher(z: Tensor, stored: TopLogProbs) -> Tensor:
    """Return log-probabilities `[.., V]`: the stored ones, and the rest as spread by logits z `[.., V]`."""
    ids, log_q = stored.ids.long(), stored.log_probs.to(z.dtype)
    rest = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).eps)
    others = z.scatter(-1, ids, -math.inf)
    return (others - others.logsumexp(-1, keepdim=True) + rest.log()).scatter_(-1, ids, log_q)


def score_plainly(
    logits: Tensor,
    labels: Tensor,
    options: Options,
    fields: Collection[Field],
    upstream: Sequence[Tensor | None],
) -> TokenScores:
    """Score logits `[L, V]` in plain torch. In place: logits -> their gradient, if any upstream is there.

    upstream: the gradients `[L]` of log_prob and entropy, or None.
    """
    needs_grad = any(g is not None for g in upstream)
    leaf = logits.detach().requires_grad_(needs_grad)
    with torch.set_grad_enabled(needs_grad):
        scores = score(scale_and_cap(leaf, *options), labels, fields)
    if needs_grad:
        pairs = [(x, g) for x, g in zip(scores, upstream, strict=False) if x is not None and g is not None]
        (g_logits,) = torch.autograd.grad([x for x, _ in pairs], leaf, [g for _, g in pairs])
        logits.copy_(g_logits)
    return scores


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

"""The kernels' oracles against formulas written another way, in float64. No kernel runs.

In float64 an oracle is the formula to 1e-12. In float32 and bfloat16 it computes in float32 and rounds once:
its results and gradients are within a rounding of the formula's in float64, of the inputs as rounded.
"""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from unsloth_pack.kernels import (
    ExtraLogits,
    QKNorm,
    TokenScores,
    reference,
)

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
EPS = 1e-6
all_dtypes = pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)


def draw(*shape: int, dtype=FP64) -> Tensor:
    """A leaf whose values bfloat16 holds too, so that all dtypes see the same numbers."""
    return torch.randn(shape).bfloat16().to(dtype).requires_grad_()


def agree(oracle, formula, leaves: list[Tensor], dtype: torch.dtype) -> None:
    """Of both the results, and the gradients of a weighted sum of all floating results."""
    ours, exact = ([x.detach().to(d).requires_grad_() for x in leaves] for d in (dtype, FP64))
    got, true = ([*f(*args)] for f, args in ((oracle, ours), (formula, exact)))
    assert len(got) == len(true)
    weights = [torch.randn(x.shape).to(FP64) for x in true]
    for outs, tensors in ((got, ours), (true, exact)):
        total = sum((w * x.double()).sum() for w, x in zip(weights, outs, strict=True))
        outs += torch.autograd.grad(total, tensors)
    # a result is rounded once; a gradient in bfloat16 as often as autograd adds to it
    tolerance = {FP64: 1e-12, FP32: 3e-6, BF16: 2**-7}[dtype]
    for number, (x, t) in enumerate(zip(got, true, strict=True)):
        assert x.shape == t.shape
        assert (x.double() - t).norm() <= tolerance * (t.norm() + 1), f"result {number}"


# Norms, rotations and activations


@all_dtypes
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(offset, dtype):
    def normed(x, w):
        return x / (x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * (offset + w)

    leaves = [draw(3, 5, 14), draw(14)]
    agree(lambda x, w: [reference.rms_norm(x, w, EPS, offset)], lambda x, w: [normed(x, w)], leaves, dtype)
    leaves = [draw(5, 14), draw(5, 14), draw(14)]
    if dtype != BF16:  # where the sum rounds before it is normed
        agree(
            lambda x, y, w: reference.add_rms_norm(x, y, w, EPS, offset),
            lambda x, y, w: [x + y, normed(x + y, w)],
            leaves,
            dtype,
        )
    total, out = reference.add_rms_norm(leaves[0], None, leaves[2], EPS, offset)
    assert torch.equal(total, leaves[0])
    assert torch.equal(out, reference.rms_norm(leaves[0], leaves[2], EPS, offset))


def turned(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """`[T, H, D]`: the pairs as complex numbers times e^iθ, θ `[T, R / 2]`."""
    R = 2 * angle.shape[-1]
    halves = x[..., :R].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    if not interleaved:
        halves = halves.transpose(-1, -2)
    product = torch.view_as_complex(halves.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None]
    pairs = torch.view_as_real(product)
    return torch.cat([(pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2), x[..., R:]], -1)


@all_dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("offset", "flat"), [(None, False), (0.0, False), (1.0, False), (0.0, True)], ids=str
)
def test_rotations(offset, flat, interleaved, dtype):
    T, HQ, HK, D, R = 5, 4, 2, 10, 6
    angles, position_ids = torch.randn(9, R // 2, dtype=FP64), torch.tensor([8, 0, 3, 3, 1])
    q, k, q_weight, k_weight = draw(T, HQ, D), draw(T, HK, D), *(draw(H * D if flat else D) for H in (HQ, HK))

    def normed(x, weight):
        if offset is None:
            return x
        rows = x.flatten(1) if flat else x
        rows = rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * (offset + weight)
        return rows.view(x.shape)

    def formula(q, k, *weights):
        weights = weights or (None, None)
        return [
            turned(normed(x, w), angles[position_ids], interleaved)
            for x, w in zip((q, k), weights, strict=True)
        ]

    def oracle(q, k, *weights, by_head=False):
        norm = QKNorm(*weights, EPS, offset, flat) if weights else None
        wide = torch.cat([angles, angles], -1).to(torch.promote_types(q.dtype, FP32))
        tables, ids = (wide.cos(), wide.sin()), position_ids
        if not by_head:
            return reference.rope_qk(q, k, *tables, ids, qk_norm=norm, interleaved=interleaved)
        rows = (x.transpose(0, 1)[None] for x in (q, k))  # [1, H, T, D], and a row of the tables a token
        tables = (table[ids] for table in tables)
        found = reference.rope_qk(*rows, *tables, qk_norm=norm, interleaved=interleaved)
        return [x[0].transpose(0, 1) for x in found]

    leaves = [q, k] if offset is None else [q, k, q_weight, k_weight]
    agree(oracle, formula, leaves, dtype)
    agree(partial(oracle, by_head=True), formula, leaves, dtype)


def silu(x):
    return x / (1 + (-x).exp())


def gelu_tanh(x):
    return x / 2 * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


@all_dtypes
def test_activations(dtype):
    for name, act in ACTIVATIONS.items():
        agree(
            partial(lambda name, x, u: [reference.gated(x, u, name)], name),
            partial(lambda act, x, u: [act(x) * u], act),
            [draw(3, 7), draw(3, 7)],
            dtype,
        )
    agree(lambda x: [reference.relu2(x)], lambda x: [x * x * (x > 0)], [draw(40)], dtype)
    beta, eps = torch.tensor(0.5), torch.tensor(-1e-6)

    def xielu(x, p, n):
        p, n = (1 + p.exp()).log(), 0.5 + (1 + n.exp()).log()
        return [torch.where(x > 0, p * x * x, n * (x.clamp(max=-1e-6).exp() - 1 - x)) + 0.5 * x]

    agree(lambda x, p, n: [reference.xielu(x, p, n, beta, eps)], xielu, [draw(40), draw(1), draw(1)], dtype)


# Attention


@all_dtypes
@pytest.mark.parametrize(("has_sinks", "softcap", "window"), [(False, None, None), (True, 1.5, 3)])
def test_attention(has_sinks, softcap, window, dtype):
    HQ, HK, D, scale, lengths = 4, 2, 3, 0.7, (1, 0, 5, 2)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    of_token = [start for start, n in zip(cu_seqlens.tolist(), lengths, strict=False) for _ in range(n)]

    def formula(q, k, v, *sinks):
        """One query at a time, over a slice of the keys that it sees."""
        rows = []
        for t, start in enumerate(of_token):
            start = start if window is None else max(start, t - window + 1)
            for head in range(HQ):
                keys, values = (x[start : t + 1, head // (HQ // HK)] for x in (k, v))
                z = scale * (keys @ q[t, head])
                z = z if softcap is None else softcap * (z / softcap).tanh()
                weights = z.exp()
                total = weights.sum() + (sinks[0][head].exp() if sinks else 0)
                rows.append((weights[:, None] * values).sum(0) / total)
        return [torch.stack(rows).view(q.shape)]

    def oracle(q, k, v, *sinks):
        options = {"window": window, "softcap": softcap, "sinks": sinks[0] if sinks else None}
        return [reference.varlen_attention(q, k, v, cu_seqlens, scale, **options)]

    leaves = [draw(8, HQ, D), draw(8, HK, D), draw(8, HK, D), *([draw(HQ)] if has_sinks else [])]
    agree(oracle, formula, leaves, dtype)


# The head


KINDS = ("nothing", "an adapter", "trained tokens")


def logits_of(hidden, weight, bias, extra, kind, softcap, scale):
    z = hidden @ weight.t() + bias
    if kind == "an adapter":
        z = z + extra[0] @ extra[1].t()
    elif kind == "trained tokens":
        z = torch.stack([extra[0][..., [4, 0].index(v)] if v in (4, 0) else z[..., v] for v in range(6)], -1)
    z = scale * z
    return z if softcap is None else softcap * (z / softcap).tanh()


def head(kind):
    extra = {"nothing": [], "an adapter": [draw(2, 4, 2), draw(6, 2)], "trained tokens": [draw(2, 4, 2)]}
    return [draw(2, 4, 3), draw(6, 3), draw(6), *extra[kind]], torch.tensor(
        [[0, 5, -100, 2], [-100, 4, 4, 1]]
    )


def extra_logits(kind, extra):
    if kind == "nothing":
        return None
    return ExtraLogits(
        extra[0], *extra[1:], outputs=torch.tensor([4, 0]) if kind == "trained tokens" else None
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("softcap", "scale", "num_items"), [(None, 1.0, None), (2.0, 0.5, 7)], ids=str)
def test_the_loss_of_a_head(softcap, scale, num_items, kind):
    leaves, labels = head(kind)

    def formula(hidden, weight, bias, *extra):
        z = logits_of(hidden, weight, bias, extra, kind, softcap, scale)
        places = (labels != -100).nonzero().tolist()
        losses = [z[i, t].exp().sum().log() - z[i, t, labels[i, t]] for i, t in places]
        return [sum(losses) / (num_items or len(losses))]

    def oracle(hidden, weight, bias, *extra):
        options = {"softcap": softcap, "scale": scale, "num_items": num_items}
        extra = extra_logits(kind, extra)
        return [reference.linear_cross_entropy(hidden, weight, labels, bias=bias, extra=extra, **options)]

    agree(oracle, formula, leaves, FP64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (2.0, 0.5)], ids=str)
def test_scores_of_a_head(softcap, scale, kind):
    leaves, labels = head(kind)
    counted = (labels != -100).double()
    fields = TokenScores._fields[1:]

    def formula(hidden, weight, bias, *extra):
        z = logits_of(hidden, weight, bias, extra, kind, softcap, scale)
        p = z.exp() / z.exp().sum(-1, keepdim=True)
        own = sum(p[..., v] * (labels == v) for v in range(6))
        scores = [(own + 1 - counted).log(), -(p * p.log()).sum(-1), z.sum(-1) / 6, (p * p).sum(-1).log()]
        return [score * counted for score in scores]

    def oracle(hidden, weight, bias, *extra):
        options = {"softcap": softcap, "scale": scale, "extra": extra_logits(kind, extra)}
        found = reference.token_scores(hidden, weight, labels, bias=bias, fields=fields, **options)
        greatest = logits_of(hidden, weight, bias, extra, kind, softcap, scale).max(-1)
        assert torch.equal(found.is_top1, (greatest.indices == labels) & (labels != -100))
        return [found.log_prob, found.entropy, found.mean_logit, found.log_sum_sq_probs]

    agree(oracle, formula, leaves, FP64)


# Dropout


def test_philox_is_the_published_one():
    """The known answers of Random123 for the counters and keys that are drawn from here."""
    words = reference._philox(torch.tensor(0), torch.tensor([0]), torch.tensor([0]))
    assert [word.item() for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def kept_by(seed, p, n_rows, n_columns, first_row=0):
    ones = torch.ones(n_rows, n_columns, dtype=FP64)
    return reference.dropout(ones, torch.tensor([seed]), p, first_row) != 0


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_dropout_keeps_as_many_as_asked_for_wherever_they_lie(p):
    n_rows, n_columns = 400, 257
    kept = kept_by(11, p, n_rows, n_columns).double()
    for axis, n in ((None, kept.numel()), (0, n_rows), (1, n_columns)):
        share = kept.mean() if axis is None else kept.mean(axis)
        assert ((share - (1 - p)).abs() < 5 * (p * (1 - p) / n) ** 0.5).all()


@all_dtypes
def test_dropout_scales_what_it_keeps(dtype):
    x, before = draw(9, 37, dtype=dtype).detach(), draw(9, 37, dtype=dtype).detach()
    kept, keeps = kept_by(5, 0.3, 9, 37), 1 - round(0.3 * 2**16) / 2**16
    for base, found in (
        (0 * before, reference.dropout(x, torch.tensor([5]), 0.3)),
        (before, reference.dropout(x, torch.tensor([5]), 0.3, add_to=before.clone())),
    ):
        true = base.double() + kept * x.double() / keeps
        torch.testing.assert_close(found.double(), true, rtol=torch.finfo(dtype).eps, atol=1e-6)
    for p, all_kept in ((0.0, True), (1.0, False)):
        assert torch.equal(reference.dropout(x, torch.tensor([5]), p), x if all_kept else 0 * x)

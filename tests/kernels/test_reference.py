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
    Gate,
    InnerSum,
    LowRank,
    NestedScales,
    QKNorm,
    Scaled,
    TokenScores,
    reference,
)

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
EPS = 1e-6
all_dtypes = pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)


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
both_activations = pytest.mark.parametrize("activation", ACTIVATIONS)


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


# Gated MLPs with adapters, and routed experts


@both_activations
def test_gated_products_with_adapters(activation):
    n, f = 5, 7
    g, gate, up = (draw(n, f).detach() for _ in range(3))
    parts = [LowRank(draw(n, r).detach(), draw(f, r).detach(), s) for r, s in ((2, 0.5), (3, 2.0), (1, 1.0))]
    sums = [x + p.scale * (p.left @ p.right.t()) for x, p in zip((g, gate, up), parts, strict=True)]
    leaves = [x.requires_grad_() for x in sums[1:]]
    product = ACTIVATIONS[activation](leaves[0]) * leaves[1]
    grads = torch.autograd.grad(product, leaves, sums[0])
    for store in (False, True):
        kept = gate.clone(), up.clone()
        found = reference.gated_lora_(kept[0], parts[1], kept[1], parts[2], activation, store)
        torch.testing.assert_close(found, product.detach(), rtol=1e-12, atol=1e-12)
        for x, y in zip(kept, sums[1:] if store else (gate, up), strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=1e-12, atol=1e-12)
    written = [g.clone(), torch.full_like(gate, torch.nan), torch.full_like(up, torch.nan)]
    products = reference.gated_lora_backward_(
        written[0], parts[0], gate, parts[1], up, parts[2], activation, *written[1:]
    )
    for x, y, p, made in zip(written, (product.detach(), *grads), parts, products, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(made, y.t() @ p.left, rtol=1e-12, atol=1e-12)
    written = [g.clone(), torch.full_like(gate, torch.nan), torch.full_like(up, torch.nan)]
    assert reference.gated_lora_backward_(
        written[0], None, gate, None, up, None, activation, *written[1:]
    ) == [None, None, None]
    torch.testing.assert_close(written[2], g * ACTIVATIONS[activation](gate), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "gate",
    [
        Gate("silu"),
        Gate("gelu_tanh"),
        Gate("silu", 1.702, 0.7, 1.0, True),
        Gate("silu", 1.0, 0.5, 0.0, False),
    ],
    ids=["silu", "gelu", "limited and interleaved", "limited"],
)
def test_products_of_routed_experts(gate):
    S, width, E = 6, 4, 3
    base, low, bias, g, more = (draw(*s).detach() for s in ((S, 8), (S, 8), (E, 8), (S, width), (S, width)))
    expert, weight = torch.tensor([2, 0, 1, 1, 0, 2]), torch.rand(S, dtype=FP64).requires_grad_()
    total = torch.stack([base[s] + 0.25 * low[s] + bias[expert[s]] for s in range(S)]).requires_grad_()
    x, u = (total[:, ::2], total[:, 1::2]) if gate.interleaved else (total[:, :width], total[:, width:])
    limit = math.inf if gate.limit is None else gate.limit
    x, u = x.clamp(max=limit), u.clamp(min=-limit, max=limit)
    act = ACTIVATIONS[gate.activation]
    product = weight[:, None] * (act(gate.alpha * x) / gate.alpha * (u + gate.offset))
    g_total, g_weight = torch.autograd.grad(product, (total, weight), g + 0.3 * more)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    for keep in (False, True):
        kept = base.clone()
        inner = InnerSum(kept, Scaled(low, 0.25), bias, expert)
        close(reference.routed_gate_(inner, weight.detach(), gate, keep), product.detach())
        close(kept, total.detach() if keep else base)
    again, into = g.clone(), torch.full_like(base, torch.nan)
    inner = InnerSum(base, Scaled(low, 0.25), bias, expert)
    close(
        reference.routed_gate_backward_(again, Scaled(more, 0.3), inner, weight.detach(), gate, into),
        g_weight,
    )
    close(into, g_total)
    close(again, product.detach())


@all_dtypes
def test_rows_of_experts(dtype):
    y, more = draw(6, 5, dtype=dtype).detach(), draw(6, 5, dtype=dtype).detach()
    places = torch.tensor([[3, 0], [5, 1], [2, 4]])
    found = reference.sum_of_rows([Scaled(y, 1.0), Scaled(more, 0.5)], places)
    true = torch.stack([sum(y[i].double() + 0.5 * more[i].double() for i in row) for row in places.tolist()])
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), true, rtol=torch.finfo(dtype).eps, atol=1e-6)
    x, weight, g = (draw(*s).detach() for s in ((6, 3), (4, 3, 5), (6, 5)))
    ends, own = torch.tensor([2, 2, 5, 6]).int(), [0, 0, 2, 2, 2, 3]
    rows = torch.stack([x[s] @ weight[own[s]] for s in range(6)])
    torch.testing.assert_close(reference.grouped_mm(x, weight, ends), rows)
    outer = torch.zeros(4, 3, 5, dtype=FP64)
    for s in range(6):
        outer[own[s]] += x[s][:, None] * g[s]
    torch.testing.assert_close(reference.grouped_outer(x, g, ends), outer)


# Attention


@all_dtypes
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
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


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("softcap", "scale", "num_items"), [(None, 1.0, None), (2.0, 0.5, 7)], ids=str)
def test_the_loss_of_a_head(softcap, scale, num_items, kind, dtype):
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

    agree(oracle, formula, leaves, dtype)


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (2.0, 0.5)], ids=str)
def test_scores_of_a_head(softcap, scale, kind, dtype):
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

    agree(oracle, formula, leaves, dtype)


# Numbers of few bits


@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
def test_four_bits(is_nested):
    block, n = 32, 5
    packed, code = torch.randint(0, 256, (n * block // 2,)).to(torch.uint8), torch.randn(16)
    scales = torch.rand(n)
    given = scales
    if is_nested:
        given = NestedScales(
            torch.randint(0, 256, (n,)).to(torch.uint8), torch.randn(256), torch.rand(3), torch.rand(()), 2
        )
        scales = [given.code[int(v)] * given.scale[i // 2] + given.offset for i, v in enumerate(given.values)]
    halves = [half for byte in packed.tolist() for half in divmod(byte, 16)]
    expected = torch.stack([code[half] * scales[i // block] for i, half in enumerate(halves)])
    for dtype in (FP32, BF16):
        assert torch.equal(reference.dequantize_4bit(packed, code, given, block, dtype), expected.to(dtype))


def test_eight_bits():
    parts = [torch.randn(6, 16) * torch.logspace(-3, 3, 6)[:, None], torch.randn(6, 8)]
    column_scales = [torch.rand(16, 1) + 0.1, torch.rand(8, 1) + 0.1]
    for of_columns in (None, column_scales):
        exact = torch.cat(parts, 1).double()
        exact = exact if of_columns is None else exact * torch.cat(of_columns).t().double()
        values, scale = reference.quantize_rows(*parts, column_scales=of_columns)
        largest = exact.abs().amax(1, keepdim=True)
        torch.testing.assert_close(scale.double(), largest / 448, rtol=1e-6, atol=0)
        step = torch.maximum(exact.abs() / scale * 2**-3, torch.full_like(exact, 2**-9))
        stands_for = values.double() * scale
        assert ((stands_for - exact).abs() / scale <= 0.5001 * step).all()
        torch.testing.assert_close(reference.dequantize_rows(values, scale, FP32), stands_for.float())
    assert not reference.quantize_rows(torch.zeros(2, 16))[0].float().any()

    def close(found, true):
        assert (found.double() - true).norm() <= 1e-5 * true.norm()

    weights = [reference.quantize_rows(torch.randn(height, 16)) for height in (16, 8)]
    x = reference.quantize_rows(torch.randn(6, 16))
    stand_for = [values.double() * scale for values, scale in (x, *weights)]
    close(reference.fp8_linear(x, weights[0], torch.empty(6, 16)), stand_for[0] @ stand_for[1].t())
    joined = reference.fp8_transposed(weights)
    assert torch.equal(joined[0].float(), torch.cat([v.float() for v, _ in weights]).t())
    gs = [torch.randn(6, height) for height in (16, 8)]
    g_values, g_scale = reference.quantize_rows(*gs, column_scales=[scale for _, scale in weights])
    true = (g_values.double() * g_scale) @ torch.cat([v.double() for v, _ in weights])
    close(reference.fp8_linear_backward(gs, joined, torch.empty(6, 16)), true)
    exact = sum(g.double() @ w for g, w in zip(gs, stand_for[1:], strict=True))
    assert (true - exact).norm() < 0.05 * exact.norm()


# Dropout


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

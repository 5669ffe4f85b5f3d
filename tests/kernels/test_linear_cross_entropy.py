"""linear_cross_entropy against float64 truth, under Triton's interpreter or on the GPU.

The yardstick is what transformers computes in the same dtype: logits of all rows, their loss in float32.
What is compared is the error's norm: both paths round logits and their gradients, which GEMMs then sum, and
which of them has the larger single error is luck.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from exactness import DEVICE, LAYOUTS, assert_no_sync, assert_same
from extra_leaves import KINDS_OF_EXTRA, of_leaves, with_extra
from head_cases import leaves, make, plain_logits
from torch import Tensor

from unsloth_pack.kernels import LabelledRows, linear_cross_entropy, reference

pytest.importorskip("triton")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
OPTIONS = [{}, {"scale": 0.5}, {"softcap": 5.0}, {"softcap": 3.0, "scale": 2.0, "num_items": 7}]


def plain(
    hidden, weight, labels, *, bias=None, softcap=None, scale=1.0, extra=None, num_items=None
) -> Tensor:
    """transformers' causal language models and its `ForCausalLMLoss`, their labels shifted."""
    logits = plain_logits(hidden, weight, bias, extra) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.to(torch.promote_types(logits.dtype, FP32)).flatten(0, -2)
    if num_items is None:
        return F.cross_entropy(logits, labels.flatten())
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items


def run(fn, tensors, labels, **options) -> list[Tensor]:
    """The loss, and the gradients of the tensors that require one."""
    hidden, weight, *bias = tensors
    if "extra" in options:
        options["extra"] = options["extra"](tensors)
        bias = bias[:1] if options.pop("with_bias") else []
    loss = fn(hidden, weight, labels, bias=bias[0] if bias else None, **options)
    wanted = [x for x in tensors if x.requires_grad]
    return [loss.detach(), *torch.autograd.grad(3 * loss, wanted)]


def check(tensors, labels, slack=1.25, **options) -> None:
    """The slack, a factor on the yardstick, allows for luck: more where few numbers are compared. The loss is
    one number, so it is granted an eighth of a unit in the last place of its logits, and four of its own."""
    ours = run(linear_cross_entropy, tensors, labels, **options)
    theirs = run(plain, leaves(tensors), labels, **options)
    truth = run(plain, leaves(tensors, FP64), labels, **options)
    oracle = run(reference.linear_cross_entropy, leaves(tensors, FP64), labels, **options)
    torch.testing.assert_close(oracle, truth, rtol=1e-9, atol=1e-12)
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]
    granted = max(torch.finfo(tensors[0].dtype).eps / 8, 4 * torch.finfo(FP32).eps)
    for i, (x, y, t) in enumerate(zip(ours, theirs, truth, strict=True)):
        error, yardstick = ((r.double() - t).norm().item() for r in (x, y))
        more = (granted if i == 0 else torch.finfo(FP32).eps) * t.norm().item()
        assert error <= slack * yardstick + more, f"result {i}: {error:.3e} against {yardstick:.3e}"


# Numerics


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_no_less_exact_than_logits_of_all_rows(dtype, options, path, small_chunks):
    check(*make(2, 17, 32, V=517, dtype=dtype), **options)
    check(*make(2, 17, 32, V=517, dtype=dtype, bias=True), **options)


@pytest.mark.parametrize("kind", KINDS_OF_EXTRA)
@pytest.mark.parametrize(("dtype", "options"), [(BF16, OPTIONS[3]), (FP32, OPTIONS[0])], ids=str)
def test_what_changes_the_logits_gets_its_gradient(kind, options, dtype, path, small_chunks):
    tensors, labels = make(2, 17, 32, V=517, dtype=dtype, bias=True)
    check(tensors, labels, **options, **with_extra(kind, tensors))
    tensors[1].requires_grad_(False)
    check(tensors, labels, **options, extra=partial(of_leaves, kind), with_bias=True)


@pytest.mark.parametrize("V", [1, 3, 257, 8193])
@pytest.mark.parametrize("shape", [(1, 8), (2, 3, 7)])
def test_ragged_shapes(shape, V, path):
    check(*make(*shape, V=V, bias=True), slack=4, softcap=4.0)


@pytest.mark.parametrize("rows", [4, 9])
def test_chunks_of_any_number(rows, path, small_chunks):
    check(*make(rows, 16, V=300, unlabelled=0.0, bias=True))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_huge_logits(dtype, softcap, path):
    tensors, labels = make(9, 16, V=333, dtype=dtype)
    with torch.no_grad():
        tensors[0].mul_(1e4)
    results = run(linear_cross_entropy, tensors, labels, softcap=softcap)
    assert all(x.isfinite().all() for x in results)
    check(tensors, labels, softcap=softcap)


# Labels


def test_no_row_has_a_label(path):
    """As torch has it: the mean over nothing is NaN, and moves nothing."""
    tensors, labels = make(5, 16, V=40, bias=True)
    labels.fill_(-100)
    loss, *gradients = run(linear_cross_entropy, tensors, labels)
    assert loss.isnan()
    assert all((x == 0).all() for x in gradients)
    loss, *gradients = run(linear_cross_entropy, tensors, labels, num_items=3)
    assert loss == 0
    assert all((x == 0).all() for x in gradients)


def test_rows_without_a_label_are_not_looked_at(path, small_chunks):
    tensors, labels = make(20, 16, V=40)
    expected = run(linear_cross_entropy, tensors, labels)
    with torch.no_grad():
        tensors[0][labels == -100] = torch.nan
    results = run(linear_cross_entropy, tensors, labels)
    assert_same(results, expected)
    assert (results[1][labels == -100] == 0).all()


def test_labels_found_earlier_and_marked_otherwise(path):
    tensors, labels = make(2, 9, 16, V=40)
    expected = run(linear_cross_entropy, tensors, labels)
    for ignored, dtype in ((-100, torch.int32), (-1, torch.int64), (50, torch.int64)):
        found = LabelledRows(labels.masked_fill(labels == -100, ignored).to(dtype), ignored)
        assert_same(run(linear_cross_entropy, tensors, found), expected)
        assert found.count == int((labels != -100).sum())
        assert torch.equal(found.rows, (labels.flatten() != -100).nonzero()[:, 0])


@pytest.mark.parametrize("label", [-1, 40, 10**12])
def test_labels_beyond_the_head(label):
    tensors, labels = make(5, 16, V=40)
    labels[3] = label
    if DEVICE == "cuda":
        assert linear_cross_entropy(*tensors, labels).isnan()
    else:
        with pytest.raises(ValueError, match=r"labels reach from .* the head has 40 outputs"):
            linear_cross_entropy(*tensors, labels)


# Layouts


@pytest.mark.parametrize("lay_out", LAYOUTS)
def test_any_strides(lay_out, path, small_chunks):
    (hidden, weight), labels = make(2, 5, 24, V=60)
    expected = run(linear_cross_entropy, [hidden, weight], labels)
    hidden, weight = lay_out(hidden), lay_out(weight.detach().view(3, 20, 24).requires_grad_()).flatten(0, 1)
    before = [x.detach().clone() for x in (hidden, weight, labels)]
    results = run(linear_cross_entropy, [hidden, weight], labels)
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)
    assert_same((hidden, weight, labels), before)


# The gradients


@pytest.mark.parametrize("factor", [0.0, 1 / 3, 65536.0])
def test_the_gradient_is_scaled_and_rounded_once(factor, path):
    tensors, labels = make(9, 64, V=40, dtype=BF16)
    loss = linear_cross_entropy(*tensors, labels)
    wide = [x.float() for x in torch.autograd.grad(loss, tensors, retain_graph=True)]
    scaled = torch.autograd.grad(factor * loss, tensors)
    for x, y in zip(scaled, wide, strict=True):
        torch.testing.assert_close(x.float(), factor * y, rtol=2**-7, atol=0)


def test_autocast(path):
    tensors, labels = make(9, 32, V=40, bias=True)
    with torch.autocast(DEVICE, BF16):
        ours = run(linear_cross_entropy, tensors, labels)
    rounded = [x.detach().to(BF16).requires_grad_() for x in tensors]
    expected = run(linear_cross_entropy, rounded, labels)
    assert_same(ours, [x.float() for x in expected])


# 64-bit indices, the device, errors


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits():
    tensors, labels = make(2**31 // 128256 + 300, 64, V=128256, dtype=BF16, unlabelled=0.0)
    tensors[1] = tensors[1].detach()
    loss, g_hidden = run(linear_cross_entropy, tensors, labels, num_items=1)
    last = tensors[0].detach()[-512:].clone().requires_grad_()
    _, expected = run(linear_cross_entropy, [last, tensors[1]], labels[-512:], num_items=1)
    assert loss.isfinite()
    torch.testing.assert_close(g_hidden[-512:], expected, rtol=2**-6, atol=2**-6)


@pytest.mark.gpu
def test_never_synchronises_when_the_labels_are_found_before():
    tensors, labels = make(64, 896, V=5000, dtype=BF16)
    assert_no_sync(lambda: run(linear_cross_entropy, tensors, LabelledRows(labels)))

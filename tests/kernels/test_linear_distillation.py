"""linear_distillation against float64 truth, under Triton's interpreter or on the GPU.

The yardstick is the oracle on inputs in the same dtype: logits of all rows in float32.
"""

from functools import partial

import pytest
import torch
from exactness import DEVICE, divergences
from extra_leaves import KINDS_OF_EXTRA, with_extra
from head_cases import leaves, make

from unsloth_pack.kernels import TeacherHead, TopLogProbs, linear_distillation, reference
from unsloth_pack.kernels.distillation import DIVERGENCES
from unsloth_pack.kernels.head import scale_and_cap

pytest.importorskip("triton")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
V = 517


def make_teacher(labels, dtype, softcap=None, scale=1.0):
    """Return a head of another width, with a bias."""
    hidden, weight = torch.randn(*labels.shape, 24), torch.randn(V, 24) / 24**0.5
    tensors = (x.to(DEVICE, dtype) for x in (hidden, weight, torch.randn(V)))
    return TeacherHead(*tensors, softcap=softcap, scale=scale)


def in_dtype(teacher, dtype):
    if isinstance(teacher, TopLogProbs):
        return teacher._replace(log_probs=teacher.log_probs.to(dtype))
    return teacher._replace(
        **{name: getattr(teacher, name).to(dtype) for name in ("hidden", "weight", "bias")}
    )


def store(teacher, k, temperature=1.0):
    z = scale_and_cap(
        teacher.hidden.double() @ teacher.weight.double().t() + teacher.bias, teacher.scale, teacher.softcap
    )
    log_q, ids = (z / temperature).log_softmax(-1).topk(k)
    return TopLogProbs(ids.int(), log_q.float())


def run(fn, tensors, labels, teacher, **options):
    """All results, and the gradients of the loss."""
    hidden, weight, *bias = tensors
    if "extra" in options:
        options["extra"] = options["extra"](tensors)
        bias = bias[:1] if options.pop("with_bias") else []
    results = fn(hidden, weight, labels, teacher, bias=bias[0] if bias else None, **options)
    return results, torch.autograd.grad(results.loss, [x for x in tensors if x.requires_grad])


def check(tensors, labels, teacher, **options):
    """Judge errors in norm by the oracle's in the same dtype, with float32 logits, and by rounding."""
    ours, our_grads = run(linear_distillation, tensors, labels, teacher, **options)
    wide = tensors[0].dtype if tensors[0].dtype == FP64 else FP32
    theirs, their_grads = run(
        reference.linear_distillation, leaves(tensors, wide), labels, in_dtype(teacher, wide), **options
    )
    truth, true_grads = run(
        reference.linear_distillation, leaves(tensors, FP64), labels, in_dtype(teacher, FP64), **options
    )
    assert torch.equal(ours.is_top1, theirs.is_top1)
    for name, got, other, true in zip(ours._fields[:4], ours, theirs, truth, strict=False):
        if name != "loss":
            assert got.shape == labels.shape, name
            assert not got[labels == -100].any(), name
        error, yardstick = ((x.double() - true).norm().item() for x in (got, other))
        assert error <= 2 * yardstick + 3e-6 * (true.norm().item() + labels.numel() ** 0.5), name
    for number, (got, other, true) in enumerate(zip(our_grads, their_grads, true_grads, strict=True)):
        assert got.dtype == tensors[0].dtype
        error, yardstick = ((x.double() - true).norm().item() for x in (got, other))
        # the logits' gradient is rounded once before its GEMM, and the result once
        rounding = 2 * torch.finfo(got.dtype).eps * true.norm().item()
        assert error <= 2 * yardstick + rounding, f"gradient {number}: {error} {yardstick}"


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("path", "dtype", "trains_head"),
    [
        ("kernel", BF16, False),
        ("kernel", FP32, True),
        ("plain torch", BF16, True),
        ("plain torch", FP32, False),
    ],
    indirect=["path"],
)
def test_equals_the_formulas(path, divergence, dtype, trains_head, small_chunks):
    tensors, labels = make(2, 9, 32, V=V, dtype=dtype, bias=True, trains_head=trains_head)
    options = dict(divergence=divergence, kl_weight=0.7, ce_weight=0.4)
    check(tensors, labels, make_teacher(labels, dtype), **options)
    capped = make_teacher(labels, dtype, softcap=4.0, scale=0.5)
    check(tensors, labels, capped, **options, temperature=2.0, softcap=5.0, scale=1.5)
    check(tensors, labels, store(capped, 16, 2.0), **options, temperature=2.0, num_items=100)


@pytest.mark.parametrize("kind", KINDS_OF_EXTRA)
@pytest.mark.parametrize("path", ["plain torch"], indirect=True)
def test_adapters_and_trained_tokens_of_the_head(path, kind, small_chunks):
    tensors, labels = make(2, 9, 32, V=V, dtype=FP32, trains_head=False)
    check(tensors, labels, make_teacher(labels, FP32), ce_weight=0.5, **with_extra(kind, tensors))


@pytest.mark.parametrize("path", ["kernel", "plain torch"], indirect=True)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equal_models_do_not_diverge_at_all(path, divergence, small_chunks):
    for dtype in (BF16, FP32):
        (hidden, weight), labels = make(1, 17, 32, V=V, dtype=dtype, trains_head=False)
        teacher = TeacherHead(hidden.detach(), weight, softcap=3.0, scale=2.0)
        for temperature in (1.0, 1.7):
            results = linear_distillation(
                hidden, weight, labels, teacher, softcap=3.0, scale=2.0,
                divergence=divergence, temperature=temperature,
            )  # fmt: skip
            (gradient,) = torch.autograd.grad(results.loss, hidden)
            assert not results.divergence.any()
            assert not gradient.any()
            assert results.loss == 0


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("path", ["plain torch"], indirect=True)
def test_a_stored_teacher_is_known_on_its_tokens_and_on_all_others_together(path, divergence):
    tensors, labels = make(1, 9, 32, V=V, dtype=FP64, unlabelled=0, trains_head=False)
    stored = store(make_teacher(labels, FP64), 8)
    stored = stored._replace(log_probs=stored.log_probs.double())
    ours, (gradient,) = run(linear_distillation, tensors, labels, stored, divergence=divergence)

    log_p = (tensors[0] @ tensors[1].t()).log_softmax(-1)
    others = log_p.scatter(-1, stored.ids.long(), -torch.inf).logsumexp(-1, keepdim=True)
    a = torch.cat([log_p.gather(-1, stored.ids.long()), others], -1)
    b = torch.cat([stored.log_probs, (1 - stored.log_probs.exp().sum(-1, keepdim=True)).log()], -1)
    by_token = divergences(a, b)[divergence]
    torch.testing.assert_close(ours.divergence, by_token, atol=1e-6, rtol=1e-5)
    (true_gradient,) = torch.autograd.grad(by_token.mean(), tensors[0])
    torch.testing.assert_close(gradient, true_gradient, atol=1e-6, rtol=1e-5)


def test_what_does_not_fit_is_refused():
    (hidden, weight), labels = make(1, 9, 32, V=V)
    teacher = make_teacher(labels, FP32)
    call = partial(linear_distillation, hidden, weight, labels)
    with pytest.raises(ValueError, match="516 outputs: pass"):
        call(teacher._replace(weight=teacher.weight[:-1], bias=None))
    with pytest.raises(ValueError, match=r"the teacher has \[1, 8\] rows"):
        call(teacher._replace(hidden=teacher.hidden[:, 1:]))
    with pytest.raises(ValueError, match="divergence is 'kl'"):
        call(teacher, divergence="kl")
    with pytest.raises(ValueError, match="temperature is 0"):
        call(teacher, temperature=0)

"""token_scores against float64 truth, under Triton's interpreter or on the GPU.

The yardstick is the oracle on inputs in the same dtype: logits of all rows, rounded to it, scored in float32.
"""

from functools import partial

import head_cases
import pytest
import torch
from exactness import DEVICE
from extra_leaves import KINDS_OF_EXTRA, with_extra
from head_cases import leaves, plain_logits

from unsloth_pack.kernels import TokenScores, reference, token_scores
from unsloth_pack.kernels.token_scores import FIELDS

pytest.importorskip("triton")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PATHS = ("kernel", "plain torch")
OPTIONS = [{}, {"softcap": 3.0, "scale": 2.0}]


def plain(
    hidden, weight, labels, *, bias=None, softcap=None, scale=1.0, extra=None, fields=()
) -> TokenScores:
    """The logits rounded as transformers rounds them, and scored in float32."""
    logits = plain_logits(hidden, weight, bias, extra)
    identity = torch.eye(len(weight), dtype=logits.dtype, device=logits.device)
    wide = {"hidden": logits, "weight": identity} if logits.dtype == FP64 else {}
    if not wide:
        wide = {"hidden": logits.float(), "weight": identity.float()}
    return reference.token_scores(labels=labels, softcap=softcap, scale=scale, fields=fields, **wide)


make = partial(head_cases.make, trains_head=False)


def run(fn, tensors, labels, weights, **options):
    """All scores, and the gradients of what `weights` makes of the differentiable ones."""
    hidden, weight, *bias = tensors
    if "extra" in options:
        options["extra"] = options["extra"](tensors)
        bias = bias[:1] if options.pop("with_bias") else []
    scores = fn(hidden, weight, labels, bias=bias[0] if bias else None, fields=FIELDS, **options)
    loss = sum(((w.to(s.dtype) * s).sum() for w, s in zip(weights, scores, strict=False) if w is not None))
    wanted = [x for x in tensors if x.requires_grad]
    return scores, torch.autograd.grad(loss, wanted)


def measured(tensors, labels, upstream=("log_prob", "entropy"), **options):
    """(what, error, the plain path's, rounding to expect anyway) of every score and gradient, in norm."""
    weights = [
        torch.randn(labels.shape, device=DEVICE) if name in upstream else None
        for name in ("log_prob", "entropy")
    ]
    ours, our_grads = run(token_scores, tensors, labels, weights, **options)
    theirs, their_grads = run(plain, leaves(tensors, tensors[0].dtype), labels, weights, **options)
    truth, true_grads = run(plain, leaves(tensors, FP64), labels, weights, **options)
    eps = torch.finfo(FP32).eps
    for name, got, other, true in zip(TokenScores._fields, ours, theirs, truth, strict=True):
        assert got.shape == labels.shape, name
        assert not got[labels == -100].any(), name
        if name == "is_top1":
            assert got.dtype == torch.bool
            assert torch.equal(got, other), name
            continue
        error, yardstick = ((x.double() - true).norm().item() for x in (got, other))
        yield name, error, yardstick, 8 * eps * (true.norm().item() + labels.numel() ** 0.5)
    for number, (got, other, true) in enumerate(zip(our_grads, their_grads, true_grads, strict=True)):
        assert got.dtype == tensors[0].dtype
        error, yardstick = ((x.double() - true).norm().item() for x in (got, other))
        yield f"gradient {number}", error, yardstick, 8 * eps * true.norm().item()


def check(tensors, labels, slack=1.25, **options):
    """The slack is for luck, as numbers are few."""
    for name, error, yardstick, rounding in measured(tensors, labels, **options):
        assert error <= slack * yardstick + rounding, f"{name}: {error} {yardstick}"


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize(
    ("trains_head", "dtype", "options"), [(False, BF16, OPTIONS[1]), (True, FP32, OPTIONS[0])], ids=str
)
def test_no_less_exact_than_logits_of_all_rows(dtype, options, trains_head, path, small_chunks):
    for upstream in (("log_prob",), ("entropy",), ("log_prob", "entropy")):
        tensors, labels = make(4, 34, 32, V=517, dtype=dtype, bias=True, trains_head=trains_head)
        check(tensors, labels, upstream=upstream, **options)


@pytest.mark.parametrize("path", ["plain torch"], indirect=True)  # only the logits' gradient is a kernel's
@pytest.mark.parametrize("kind", KINDS_OF_EXTRA)
@pytest.mark.parametrize("trains_head", [False, True])
def test_what_changes_the_logits_gets_its_gradient(kind, trains_head, path, small_chunks):
    """With h, b and trained tokens as leaves."""
    for upstream in (("log_prob",), ("entropy",), ("log_prob", "entropy")):
        tensors, labels = make(3, 50, 32, V=517, bias=True, trains_head=trains_head)
        options = with_extra(kind, tensors)
        check(tensors, labels, upstream=upstream, softcap=5.0, **options)


@pytest.mark.parametrize("path", PATHS, indirect=True)
def test_the_gradient_of_trained_tokens_is_rounded_once(path):
    """That of their logits is weighed before it is rounded, as in plain torch."""
    tensors, labels = make(2, 200, 32, V=100, dtype=BF16)
    labels = torch.where(labels >= 0, labels % 5, labels)
    options = with_extra("trained tokens", tensors)
    check(tensors, labels, slack=1.05, upstream=("log_prob",), **options)


@pytest.mark.parametrize(  # a program holds 4,096 logits at a time
    ("shape", "V"), [((1, 8), 1), ((5, 16), 2), ((2, 3, 7), 257), ((5, 16), 4099)]
)
def test_ragged_shapes(shape, V, path):
    check(*make(*shape, V=V, bias=True), slack=4, softcap=4.0)


def test_a_tie_is_won_by_the_first(path):
    """As argmax, and as TRL's head counts `mean_token_accuracy`."""
    weight = torch.eye(8, device=DEVICE)
    hidden = torch.zeros(4, 8, device=DEVICE)
    hidden[:, [2, 5]] = 1.0
    labels = torch.tensor([2, 5, 0, -100], device=DEVICE)
    scores = token_scores(hidden, weight, labels, fields=["is_top1"])
    assert scores.is_top1.tolist() == [True, False, False, False]


def test_no_label_at_all_still_gives_a_gradient_of_zero(path):
    """So that a micro-batch without labels takes part in an update like any other."""
    (hidden, weight), labels = make(2, 5, 8, V=16)
    scores = token_scores(hidden, weight, torch.full_like(labels, -100), fields=FIELDS)
    assert all(not score.any() for score in scores)
    (gradient,) = torch.autograd.grad(scores.log_prob.sum(), hidden)
    assert gradient.shape == hidden.shape
    assert not gradient.any()


@pytest.mark.parametrize("fields", ["entropy", ["entropi"]])
def test_unknown_fields_are_refused(fields):
    with pytest.raises(ValueError, match=r"fields are .* pass a collection of entropy, is_top1"):
        token_scores(torch.randn(3, 4), torch.randn(5, 4), torch.arange(3), fields=fields)

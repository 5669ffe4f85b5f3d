"""linear_top_k against float64 truth; the yardstick is the oracle on inputs in the same dtype."""

import pytest
import torch
from extra_leaves import KINDS_OF_EXTRA, with_extra
from head_cases import leaves, make

from unsloth_pack.kernels import linear_top_k, reference

V, K = 517, 9
OPTIONS = {"softcap": 4.0, "scale": 0.5}


def run(fn, tensors, labels, k, extra=None, with_bias=True, **options):
    hidden, weight, *bias = tensors
    options["extra"] = None if extra is None else extra(tensors)
    return fn(hidden, weight, labels, k, bias=bias[0] if with_bias and bias else None, **options)


def check(tensors, labels, k, **options):
    """The ids are of log-probabilities that are the k greatest, within the error of the oracle."""
    ours = run(linear_top_k, tensors, labels, k, **options)
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    theirs = run(reference.linear_top_k, leaves(tensors, wide), labels, k, **options)
    truth = run(reference.linear_top_k, leaves(tensors, torch.float64), labels, V, **options)
    assert ours.ids.shape == ours.log_probs.shape == (*labels.shape, k)
    assert (ours.ids.dtype, ours.log_probs.dtype) == (torch.int32, wide)
    known = labels != -100
    for score in ours:
        assert not score.requires_grad
    of_ids = torch.empty_like(truth.log_probs).scatter_(-1, truth.ids.long(), truth.log_probs)
    true = of_ids.gather(-1, ours.ids.long())[known]
    yardstick = (theirs.log_probs[known] - truth.log_probs[known][:, :k]).abs().max().item()
    for expected in (true, truth.log_probs[known][:, :k]):
        assert (ours.log_probs[known] - expected).abs().max().item() <= 2 * yardstick + 1e-6
    assert (ours.ids[~known] == torch.arange(k, device=labels.device)).all()
    assert (ours.log_probs[~known] == -torch.inf).all()
    assert all(len(set(row.tolist())) == k for row in ours.ids.view(-1, k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_equals_the_formulas(dtype, small_chunks):
    tensors, labels = make(2, 150, 32, V=V, dtype=dtype, bias=True)
    for k in (1, K, V):
        check(tensors, labels, k, **OPTIONS)


@pytest.mark.parametrize("kind", KINDS_OF_EXTRA)
def test_adapters_and_trained_tokens_of_the_head(kind, small_chunks):
    tensors, labels = make(2, 9, 32, V=V, trains_head=False)
    check(tensors, labels, K, **with_extra(kind, tensors))


def test_a_row_without_labels(small_chunks):
    tensors, labels = make(1, 5, 32, V=V)
    check(tensors, labels.fill_(3), K)
    top = linear_top_k(*tensors, labels.fill_(-100), K)
    assert (top.log_probs == -torch.inf).all()

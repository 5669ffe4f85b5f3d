"""Oracles against formulas written another way, where no test of a kernel has one. No kernel runs."""

import pytest
import torch

from unsloth_pack.kernels import TokenScores, reference

BF16, FP64 = torch.bfloat16, torch.float64


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (2.0, 0.5)], ids=str)
def test_scores_of_a_head(softcap, scale):
    hidden, weight, bias = (
        torch.randn(*s, dtype=FP64, requires_grad=True) for s in ((2, 4, 3), (6, 3), (6,))
    )
    labels = torch.tensor([[0, 5, -100, 2], [-100, 4, 4, 1]])
    counted, fields = (labels != -100).double(), TokenScores._fields[1:]
    z = scale * (hidden @ weight.t() + bias)
    z = z if softcap is None else softcap * (z / softcap).tanh()
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    own = sum(p[..., v] * (labels == v) for v in range(6))
    true = [(own + 1 - counted).log(), -(p * p.log()).sum(-1), z.sum(-1) / 6, (p * p).sum(-1).log()]
    options = {"softcap": softcap, "scale": scale, "bias": bias, "fields": fields}
    got = reference.token_scores(hidden, weight, labels, **options)
    assert torch.equal(got.is_top1, (z.max(-1).indices == labels) & (labels != -100))
    got = [got.log_prob, got.entropy, got.mean_logit, got.log_sum_sq_probs]
    for score, truth in zip(got, true, strict=True):
        ours, theirs = (x.sin().sum() for x in (score, truth * counted))
        torch.testing.assert_close(ours, theirs)
        gradients = (
            torch.autograd.grad(x, (hidden, weight, bias), retain_graph=True) for x in (ours, theirs)
        )
        torch.testing.assert_close(*gradients)


def test_philox_is_the_published_one():
    """The known answers of Random123 for the counters and keys that are drawn from here."""
    words = reference._philox(torch.tensor(0), torch.tensor([0]), torch.tensor([0]))
    assert [word.item() for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_dropout_keeps_as_many_as_asked_for_wherever_they_lie(p):
    n_rows, n_columns = 400, 257
    kept = (reference.dropout(torch.ones(n_rows, n_columns), torch.tensor([11]), p) != 0).double()
    for axis, n in ((None, kept.numel()), (0, n_rows), (1, n_columns)):
        share = kept.mean() if axis is None else kept.mean(axis)
        assert ((share - (1 - p)).abs() < 5 * (p * (1 - p) / n) ** 0.5).all()


@pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)
def test_dropout_scales_what_it_keeps(dtype):
    x, before = torch.randn(9, 37).to(dtype), torch.randn(9, 37).to(dtype)
    kept = reference.dropout(torch.ones(9, 37), torch.tensor([5]), 0.3) != 0
    for base, got in (
        (0 * before, reference.dropout(x, torch.tensor([5]), 0.3)),
        (before, reference.dropout(x, torch.tensor([5]), 0.3, add_to=before.clone())),
    ):
        true = base.double() + kept * x.double() / (1 - round(0.3 * 2**16) / 2**16)
        torch.testing.assert_close(got.double(), true, rtol=torch.finfo(dtype).eps, atol=1e-6)
    for p, all_kept in ((0.0, True), (1.0, False)):
        assert torch.equal(reference.dropout(x, torch.tensor([5]), p), x if all_kept else 0 * x)

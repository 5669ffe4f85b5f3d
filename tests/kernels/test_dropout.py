"""dropout: the same bits as its oracle, and the elements that it keeps are random."""

import pytest
import torch
from every_day import combinations
from exactness import DEVICE

from unsloth_pack.kernels import dropout, reference

pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(5, 64), (3, 37), (1, 1), (2, 9000), (9, 3)]


def seeded(seed):
    return torch.tensor([seed], device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "p", "seed"),
    combinations(
        (BF16, FP16, FP32),
        (0.0, 0.1, 0.5, 1.0),
        (0, 1, 2**40 + 7, 2**62 - 1),
        daily=[(BF16, 0.1, 2**40 + 7), (FP32, 0.5, 2**62 - 1), (BF16, 1.0, 0), (FP32, 0.0, 1)],
    ),
)
def test_the_oracles_bits(dtype, p, seed):
    for shape in SHAPES:
        x, before = torch.randn(2, *shape, device=DEVICE).to(dtype)
        expected = reference.dropout(x, seeded(seed), p, 3)
        assert torch.equal(dropout(x, seeded(seed), p, 3), expected)
        added, expected = before.clone(), reference.dropout(x, seeded(seed), p, 3, before.clone())
        assert dropout(x, seeded(seed), p, 3, added) is added
        assert torch.equal(added, expected)


def test_nothing_is_lost_where_nothing_is_dropped():
    """One element in 65,536 draws 0, the smallest number: it is kept too."""
    ones = torch.ones(64, 4096, device=DEVICE)
    assert torch.equal(dropout(ones, seeded(3), 0.0), ones)


def test_philox_is_the_published_one():
    """The known answers of Random123 for the counters and keys that are drawn from here."""
    words = reference._philox(torch.tensor(0), torch.tensor([0]), torch.tensor([0]))
    assert [word.item() for word in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_what_is_kept_is_scaled_and_rounded_once():
    """To the bfloat16 nearest to the truth, or to its neighbour where float32 cannot tell which is nearer."""
    x, before = torch.randn(2, 12, 300, device=DEVICE).to(BF16).double()
    kept = dropout(x.to(BF16), seeded(5), 0.3) != 0
    for base, out in (
        (torch.zeros_like(x), dropout(x.to(BF16), seeded(5), 0.3)),
        (before, dropout(x.to(BF16), seeded(5), 0.3, add_to=before.to(BF16))),
    ):
        true = base + kept * x / (1 - round(0.3 * 2**16) / 2**16)
        in_float32 = (base.abs() + 2 * x.abs()) * 2**-23
        assert ((out - true).abs() <= (true.to(BF16) - true).abs() + in_float32).all()


# Nightly, as the oracle has the same bits: `test_reference.py` counts in those every day


def test_tiles_and_strided_rows_are_the_whole():
    x = torch.randn(16, 130, device=DEVICE)
    whole = dropout(x, seeded(3), 0.4)
    for start, stop in ((0, 7), (7, 8), (8, 16)):
        assert torch.equal(dropout(x[start:stop], seeded(3), 0.4, start), whole[start:stop])
    half = torch.randn(16, 260, device=DEVICE)[:, 130:]
    assert torch.equal(dropout(half, seeded(3), 0.4), dropout(half.contiguous(), seeded(3), 0.4))

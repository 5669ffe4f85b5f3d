"""dropout: the same bits as its oracle, which counts and scales in `test_reference.py`."""

import pytest
import torch
from exactness import DEVICE

from unsloth_pack.kernels import dropout, reference

pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [(5, 64), (3, 37), (1, 1), (2, 9000), (9, 3)]


def seeded(seed):
    return torch.tensor([seed], device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "p", "seed"),
    [(BF16, 0.1, 2**40 + 7), (FP16, 0.5, 1), (FP32, 0.5, 2**62 - 1), (BF16, 1.0, 0), (FP32, 0.0, 1)],
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


def test_tiles_and_strided_rows_are_the_whole():
    x = torch.randn(16, 130, device=DEVICE)
    whole = dropout(x, seeded(3), 0.4)
    for start, stop in ((0, 7), (7, 8), (8, 16)):
        assert torch.equal(dropout(x[start:stop], seeded(3), 0.4, start), whole[start:stop])
    half = torch.randn(16, 260, device=DEVICE)[:, 130:]
    assert torch.equal(dropout(half, seeded(3), 0.4), dropout(half.contiguous(), seeded(3), 0.4))

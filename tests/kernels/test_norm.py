"""rms_norm and add_rms_norm against float64 truth, under Triton's interpreter or on the GPU.

The yardstick is what transformers computes in the same dtypes; `exactness.assert_no_worse` states the slack.
"""

import pytest
import torch
from exactness import DEVICE, LAYOUTS, assert_no_worse, assert_same, far_rows, run
from torch import Tensor

from unsloth_pack.kernels import add_rms_norm, launch, rms_norm

pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6
all_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
both_offsets = pytest.mark.parametrize("offset", [0.0, 1.0])


def plain_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """LlamaRMSNorm, or Gemma3RMSNorm where there is an offset."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset == 0:
        return weight * wide.to(x.dtype)
    return (wide * (offset + weight.to(wide.dtype))).to(x.dtype)


def make(*shape: int, dtype=FP32, weight_dtype=None, offset=0.0, trained=True) -> list[Tensor]:
    """x, weight and the gradient of the output."""
    weight_dtype = weight_dtype or dtype
    weight = (1 - offset + 0.3 * torch.randn(shape[-1])).to(DEVICE, weight_dtype)
    out_dtype = dtype if offset else torch.promote_types(dtype, weight_dtype)
    x, g_out = torch.randn(shape).to(DEVICE, dtype), torch.randn(shape).to(DEVICE, out_dtype)
    return [x.requires_grad_(), weight.requires_grad_(trained), g_out]


def check(x: Tensor, weight: Tensor, g_out: Tensor, offset: float = 0.0) -> None:
    assert_no_worse(rms_norm, plain_norm, (x, weight), g_out, EPS, offset)


@both_offsets
@all_dtypes
@pytest.mark.parametrize("trained", [True, False])
def test_no_less_exact_than_the_plain_path(trained, dtype, offset):
    for shape in ((2, 9, 64), (37, 200)):
        check(*make(*shape, dtype=dtype, offset=offset, trained=trained), offset)


@pytest.mark.parametrize("C", [2, 7, 100, 5000, 16384])
@pytest.mark.parametrize("rows", [1, 33])
def test_ragged_shapes(rows, C):
    check(*make(rows, C))
    check(*make(rows, C, dtype=BF16, offset=1.0), 1.0)


@both_offsets
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, FP32), (FP32, BF16)])
def test_a_weight_of_another_dtype(dtype, weight_dtype, offset):
    x, weight, g_out = make(5, 64, dtype=dtype, weight_dtype=weight_dtype, offset=offset)
    check(x, weight, g_out, offset)
    assert rms_norm(x, weight, EPS, offset).dtype == (dtype if offset else FP32)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e6])
def test_rows_of_zeros_and_of_great_and_small_values(scale):
    x, weight, g_out = make(1, 64)
    check((x.detach() * scale).requires_grad_(), weight, g_out)


@pytest.mark.parametrize("lay_out", LAYOUTS)
def test_any_strides(lay_out):
    x, weight, g_out = make(2, 5, 24, dtype=BF16)
    expected = run(rms_norm, (x, weight), g_out, EPS)
    x, g_out = lay_out(x), lay_out(g_out)
    before = [t.detach().clone() for t in (x, g_out)]
    assert_same(run(rms_norm, (x, weight), g_out, EPS), expected)
    assert_same((x, g_out), before)


@pytest.mark.parametrize(("rows", "C"), [(50, 100), (11, 2100)])
def test_weight_gradients_of_many_blocks_are_exact_and_repeat(rows, C, monkeypatch):
    monkeypatch.setattr(launch, "_WEIGHT_GRAD_PROGRAMS", 3)
    x, weight, g_out = make(rows, C)
    check(x, weight, g_out)
    assert_same(run(rms_norm, (x, weight), g_out, EPS), run(rms_norm, (x, weight), g_out, EPS))


def test_rows_past_two_to_the_31():
    x, weight, g_out = make(3, 24, dtype=BF16)
    expected = run(rms_norm, (x, weight), g_out, EPS)
    assert_same(run(rms_norm, (far_rows(x), weight), far_rows(g_out, 512), EPS), expected)


# Of a sum


def joined(x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Both outputs, one behind the other."""
    return torch.cat(add_rms_norm(x, added, weight, eps, offset), dim=-1)


def plain_joined(x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    total = x + added
    return torch.cat([total, plain_norm(total, weight, eps, offset)], dim=-1)


@both_offsets
@all_dtypes
def test_sums_are_no_less_exact(dtype, offset):
    """Of the sum as rounded: the paths round it alike, and what follows is judged."""
    x, weight, g_out = make(37, 200, dtype=dtype, offset=offset)
    added = torch.randn_like(x).requires_grad_()

    def exact(x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        rounding = ((x + added).to(dtype).double() - (x + added)).detach()
        return plain_joined(x, added + rounding, weight, eps, offset)

    g_out = torch.cat([torch.randn_like(g_out), g_out], dim=-1)
    assert_no_worse(
        joined, plain_joined, [x, added, weight], g_out, EPS, offset, exact=exact, has_oracle=False
    )


@pytest.mark.parametrize(("dtype", "added_dtype"), [(BF16, BF16), (FP32, BF16), (BF16, FP32)])
def test_the_bits_are_those_of_the_sum_and_of_its_norm(dtype, added_dtype):
    """A residual may be in float32 under autocast."""
    x, weight, g_out = make(37, 200, dtype=dtype, weight_dtype=FP32)
    added = torch.randn_like(x).to(added_dtype).requires_grad_()
    total, normed = add_rms_norm(x, added, weight, EPS)
    assert_same((total, normed), (x + added, rms_norm(x + added, weight, EPS)))
    grads = torch.autograd.grad(normed, (x, added), g_out.to(normed.dtype), retain_graph=True)
    assert [g.dtype for g in grads] == [dtype, added_dtype]
    of_total = torch.autograd.grad(total, (x, added, weight), torch.ones_like(total), allow_unused=True)
    assert of_total[2] is None
    assert all(g.eq(1).all() for g in of_total[:2])
    assert_same(add_rms_norm(x, None, weight, EPS), (x, rms_norm(x, weight, EPS)))

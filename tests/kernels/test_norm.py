"""rms_norm against float64 truth, under Triton's interpreter without a GPU and on the GPU with one.

The yardstick is what transformers computes in the same dtypes; `exactness.assert_no_worse` states the slack.
"""

import pytest
import torch
from exactness import (
    DEVICE,
    LAYOUTS,
    assert_no_sync,
    assert_no_worse,
    assert_same,
    far_rows,
    run,
)
from torch import Tensor

from unsloth_pack.kernels import norm, rms_norm

pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6


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


# Numerics


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("trained", [True, False])
def test_no_less_exact_than_the_plain_path(trained, dtype, offset):
    for shape in ((2, 9, 64), (37, 200)):
        check(*make(*shape, dtype=dtype, offset=offset, trained=trained), offset)


@pytest.mark.parametrize("C", [2, 7, 64, 100, 896, 1536, 5000, 16384])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_ragged_shapes(rows, C):
    check(*make(rows, C))
    check(*make(rows, C, dtype=BF16, offset=1.0), 1.0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, FP32), (FP16, FP32), (FP32, BF16), (BF16, FP16)])
def test_a_weight_of_another_dtype(dtype, weight_dtype, offset):
    x, weight, g_out = make(5, 64, dtype=dtype, weight_dtype=weight_dtype, offset=offset)
    check(x, weight, g_out, offset)
    assert rms_norm(x, weight, EPS, offset).dtype == (dtype if offset else FP32)


def test_rows_of_zeros_and_of_great_and_small_values():
    x, weight, g_out = make(6, 64)
    scale = torch.tensor([0.0, 1e-6, 1e-3, 1e3, 1e6, 1.0], device=DEVICE)[:, None]
    for row in range(6):  # each alone, because a small row's gradient outweighs the others' errors
        check((x.detach() * scale)[row : row + 1].requires_grad_(), weight, g_out[row : row + 1])
    out, gx, _ = run(rms_norm, ((x.detach() * scale).requires_grad_(), weight), g_out, EPS)
    assert (out[0] == 0).all()
    assert out.isfinite().all()
    assert gx.isfinite().all()


# Layouts


@pytest.mark.parametrize("lay_out", LAYOUTS)
@pytest.mark.parametrize("lay_out_gradient", LAYOUTS)
def test_any_strides(lay_out, lay_out_gradient):
    x, weight, g_out = make(2, 5, 24, dtype=BF16)
    expected = run(rms_norm, (x, weight), g_out, EPS)
    x, g_out = lay_out(x), lay_out_gradient(g_out)
    before = [t.detach().clone() for t in (x, weight, g_out)]
    results = run(rms_norm, (x, weight), g_out, EPS)
    assert_same(results, expected)
    assert results[0].is_contiguous()
    assert results[1].is_contiguous()
    assert_same((x, weight, g_out), before)
    check(x, weight, g_out)


# The gradients


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_frozen_weight_costs_nothing(offset, monkeypatch):
    backward, asked = norm._norm_backward, []
    monkeypatch.setattr(norm, "_norm_backward", lambda *a: asked.append(a[5]) or backward(*a))
    for trained in (False, True):
        x, weight, g_out = make(5, 64, offset=offset, trained=trained)
        assert len(run(rms_norm, (x, weight), g_out, EPS, offset)) == 2 + trained
    assert asked == [False, True]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("rows", "C"), [(50, 100), (11, 2100), (7, 1024)])
def test_weight_gradients_of_many_blocks_are_exact_and_repeat(rows, C, dtype, monkeypatch):
    monkeypatch.setattr(norm, "_WEIGHT_GRAD_PROGRAMS", 3)
    assert rows // norm._choose_blocks(C, 2)[0] >= 3 or C == 100
    x, weight, g_out = make(rows, C, dtype=dtype)
    check(x, weight, g_out)
    assert_same(run(rms_norm, (x, weight), g_out, EPS), run(rms_norm, (x, weight), g_out, EPS))


# 64-bit indices


def test_rows_past_two_to_the_31():
    x, weight, g_out = make(3, 24, dtype=BF16)
    expected = run(rms_norm, (x, weight), g_out, EPS)
    assert_same(run(rms_norm, (far_rows(x), weight), g_out, EPS), expected)
    assert_same(run(rms_norm, (x, weight), far_rows(g_out, 512), EPS), expected)


# Dispatch and errors


@pytest.mark.gpu
def test_never_synchronises():
    x, weight, g_out = make(64, 896, dtype=BF16)
    assert_no_sync(lambda: run(rms_norm, (x, weight), g_out, EPS))

"""add_rms_norm against float64 truth and against the sum and the norm one after the other."""

import pytest
import torch
from exactness import DEVICE, LAYOUTS, assert_no_worse, assert_same, run
from test_norm import BF16, EPS, FP16, FP32, make, plain_norm
from torch import Tensor

from unsloth_pack.kernels import add_rms_norm, rms_norm

pytest.importorskip("triton")


def inputs_of(*shape, dtype=FP32, added_dtype=None, **options) -> tuple[list[Tensor], Tensor]:
    """x, what is added and the weight; and the gradient of both outputs, one behind the other."""
    x, weight, g_out = make(*shape, dtype=dtype, **options)
    added = torch.randn(shape).to(DEVICE, added_dtype or dtype).requires_grad_()
    return [x, added, weight], torch.cat([torch.randn_like(g_out), g_out], dim=-1)


def joined(x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return torch.cat(add_rms_norm(x, added, weight, eps, offset), dim=-1)


def joined_alone(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return torch.cat(add_rms_norm(x, None, weight, eps, offset), dim=-1)


def plain(x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    total = x + added
    return torch.cat([total, plain_norm(total, weight, eps, offset)], dim=-1)


def plain_alone(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return torch.cat([x, plain_norm(x, weight, eps, offset)], dim=-1)


def check(inputs: list[Tensor], g_out: Tensor, offset: float = 0.0) -> None:
    """Of the sum as rounded: the paths round it alike, and what follows is judged."""
    x, added, weight = inputs
    dtype = torch.promote_types(x.dtype, added.dtype)

    def exact(x: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        rounding = ((x + added).to(dtype).double() - (x + added)).detach()
        return plain(x, added + rounding, weight, eps, offset)

    assert_no_worse(joined, plain, inputs, g_out, EPS, offset, exact=exact)
    assert_no_worse(joined_alone, plain_alone, (x, weight), g_out, EPS, offset)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("trained", [True, False])
def test_no_less_exact_than_the_plain_path(trained, dtype, offset):
    for shape in ((2, 9, 64), (37, 200)):
        check(*inputs_of(*shape, dtype=dtype, offset=offset, trained=trained), offset)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_the_bits_are_those_of_the_sum_and_of_its_norm(dtype):
    (x, added, weight), _ = inputs_of(37, 200, dtype=dtype)
    total, normed = add_rms_norm(x, added, weight, EPS)
    assert_same((total, normed), (x + added, rms_norm(x + added, weight, EPS)))
    total, normed = add_rms_norm(x, None, weight, EPS)
    assert_same((total, normed), (x, rms_norm(x, weight, EPS)))
    assert total.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(("dtype", "added_dtype"), [(FP32, BF16), (BF16, FP32), (FP16, BF16)])
def test_dtypes_that_differ(dtype, added_dtype):
    """A residual in float32 under autocast."""
    (x, added, weight), _ = inputs_of(5, 64, dtype=dtype, added_dtype=added_dtype, weight_dtype=FP32)
    wide = torch.promote_types(dtype, added_dtype)
    g_out = torch.randn(5, 128, device=DEVICE).to(wide)
    total, normed = add_rms_norm(x, added, weight, EPS)
    assert total.dtype == wide
    assert_same((total, normed), (x + added, rms_norm(x + added, weight, EPS)))
    grads = torch.autograd.grad((total, normed), (x, added), (g_out[:, :64], g_out[:, 64:].to(normed.dtype)))
    assert [g.dtype for g in grads] == [dtype, added_dtype]
    assert_same(
        [grads[0].to(wide).to(added_dtype)], [grads[1]] if wide == dtype else [grads[0].to(added_dtype)]
    )


@pytest.mark.parametrize("lay_out", LAYOUTS)
@pytest.mark.parametrize("lay_out_gradient", LAYOUTS)
def test_any_strides(lay_out, lay_out_gradient):
    (x, added, weight), g_out = inputs_of(2, 5, 24, dtype=BF16)
    expected = run(joined, (x, added, weight), g_out, EPS)
    x, added, g_out = lay_out(x), lay_out(added), lay_out_gradient(g_out)
    before = [t.detach().clone() for t in (x, added, weight, g_out)]
    assert_same(run(joined, (x, added, weight), g_out, EPS), expected)
    assert_same((x, added, weight, g_out), before)
    check([x, added, weight], g_out)


@pytest.mark.parametrize("reaches", ["the sum", "the norm"])
@pytest.mark.parametrize("adds", [True, False])
def test_a_gradient_that_reaches_one_output(adds, reaches):
    (x, added, weight), g_out = inputs_of(9, 64)
    g_out = g_out[:, :64]
    added = added if adds else None
    leaves = [x, *([added] if adds else [])]
    number = ["the sum", "the norm"].index(reaches)
    found = torch.autograd.grad(
        add_rms_norm(x, added, weight, EPS)[number], [*leaves, weight], g_out, allow_unused=True
    )
    if number == 0:
        assert_same(found[:-1], [g_out] * len(leaves))
        assert found[-1] is None
        return
    total = (x + added if adds else x).detach().requires_grad_()
    expected = run(rms_norm, (total, weight), g_out, EPS)
    assert_same(found, [expected[1]] * len(leaves) + [expected[2]])

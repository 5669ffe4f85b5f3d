"""add_rms_norm against float64 truth and against the sum and the norm one after the other."""

import pytest
import torch
from exactness import DEVICE, LAYOUTS, assert_no_worse, assert_same, far_rows, run, saved_by
from test_norm import BF16, EPS, FP16, FP32, make, plain_norm
from torch import Tensor

from unsloth_pack.kernels import add_rms_norm, reference, rms_norm

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


@pytest.mark.parametrize("C", [2, 7, 100, 896, 5000])
@pytest.mark.parametrize("rows", [1, 33])
def test_ragged_shapes(rows, C):
    check(*inputs_of(rows, C))
    check(*inputs_of(rows, C, dtype=BF16, offset=1.0), 1.0)


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


def test_a_frozen_sum_under_a_trained_weight():
    (x, added, weight), g_out = inputs_of(9, 64)
    expected = run(joined, (x, added, weight), g_out, EPS)
    found = run(joined, (x.detach(), added.detach(), weight), g_out, EPS)
    assert_same(found, [expected[0], expected[3]])


def test_nothing_but_the_sum_and_the_weight_is_saved():
    (x, added, weight), _ = inputs_of(5, 64)
    made = []
    saved = saved_by(lambda: made.extend(add_rms_norm(x, added, weight, EPS)))
    assert saved == {made[0].data_ptr(), weight.data_ptr()}
    assert saved_by(lambda: add_rms_norm(x, None, weight, EPS)) == {x.data_ptr(), weight.data_ptr()}


def test_weight_gradients_of_many_blocks(monkeypatch):
    from unsloth_pack.kernels import norm

    monkeypatch.setattr(norm, "_WEIGHT_GRAD_PROGRAMS", 3)
    inputs, g_out = inputs_of(50, 1024, dtype=BF16)
    check(inputs, g_out)
    assert_same(run(joined, inputs, g_out, EPS), run(joined, inputs, g_out, EPS))


def test_rows_past_two_to_the_31():
    (x, added, weight), g_out = inputs_of(3, 24, dtype=BF16)
    expected = run(joined, (x, added, weight), g_out, EPS)
    assert_same(run(joined, (far_rows(x), added, weight), g_out, EPS), expected)
    assert_same(run(joined, (x, far_rows(added), weight), g_out, EPS), expected)


def test_an_overwritten_sum_is_noticed():
    (x, added, weight), g_out = inputs_of(5, 64)
    total, normed = add_rms_norm(x, added, weight, EPS)
    with torch.no_grad():
        total.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        normed.backward(g_out[:, :64])


def test_the_reference_gives_a_view_where_nothing_is_added():
    x = torch.randn(3, 4)
    assert reference.add_rms_norm(x, None, torch.ones(4), EPS)[0].data_ptr() == x.data_ptr()

"""gated against float64 truth, under Triton's interpreter without a GPU and on the GPU with one.

The yardstick is what transformers computes in the same dtypes; `exactness.assert_no_worse` states the slack.
"""

import pytest
import torch
import torch.nn.functional as F
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

from unsloth_pack.kernels import gated

pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
both_activations = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])


def plain_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """transformers' gated MLPs: the activation rounds, then the product."""
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def exact_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Without the 1 + tanh that cancels, in float64 too, where the gate is far below zero."""
    z = gate if activation == "silu" else (8 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(z) * up


def make(*shape: int, dtype=FP32, up_dtype=None) -> list[Tensor]:
    """gate, up and the gradient of the output."""
    dtypes = dtype, up_dtype or dtype
    gate, up = ((2 * torch.randn(shape)).to(DEVICE, d).requires_grad_() for d in dtypes)
    return [gate, up, torch.randn(shape).to(DEVICE, torch.promote_types(*dtypes))]


def check(gate: Tensor, up: Tensor, g_out: Tensor, activation: str) -> None:
    assert_no_worse(gated, plain_gated, (gate, up), g_out, activation, exact=exact_gated)


# Numerics


@both_activations
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_no_less_exact_than_the_plain_path(dtype, activation):
    for shape in ((2, 9, 64), (37, 200)):
        check(*make(*shape, dtype=dtype), activation)


@both_activations
@pytest.mark.parametrize("F", [1, 2, 7, 1023, 1024, 1025, 4864])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_ragged_shapes(rows, F, activation):
    gate, up, g_out = make(rows, F)
    check(gate, up, g_out, activation)
    check(*halves(gate, up), g_out, activation)


@both_activations
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gates_far_from_zero_and_at_it(activation, dtype):
    gate = torch.tensor([0.0, -0.0, 1e-30, 3, -3, 8, -8, 20, -20, 90, -90, 1e4, -1e4]).to(DEVICE, dtype)
    for i in range(len(gate)):  # each alone, because the great ones outweigh the others' errors
        one = gate[i : i + 1].clone().requires_grad_()
        ones = torch.ones_like(one)
        results = run(gated, (one, ones.clone().requires_grad_()), ones, activation)
        assert all(x.isfinite().all() for x in results)
        check(one, ones.clone().requires_grad_(), ones, activation)


# Layouts


def halves(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The same values as the halves of one projection's output."""
    gate_half, up_half = torch.cat([gate.detach(), up.detach()], dim=-1).chunk(2, dim=-1)
    return gate_half.requires_grad_(), up_half.requires_grad_()


@pytest.mark.parametrize("lay_out", LAYOUTS)
@pytest.mark.parametrize("which", ["gate", "up", "gradient", "gate and gradient", "gate and up"])
def test_any_strides(lay_out, which):
    gate, up, g_out = make(2, 5, 24, dtype=BF16)
    expected = run(gated, (gate, up), g_out, "silu")
    gate = lay_out(gate) if "gate" in which else gate
    up = lay_out(up) if "up" in which else up
    g_out = lay_out(g_out) if "gradient" in which else g_out
    before = [t.detach().clone() for t in (gate, up, g_out)]
    results = run(gated, (gate, up), g_out, "silu")
    assert_same(results, expected)
    assert all(x.is_contiguous() for x in results)
    assert_same((gate, up, g_out), before)


# The gradients


# 64-bit indices


def test_rows_past_two_to_the_31():
    gate, up, g_out = make(3, 24, dtype=BF16)
    expected = run(gated, (gate, up), g_out, "silu")
    assert_same(run(gated, (far_rows(gate), up), g_out, "silu"), expected)
    assert_same(run(gated, (gate, far_rows(up)), g_out, "silu"), expected)
    assert_same(run(gated, (gate, up), far_rows(g_out, 512), "silu"), expected)


# Dispatch and errors


@pytest.mark.gpu
def test_never_synchronises():
    gate, up, g_out = make(64, 896, dtype=BF16)
    assert_no_sync(lambda: run(gated, (gate, up), g_out, "silu"))

"""gated, relu2 and xielu against float64 truth, under Triton's interpreter or on the GPU.

The yardstick is what transformers computes in the same dtypes; `exactness.assert_no_worse` states the slack.
"""

import pytest
import torch
from exactness import DEVICE, LAYOUTS, assert_no_worse, assert_same, far_rows, run
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2CLS

from unsloth_pack.kernels import gated, relu2, xielu

pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BETA, EPS = 0.5, -1e-6
both_activations = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
all_dtypes = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)


def plain_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """transformers' gated MLPs: the activation rounds, then the product."""
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def exact_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Without the 1 + tanh that cancels, in float64 too, where the gate is far below zero."""
    z = gate if activation == "silu" else (8 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * torch.sigmoid(z) * up


def make(*shape: int, dtype=FP32) -> list[Tensor]:
    """gate, up and the gradient of the output."""
    gate, up = ((2 * torch.randn(shape)).to(DEVICE, dtype).requires_grad_() for _ in "gu")
    return [gate, up, torch.randn(shape).to(DEVICE, dtype)]


def check(gate: Tensor, up: Tensor, g_out: Tensor, activation: str, **how) -> None:
    assert_no_worse(gated, plain_gated, (gate, up), g_out, activation, exact=exact_gated, **how)


@both_activations
@all_dtypes
def test_no_less_exact_than_the_plain_path(dtype, activation):
    for shape in ((2, 9, 64), (37, 200)):
        check(*make(*shape, dtype=dtype), activation)


@both_activations
@pytest.mark.parametrize("F", [1, 7, 1025])
def test_ragged_shapes(F, activation):
    gate, up, g_out = make(3, F)
    check(gate, up, g_out, activation)
    halves = torch.cat([gate.detach(), up.detach()], dim=-1).chunk(2, dim=-1)  # of one projection's output
    check(*(half.requires_grad_() for half in halves), g_out, activation)


@both_activations
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gates_far_from_zero_and_at_it(activation, dtype):
    gate = torch.tensor([0.0, 1e-30, 3, -8, 20, -20, 90, -90, 1e4, -1e4]).to(DEVICE, dtype)
    for i in range(len(gate)):  # each alone, because the great ones outweigh the others' errors
        one = gate[i : i + 1].clone().requires_grad_()
        ones = torch.ones_like(one)
        check(one, ones.clone().requires_grad_(), ones, activation, has_oracle=False)  # torch's gelu cancels


@pytest.mark.parametrize("lay_out", LAYOUTS)
@pytest.mark.parametrize("which", ["gate", "up and gradient"])
def test_any_strides(lay_out, which):
    gate, up, g_out = make(2, 5, 24, dtype=BF16)
    expected = run(gated, (gate, up), g_out, "silu")
    gate = lay_out(gate) if "gate" in which else gate
    up, g_out = (lay_out(up), lay_out(g_out)) if "up" in which else (up, g_out)
    before = [t.detach().clone() for t in (gate, up, g_out)]
    assert_same(run(gated, (gate, up), g_out, "silu"), expected)
    assert_same((gate, up, g_out), before)


def test_rows_past_two_to_the_31():
    gate, up, g_out = make(3, 24, dtype=BF16)
    expected = run(gated, (gate, up), g_out, "silu")
    assert_same(run(gated, (far_rows(gate), up), far_rows(g_out, 512), "silu"), expected)


# Without a gate


def alphas(dtype=FP32) -> list[Tensor]:
    """Trained ones, far from their first values, in xIELU's own form."""
    return [torch.tensor([a], dtype=dtype, device=DEVICE).requires_grad_() for a in (-0.75, 0.5)]


def plain_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """transformers' module with these parameters."""
    module = ACT2CLS["xielu"](beta=BETA, dtype=x.dtype).to(x.device)
    del module.alpha_p, module.alpha_n
    module.alpha_p, module.alpha_n = alpha_p, alpha_n
    return module(x)


def our_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    return xielu(x, alpha_p, alpha_n, *(torch.tensor(c, device=x.device) for c in (BETA, EPS)))


def exact_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """transformers' formula; at 0 its slope from above."""
    negative = (BETA + F.softplus(alpha_n)) * (x.clamp(max=EPS).expm1() - x)
    return torch.where(x >= 0, F.softplus(alpha_p) * x * x, negative) + BETA * x


@all_dtypes
@pytest.mark.parametrize("shape", [(37, 200), (1,), (1025,), (0, 5)], ids=str)
def test_activations_without_a_gate(dtype, shape):
    x, _, g_out = make(*shape, dtype=dtype)
    assert_no_worse(relu2, ACT2CLS["relu2"](), (x,), g_out)
    assert_no_worse(our_xielu, plain_xielu, (x, *alphas(dtype)), g_out, exact=exact_xielu)


@pytest.mark.parametrize("near", [0.0, -1.0, -1e-5, -30.0])
def test_xielu_near_zero_and_where_its_series_ends(near):
    x, _, g_out = make(500)
    x = (near + x.detach() * max(abs(near), 1e-3) * 0.1).requires_grad_()
    frozen = [alpha.detach() for alpha in alphas()]  # sums of so small numbers are luck
    assert_no_worse(our_xielu, plain_xielu, (x, *frozen), g_out, exact=exact_xielu)

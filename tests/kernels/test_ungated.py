"""relu2 and xielu against float64 truth; the yardstick is transformers' module in the same dtype."""

import pytest
import torch
from exactness import DEVICE, assert_no_worse, run
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2CLS

from unsloth_pack.kernels import relu2, xielu

pytest.importorskip("triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BETA, EPS = 0.5, -1e-6


def make(*shape: int, dtype=FP32) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output."""
    return (2 * torch.randn(shape)).to(DEVICE, dtype).requires_grad_(), torch.randn(shape).to(DEVICE, dtype)


def alphas(dtype=FP32) -> list[Tensor]:
    """Trained ones, far from their first values, in xIELU's own form, and beta."""
    return [torch.tensor([a], dtype=dtype, device=DEVICE).requires_grad_() for a in (-0.75, 0.5)]


def plain_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """transformers' module with these parameters."""
    module = ACT2CLS["xielu"](beta=BETA, dtype=x.dtype).to(x.device)
    del module.alpha_p, module.alpha_n
    module.alpha_p, module.alpha_n = alpha_p, alpha_n
    return module(x)


def plain_relu2(x: Tensor) -> Tensor:
    return ACT2CLS["relu2"]()(x)


def our_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    return xielu(x, alpha_p, alpha_n, *(torch.tensor(c, device=x.device) for c in (BETA, EPS)))


def exact_xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """transformers' formula; at 0 its slope from above."""
    negative = (BETA + F.softplus(alpha_n)) * (x.clamp(max=EPS).expm1() - x)
    return torch.where(x >= 0, F.softplus(alpha_p) * x * x, negative) + BETA * x


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(2, 9, 64), (37, 200), (1,), (1025,), (0, 5)], ids=str)
def test_no_less_exact_than_the_plain_path(dtype, shape):
    x, g_out = make(*shape, dtype=dtype)
    assert_no_worse(relu2, plain_relu2, (x,), g_out)
    assert_no_worse(our_xielu, plain_xielu, (x, *alphas(dtype)), g_out, exact=exact_xielu)


@pytest.mark.parametrize("near", [0.0, -1.0, 1e-5, -1e-5, -3.0, -30.0])
def test_no_less_exact_near_zero_and_where_the_series_ends(near):
    x, g_out = make(500)
    x = (near + x.detach() * max(abs(near), 1e-3) * 0.1).requires_grad_()
    assert_no_worse(our_xielu, plain_xielu, (x, *alphas()), g_out, exact=exact_xielu)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_the_slope_of_xielu_at_zero_is_beta(dtype):
    """transformers' is beta - alpha_n there, and between eps and 0, where ours is the same."""
    x = torch.tensor([0.0, -0.0, 1e-20, -1e-20, -1e-7, -2e-6], dtype=dtype, device=DEVICE).requires_grad_()
    ours, plain = (run(f, (x, *alphas(dtype)), torch.ones_like(x))[1] for f in (our_xielu, plain_xielu))
    assert ours[:3].eq(BETA).all()
    assert plain[:2].lt(0).all()
    torch.testing.assert_close(ours[3:], plain[3:])


def test_what_is_not_finite_stays_so():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], device=DEVICE).requires_grad_()
    for ours, plain, more in ((relu2, plain_relu2, []), (our_xielu, plain_xielu, alphas())):
        got, want = (run(f, (x, *more), torch.ones_like(x)) for f in (ours, plain))
        assert torch.equal(got[0].isfinite(), want[0].isfinite())
        assert got[0][0].isnan()
        assert got[0][3].isfinite()

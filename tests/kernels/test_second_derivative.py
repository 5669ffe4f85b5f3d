"""What holds for every kernel.

A second derivative is refused, since torch would drop its terms where the incoming gradient is a constant. A
checkpoint hands out every saved tensor once.
"""

import pytest
import torch
from exactness import DEVICE
from torch.utils.checkpoint import checkpoint

from unsloth_pack.errors import InputError
from unsloth_pack.kernels import (
    QKNorm,
    add_rms_norm,
    gated,
    linear_cross_entropy,
    relu2,
    rms_norm,
    rope_qk,
    token_scores,
    varlen_attention,
    xielu,
)


def tables(T=3, R=8):
    angles = torch.randn(T, R)
    return angles.cos(), angles.sin()


def head(x):
    return x.view(-1, 8), torch.ones(5, 8), torch.arange(x.numel() // 8) % 5


def qk_norm():
    return QKNorm(torch.ones(8), torch.ones(8), 1e-6)


CALLS = {
    "rms_norm": lambda x: rms_norm(x, torch.ones(8), 1e-6),
    "add_rms_norm": lambda x: add_rms_norm(x, x, torch.ones(8), 1e-6)[1],
    "gated": lambda x: gated(x, x, "silu"),
    "rope_qk": lambda x: rope_qk(x, x, *tables())[0],
    "rope_qk with a norm": lambda x: rope_qk(x, x, *tables(), qk_norm=qk_norm())[0],
    "relu2": lambda x: relu2(x),
    "xielu": lambda x: xielu(x, *map(torch.tensor, ([0.2], [-1.0], 0.5, -1e-6))),
    "linear_cross_entropy": lambda x: linear_cross_entropy(*head(x)),
    "token_scores": lambda x: token_scores(*head(x)).log_prob,
    "varlen_attention": lambda x: varlen_attention(x, x, x, torch.tensor([0, 3]).int(), scale=0.3),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_is_refused(call):
    with torch.device(DEVICE):
        x = torch.randn(3, 2, 8, requires_grad=True)
        with pytest.raises(InputError, match="create_graph=True: a fused operation has no second derivative"):
            torch.autograd.grad(call(x).sum(), x, create_graph=True)
        torch.autograd.grad(call(x).sum(), x)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_checkpoint_recomputes_it(call):
    with torch.device(DEVICE):
        x = torch.randn(3, 2, 8, requires_grad=True)
        gradients = []
        for run in (call, lambda x: checkpoint(call, x, use_reentrant=False)):
            torch.manual_seed(1)
            gradients += torch.autograd.grad(run(x).sum(), x)
        assert torch.equal(*gradients)

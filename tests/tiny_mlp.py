"""A gated MLP, and what it makes of an input."""

import torch
from tiny import DEVICE
from torch import nn
from torch.nn import functional as F

WIDTH, FEATURES, TOKENS = 64, 192, 300
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class MLP(nn.Module):
    def __init__(self, joined=False, bias=False, activation="silu"):
        super().__init__()
        self.activation = activation
        if joined:
            self.gate_up_proj = nn.Linear(WIDTH, 2 * FEATURES, bias=bias)
        else:
            self.gate_proj, self.up_proj = (nn.Linear(WIDTH, FEATURES, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(FEATURES, WIDTH, bias=bias)

    @property
    def inner(self):
        return [self.gate_up_proj] if hasattr(self, "gate_up_proj") else [self.gate_proj, self.up_proj]

    def forward(self, x):
        outputs = [layer(x) for layer in self.inner]
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up)


def inputs(dtype, n_tokens=TOKENS):
    generator = torch.Generator().manual_seed(2)
    x, g = (torch.randn(1, n_tokens, WIDTH, generator=generator).bfloat16() for _ in range(2))
    return x.to(DEVICE, dtype), g.to(DEVICE, dtype)


def outcome(peft_model, run, x, g, again=False):
    x = x.clone().requires_grad_()
    y = run(x)
    trained = {name: p for name, p in peft_model.named_parameters() if p.requires_grad}
    if again:
        torch.autograd.grad(y, [x, *trained.values()], g, retain_graph=True)
    grads = torch.autograd.grad(y, [x, *trained.values()], g)
    assert all(p.dtype == grad.dtype for p, grad in zip([x, *trained.values()], grads, strict=True))
    named = dict(zip(["y", "x", *trained], [y.detach(), *grads], strict=True))
    return {name: value.double() for name, value in named.items()}

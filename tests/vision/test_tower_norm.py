"""Norms in the layers of towers under autocast: 16 bits in and out, and as right as the wide ones."""

import image_models
import pytest
import torch
from tiny import DEVICE, error
from torch import nn
from torch.nn import functional as F

from unsloth_pack import patch_model
from unsloth_pack.layers.vision.tower import FastTowerNorm

BF16 = torch.bfloat16


class Norm(FastTowerNorm, nn.LayerNorm):
    """As a patch makes it."""


def drawn(dtype):
    torch.manual_seed(0)
    norm, linear = Norm(96), nn.Linear(96, 40)
    nn.init.normal_(norm.weight, 1, 0.3)
    nn.init.normal_(norm.bias)
    x, weights = torch.randn(70, 96), torch.randn(70, 40)
    modules = nn.Sequential(norm, linear).to(BF16).to(DEVICE, dtype)
    return modules, x.to(DEVICE, BF16).to(dtype).requires_grad_(), weights.to(DEVICE, BF16).to(dtype)


def grads(forward, modules, x, weights):
    out = forward(x)
    found = torch.autograd.grad((out * weights).sum(), [x, *modules.parameters()])
    return [out, *found]


@pytest.mark.gpu
def test_a_norm_under_autocast_stays_in_16_bits_and_is_as_right_as_a_wide_one():
    modules, *given = drawn(torch.float64)
    truth = grads(modules, modules, *given)
    modules, *given = drawn(BF16)
    norm, linear = modules

    def wide(x):
        return linear(F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps))

    with torch.autocast(DEVICE, BF16):
        assert norm(given[0]).dtype == BF16
        assert F.layer_norm(given[0], norm.normalized_shape).dtype == torch.float32  # what autocast does
        ours, plain = (grads(forward, modules, *given) for forward in (modules, wide))
    for got, theirs, exact in zip(ours, plain, truth, strict=True):
        assert error(got.double(), exact) <= 1.1 * error(theirs.double(), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_norm_of_another_dtype_is_autocasts(dtype):
    modules, x, _ = drawn(dtype)
    with torch.autocast(DEVICE, BF16):
        assert modules[0](x).dtype == torch.float32
    assert modules[0](x).dtype == dtype


@pytest.mark.parametrize("name", image_models.MODELS)
def test_the_norms_of_layers_alone_are_swapped(name):
    """Not those behind the last layer: what reads their output may want it wide. Qwen2.5-VL's and Mistral 3's
    are RMS norms."""
    model = image_models.made(name, torch.float32)
    patch_model(model)
    fast = {
        path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, FastTowerNorm)
    }
    others = {"internvl": {"layernorm_before", "layernorm_after"}, "qwen2_5_vl": set(), "mistral3": set()}
    of_qwen = {"norm1", "norm2"} if name in image_models.GRIDS else {"layer_norm1", "layer_norm2"}
    assert fast == others.get(name, of_qwen)

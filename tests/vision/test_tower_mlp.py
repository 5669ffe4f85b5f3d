"""Gated MLPs and norms of towers: as right as transformers' own, and products over aligned rows."""

from unittest.mock import patch

import pytest
import torch
from tiny import DEVICE, error
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLMLP

from unsloth_pack.layers.vision.tower import FastTowerMLP, FastTowerNorm

BF16 = torch.bfloat16
WIDTH = 32


class MLP(FastTowerMLP, Qwen2_5_VLMLP):
    """As a patch makes it."""


def mlp_of(dtype, features, bias=True, kind=MLP):
    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(hidden_size=WIDTH, intermediate_size=features)
    mlp = kind(config, bias=bias)
    for weight in mlp.parameters():
        nn.init.normal_(weight, 0, 0.3)
    return mlp.to(BF16).to(DEVICE, dtype)


def input_of(dtype, rows=517):
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH).to(BF16).to(DEVICE, dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("features", [7, 44, 48])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@torch.no_grad()
def test_an_mlp_is_as_right_as_plain(dtype, features, bias):
    truth = mlp_of(torch.float64, features, bias, Qwen2_5_VLMLP)(input_of(torch.float64))
    plain = mlp_of(dtype, features, bias, Qwen2_5_VLMLP)(input_of(dtype))
    ours = mlp_of(dtype, features, bias)(input_of(dtype))
    assert ours.dtype == dtype
    assert error(ours.double(), truth) <= 1.1 * error(plain.double(), truth) + 1e-7


@pytest.mark.parametrize("features", [44, 48, 107])
def test_gradients_are_as_right_as_plain(features):
    def gradients(mlp, x):
        x.requires_grad_()
        return torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])

    truth = gradients(mlp_of(torch.float64, features, kind=Qwen2_5_VLMLP), input_of(torch.float64))
    plain = gradients(mlp_of(BF16, features, kind=Qwen2_5_VLMLP), input_of(BF16))
    ours = gradients(mlp_of(BF16, features), input_of(BF16))
    for got, theirs, exact in zip(ours, plain, truth, strict=True):
        assert error(got.double(), exact) <= 1.1 * error(theirs.double(), exact)


@pytest.mark.parametrize("given", ["16 bits", "autocast"])
def test_rows_of_products_begin_where_fast_ones_need_them(given):
    """44 features are 88 bytes in 16 bits, and 176 in 32."""
    aligned, linear = [], F.linear

    def watched(x, weight, bias=None):
        out = linear(x, weight, bias)
        aligned.extend(row.stride(0) * out.element_size() % 16 == 0 for row in (x, weight, out))
        return out

    dtype = BF16 if given == "16 bits" else torch.float32
    mlp, x = mlp_of(dtype, 44).requires_grad_(False), input_of(dtype)
    with patch.object(F, "linear", watched), torch.autocast(DEVICE, BF16, enabled=given == "autocast"):
        mlp(x)
        assert aligned == [True] * 9
        aligned.clear()
        Qwen2_5_VLMLP.forward(mlp, x)
        assert not all(aligned)


@pytest.mark.parametrize("change", ["replaced", "hooked", "a layer hooked"])
@torch.no_grad()
def test_what_is_changed_is_obeyed(change):
    ours, plain = (mlp_of(torch.float32, 43, kind=kind) for kind in (MLP, Qwen2_5_VLMLP))
    for mlp in (ours, plain):
        if change == "replaced":
            mlp.act_fn = nn.Tanh()
        else:
            changed = mlp.act_fn if change == "hooked" else mlp.up_proj
            changed.register_forward_hook(lambda module, given, out: 2 * out)
    x = input_of(torch.float32)
    torch.testing.assert_close(ours(x), plain(x))
    assert not torch.allclose(ours(x), mlp_of(torch.float32, 43)(x))


# Norms in the layers of towers under autocast: 16 bits in and out


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

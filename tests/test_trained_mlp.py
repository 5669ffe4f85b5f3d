"""A gated MLP whose own weights train: one node, with every gradient, against plain layers and float64."""

import copy

import pytest
import torch
from tiny import DEVICE, error, random_documents, run_alone, run_packed, tiny_model
from tiny_mlp import ACTIVATIONS, MLP, TOKENS, WIDTH, outcome
from tiny_mlp import inputs as packed_inputs

from unsloth_pack import patch_model
from unsloth_pack.layers.trained_mlp import trained_gated_mlp, trains_fused
from unsloth_pack.memory.checkpointing import enable_checkpointing

LENGTHS = [40, 1, 30, 5]


def mlp_of(joined, bias, activation):
    torch.manual_seed(0)
    return MLP(joined, bias, activation)


def fused(mlp, keep):
    layers = [*mlp.inner, mlp.down_proj]
    assert trains_fused(layers)
    return lambda x: trained_gated_mlp(x, mlp.inner, mlp.down_proj, mlp.activation, keep)


def inputs(dtype):
    return [x.view(2, TOKENS // 2, WIDTH) for x in packed_inputs(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("joined", "bias"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("keep", [True, False])
def test_against_float64(dtype, activation, joined, bias, keep):
    x, g = inputs(dtype)
    rounded = mlp_of(joined, bias, activation).bfloat16().to(DEVICE)
    exact, plain, ours = (copy.deepcopy(rounded).to(wanted) for wanted in (torch.float64, dtype, dtype))
    truth = outcome(exact, exact, x.double(), g.double())
    theirs, got = outcome(plain, plain, x, g), outcome(ours, fused(ours, keep), x, g, again=True)
    assert got.keys() == truth.keys()
    for name, value in truth.items():
        bound = 1.5 * max(error(theirs[name], value), torch.finfo(dtype).eps / 4)
        assert error(got[name], value) <= bound, name


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("frozen", ["gate", "up", "down", "weights", "biases", "x"])
def test_some_of_it_frozen(frozen, keep):
    x, g = inputs(torch.float32)
    models = [mlp_of(False, True, "silu").to(DEVICE) for _ in "ab"]
    found = []
    for mlp, run in zip(models, (models[0], fused(models[1], keep)), strict=True):
        layers = {"gate": mlp.inner[0], "up": mlp.inner[1], "down": mlp.down_proj}
        for name, layer in layers.items():
            is_frozen = frozen == name or (frozen == "weights" and name != "up")
            layer.weight.requires_grad_(not is_frozen)
            layer.bias.requires_grad_(frozen not in (name, "biases"))
        leaf = x.clone().requires_grad_(frozen != "x")
        run(leaf).backward(g)
        found.append([leaf.grad, *(p.grad for p in mlp.parameters())])
    for theirs, ours in zip(*found, strict=True):
        assert (theirs is None) == (ours is None)
        assert theirs is None or error(ours, theirs) < 1e-5


def test_autocast_over_weights_in_float32():
    """As full fine-tuning holds them. The gradient of a weight is summed and kept in float32."""
    x, g = inputs(torch.float32)
    plain, ours = (mlp_of(False, True, "silu").to(DEVICE) for _ in "ab")
    exact = copy.deepcopy(plain).double()
    truth = outcome(exact, exact, x.double(), g.double())
    with torch.autocast(DEVICE, torch.bfloat16):
        theirs = outcome(plain, plain, x, g.bfloat16())
        got = outcome(ours, fused(ours, True), x, g.bfloat16())
    for name, value in truth.items():
        assert error(got[name], value) <= 1.5 * error(theirs[name], value), name


def full(arch, dtype=torch.float64, **overrides):
    model = tiny_model(arch, dtype, **overrides).unload().train()
    return model.requires_grad_(True)


@pytest.mark.parametrize("mode", [False, True, "offload", "auto"])
@pytest.mark.parametrize("arch", ["llama", "phi3", "gemma"])
def test_a_model_that_trains_in_full_takes_a_packed_row(arch, mode):
    documents = random_documents(LENGTHS)
    truth = run_alone(full(arch), documents)
    model = full(arch)
    patch_model(model)
    enable_checkpointing(model, mode)
    ours = run_packed(model, documents)
    assert ours.grads.keys() == truth.grads.keys()
    assert len(ours.grads) == len([*model.parameters()])
    for name, gradient in truth.grads.items():
        assert error(ours.grads[name], gradient) < 1e-5, name  # transformers' norms are in float32

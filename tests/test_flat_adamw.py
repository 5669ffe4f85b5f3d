"""AdamW over one tensor gives what AdamW gives, looks like it, and goes on from its checkpoints."""

import copy
import io

import pytest
import torch
from tiny import DEVICE
from torch.optim import AdamW

from unsloth_pack.cuda_graphs.flat_adamw import FlatAdamW, FlatGradients

SHAPES = [(4, 7), (3,), (7, 4), (4, 7), (1, 1), (33, 5), (3,), (4, 7)]
UPDATES = 4
# A kernel rounds the last elements of a tensor otherwise than the rest
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6}


def weights(dtypes=(torch.float64,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [torch.nn.Parameter(x.to(DEVICE, dtypes[n % len(dtypes)])) for n, x in enumerate(made)]


def groups(parameters):
    """As transformers makes them: matrices decay, the others do not."""
    return [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        {"params": []},
    ]


def optimizer_of(kind, parameters):
    return kind(groups(parameters), lr=0.05, betas=(0.8, 0.95), fused=True)


def give_gradients(parameters, seed, without=()):
    generator = torch.Generator().manual_seed(100 + seed)
    for number, parameter in enumerate(parameters):
        grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.grad = None if number in without else grad


def give_gradients_in_one(parameters, seed, without=()):
    """As a captured step leaves them."""
    give_gradients(parameters, seed, without)
    copies = FlatGradients([p.grad for p in parameters], parameters[0].dtype).copies()
    for parameter, grad in zip(parameters, copies, strict=True):
        parameter.grad = grad


def update(optimizer, parameters, seed, without=(), give=give_gradients):
    give(parameters, seed, without)
    optimizer.step()
    optimizer.zero_grad()


def both(dtypes=(torch.float64,)):
    """Weights and optimizer, flat and as AdamW has them."""
    flat, plain = weights(dtypes), weights(dtypes)
    return (flat, optimizer_of(FlatAdamW, flat)), (plain, optimizer_of(AdamW, plain))


def assert_same(flat, plain):
    """Weights and states, but for rounding."""
    (parameters, optimizer), (expected, reference) = flat, plain
    assert all(map(are_close, parameters, expected))
    found, right = optimizer.state_dict(), reference.state_dict()
    assert found["param_groups"] == right["param_groups"]
    assert found["state"].keys() == right["state"].keys()
    for key, state in right["state"].items():
        assert found["state"][key].keys() == state.keys()
        assert torch.equal(found["state"][key]["step"], state["step"])
        assert all(are_close(found["state"][key][name], value) for name, value in state.items())


def are_close(found, expected):
    assert found.dtype == expected.dtype
    rounding = ROUNDING[found.dtype]
    return torch.allclose(found, expected, rtol=rounding, atol=rounding)


def is_flat(optimizer):
    return optimizer._flat is not None


@pytest.mark.parametrize(
    ("give", "dtypes"),
    [
        (give_gradients, (torch.float64,)),
        (give_gradients_in_one, (torch.float64,)),
        (give_gradients, (torch.float32, torch.float64)),
    ],
)
def test_the_weights_are_adamws(give, dtypes):
    flat, plain = both(dtypes)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)) for _, o in (flat, plain)]
    for seed in range(UPDATES):
        for parameters, optimizer in (flat, plain):
            update(optimizer, parameters, seed, give=give)
        for schedule in schedules:
            schedule.step()
        assert_same(flat, plain)
    assert is_flat(flat[1])


def test_addresses_stay():
    """Captured graphs read them, also of the next training with the same model."""
    parameters = weights()
    optimizer = optimizer_of(FlatAdamW, parameters)
    addresses = [p.data_ptr() for p in parameters]
    update(optimizer, parameters, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    update(optimizer, parameters, 1)
    optimizer_of(FlatAdamW, parameters)
    assert [p.data_ptr() for p in parameters] == addresses


ALL = tuple(range(len(SHAPES)))


@pytest.mark.parametrize(
    ("without", "stays_flat"),
    [([(), (), (0, 5), (), (0, 5), ()], False), ([(), (), (2,), ()], False), ([(), ALL, ()], True)],
)
def test_weights_without_a_gradient(without, stays_flat):
    """AdamW leaves them alone, and counts their steps apart. Without any gradient nothing changes."""
    flat, plain = both()
    for seed, missing in enumerate(without):
        for parameters, optimizer in (flat, plain):
            update(optimizer, parameters, seed, missing)
        assert_same(flat, plain)
    assert is_flat(flat[1]) == stays_flat


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_an_update_that_is_left_out_on_the_device(found):
    flat, plain = both()
    for seed in range(3):
        for parameters, optimizer in (flat, plain):
            optimizer.found_inf = torch.tensor(found if seed == 1 else 0.0, device=DEVICE)
            update(optimizer, parameters, seed)
    assert_same(flat, plain)
    assert is_flat(flat[1])


@pytest.mark.parametrize("change", ["data", "group", "closure", "copy", "steps of another"])
def test_what_others_may_do_to_an_optimizer(change):
    flat, plain = both()
    for parameters, optimizer in (flat, plain):
        update(optimizer, parameters, 0)
    if change == "steps of another":  # a checkpoint whose weights have made different steps
        update(plain[1], plain[0], 3, without=(1,))
        flat[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
        for parameter, value in zip(flat[0], plain[0], strict=True):
            parameter.data.copy_(value)
    if change == "copy":
        flat = copy.deepcopy(flat)
    for parameters, optimizer in (flat, plain):
        if change == "data":
            parameters[2].data = parameters[2].data + 1
        elif change == "group":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, device=DEVICE))]})
        give_gradients(parameters, 1)
        if change == "closure":
            assert optimizer.step(lambda: 5) == 5
        update(optimizer, parameters, 2)
    assert_same(flat, plain)


@pytest.mark.parametrize("before", [AdamW, FlatAdamW])
@pytest.mark.parametrize("after", [AdamW, FlatAdamW])
def test_either_goes_on_from_the_other(before, after):
    one, expected = weights(), weights()
    reference = optimizer_of(AdamW, expected)
    optimizer = optimizer_of(before, one)
    for seed in range(2):
        update(optimizer, one, seed)
    file = io.BytesIO()
    torch.save({"weights": [p.detach() for p in one], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = weights(seed=9)
    resumed = optimizer_of(after, other)
    resumed.load_state_dict(saved["optimizer"])
    for parameter, value in zip(other, saved["weights"], strict=True):
        parameter.data.copy_(value)
    for seed in range(UPDATES):
        update(reference, expected, seed)
        if seed > 1:
            update(resumed, other, seed)
    assert_same((other, resumed), (expected, reference))
    assert after is AdamW or is_flat(resumed)

"""Gradients that are applied as they come, and float32 masters on the host: the same updates, less memory."""

import copy
import io

import pytest
import torch
from tiny import random_documents, tiny_model
from torch.utils.checkpoint import checkpoint
from transformers import Adafactor

from unsloth_pack import InputError, patch_model
from unsloth_pack.training.optimizers import CpuMasterWeights, InBackward, check_host_memory

LENGTHS = [33, 2, 60]
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "fused adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda groups: Adafactor(groups, lr=0.01, scale_parameter=False, relative_step=False),
}


def made(arch="qwen2", dtype=torch.float32, device="cpu", optimizer="adamw", **overrides):
    """A patched model all of which trains, and its optimizer; vectors do not decay."""
    model = tiny_model(arch, dtype, device, lora={"tuning": "full"}, **overrides)
    patch_model(model)
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in weights if p.dim() > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0}]
    return model, OPTIMIZERS[optimizer](groups)


def loss_of(model, seed):
    ids = torch.cat(random_documents(LENGTHS, seed))[None].to(model.device)
    return model(input_ids=ids, labels=ids, packed_seq_lengths=LENGTHS, use_cache=False).loss


def train(model, optimizer, updates, in_backward=False, schedule=None, seeds=0):
    """As a trainer does; returns the norms of the gradients."""
    as_they_come, norms = InBackward(optimizer), []
    for seed in range(seeds, seeds + updates):
        loss = loss_of(model, seed)
        if in_backward:
            as_they_come.begin(loss)
        loss.backward()
        as_they_come.end()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert not (in_backward and gradients)
        norms.append(as_they_come.norm() if in_backward else torch.nn.utils.get_total_norm(gradients))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return torch.stack(norms)


def assert_same(ours, theirs):
    """Weights and states, bit for bit."""
    (model, optimizer), (other, reference) = ours, theirs
    for (name, weight), (_, expected) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(weight, expected), name
    found, right = optimizer.state_dict(), reference.state_dict()
    assert found["param_groups"] == right["param_groups"]
    torch.testing.assert_close(found["state"], right["state"], rtol=0, atol=0)


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize(
    ("optimizer", "tied"), [("adamw", True), ("fused adamw", False), ("momentum", False), ("adafactor", True)]
)
def test_updates_in_the_backward_pass_are_those_after_it(optimizer, tied, device):
    models = [made(device=device, optimizer=optimizer, tie_word_embeddings=tied) for _ in range(2)]
    norms = [
        train(*each, updates=3, in_backward=within, schedule=falling(each[1]))
        for each, within in zip(models, (True, False), strict=True)
    ]
    torch.testing.assert_close(*norms)
    assert_same(*models)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_moments_in_8_bits_are_those_of_updates_after_the_backward_pass(device):
    """bitsandbytes keeps 32 bits for embeddings, as trainers ask it to. That weight is the first of all, and
    every weight comes first where it is updated alone."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    models = []
    for _ in range(2):
        model, optimizer = made(device=device)
        manager.register_module_override(model.get_input_embeddings(), "weight", {"optim_bits": 32})
        models.append((model, bitsandbytes.optim.AdamW8bit(optimizer.param_groups, lr=0.01)))
    try:
        for each, within in zip(models, (True, False), strict=True):
            train(*each, updates=3, in_backward=within)
    finally:
        manager.module_weight_config_triple.clear()
        manager.index2config.clear()
    assert_same(*models)
    (model, optimizer), embedding = models[0], models[0][0].get_input_embeddings().weight
    moments = {weight: optimizer.state[weight]["state1"].dtype for weight in model.parameters()}
    assert moments[embedding] == torch.float32
    assert torch.uint8 in moments.values()


@pytest.mark.parametrize("masters", [False, True])
def test_the_gradients_are_never_there_together(masters):
    model, optimizer = made("llama", torch.bfloat16)
    if masters:
        optimizer = CpuMasterWeights(optimizer)
    weights, together = [*model.parameters()], []
    loss, as_they_come = loss_of(model, 1), InBackward(optimizer)
    as_they_come.begin(loss)
    for weight in weights:
        weight.register_hook(lambda _: together.append(sum(w.grad is not None for w in weights)))
    loss.backward()
    as_they_come.end()
    assert len(together) == len(weights) > 20
    assert max(together) <= 3  # of those that one node of autograd makes


def test_nothing_is_applied_after_a_loss_that_is_not_finite():
    model, optimizer = made()
    train(model, optimizer, 1, in_backward=True)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    as_they_come, loss = InBackward(optimizer), loss_of(model, 1)
    as_they_come.begin(loss * torch.inf)
    loss.backward()
    as_they_come.end()
    optimizer.step()
    torch.testing.assert_close([model.state_dict(), optimizer.state_dict()], before, rtol=0, atol=0)


@pytest.mark.parametrize("masters", [False, True])
def test_no_weight_is_updated_from_the_first_gradient_on_that_is_not_finite(masters):
    model, optimizer = made()
    if masters:
        optimizer = CpuMasterWeights(optimizer)
    before = copy.deepcopy(model.state_dict())
    broken = model.model.layers[1].self_attn.o_proj.weight
    broken.register_hook(lambda gradient: gradient / 0)
    norm = train(model, optimizer, 1, in_backward=True)
    assert not torch.isfinite(norm)
    after = model.state_dict()
    assert all(weight.isfinite().all() for weight in after.values())
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert "model.layers.1.mlp.down_proj.weight" in moved
    assert not any(".layers.0." in name or ".embed_tokens." in name for name in moved)


def test_a_gradient_in_parts_is_refused():
    """Checkpointing that runs a backward pass inside the backward pass makes one for each use of a weight."""
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.ones(2, 4, requires_grad=True)
    once = checkpoint(layer, x, use_reentrant=True)
    loss = checkpoint(layer, once, use_reentrant=True).sum()
    as_they_come = InBackward(optimizer)
    as_they_come.begin(loss)
    with pytest.raises(InputError, match="in parts, and the first part has been applied already; leave out"):
        loss.backward()


# Masters on the host


def with_masters(optimizer="adamw", device="cpu", seeds=0, updates=3, in_backward=False):
    model, own = made("llama", torch.bfloat16, device, optimizer)
    masters = CpuMasterWeights(own)
    train(model, masters, updates, in_backward, falling(masters), seeds)
    return model, masters


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize(("optimizer", "in_backward"), [("adamw", True), ("momentum", False)])
def test_masters_are_what_float32_weights_would_be(optimizer, in_backward, device):
    """Of the same gradients, an ordinary optimizer makes the same float32 weights, bit for bit."""
    model, own = made("llama", torch.bfloat16, device, optimizer)
    weights = [p for group in own.param_groups for p in group["params"]]
    plain = {weight: weight.detach().cpu().float() for weight in weights}
    groups = [{**group, "params": [plain[p] for p in group["params"]]} for group in own.param_groups]
    reference, plain = OPTIMIZERS[optimizer](groups), [*plain.values()]
    masters = CpuMasterWeights(own)
    schedules = [falling(masters), falling(reference)]
    for seed in range(2):  # a third row of one form is captured, whose backward pass runs once
        loss, as_they_come = loss_of(model, seed), InBackward(masters)
        gradients = torch.autograd.grad(loss, weights, retain_graph=True)
        if in_backward:
            as_they_come.begin(loss)
        loss.backward()
        as_they_come.end()
        masters.step()
        masters.zero_grad()
        for weight, gradient in zip(plain, gradients, strict=True):
            weight.grad = gradient.cpu().float()
        reference.step()
        for schedule in schedules:
            schedule.step()
        found = masters.state_dict()["state"]
        for place, (weight, expected) in enumerate(zip(weights, plain, strict=True)):
            assert torch.equal(found[place]["master"], expected)
            assert torch.equal(weight.cpu(), expected.bfloat16())
    moments = [value for state in found.values() for name, value in state.items() if name != "step"]
    assert {(value.dtype, value.device.type) for value in moments} == {(torch.float32, "cpu")}


def test_masters_keep_what_16_bits_lose():
    """Each update is far below half of a weight's last place, and a hundred of them are ten times as much."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = CpuMasterWeights(torch.optim.SGD([weight], lr=2.0**-12))
    for _ in range(128):
        weight.grad = torch.ones_like(weight)
        masters.step()
    assert torch.equal(weight, torch.full((3,), 1 - 2.0**-5, dtype=torch.bfloat16))


def test_masters_go_on_from_their_checkpoint():
    whole = with_masters(updates=4)
    model, masters = with_masters(updates=2)
    saved = io.BytesIO()
    torch.save([model.state_dict(), masters.state_dict()], saved)
    again, own = made("llama", torch.bfloat16)
    weights, state = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
    again.load_state_dict(weights)
    resumed = CpuMasterWeights(own)
    resumed.load_state_dict(state)
    schedule = falling(resumed)
    schedule.last_epoch = 2
    for group in resumed.param_groups:
        group["lr"] = group["initial_lr"] / 3
    train(again, resumed, 2, schedule=schedule, seeds=2)
    assert_same((again, resumed), whole)


def test_masters_leave_out_an_update_that_is_not_finite():
    model, masters = with_masters()
    before = copy.deepcopy([model.state_dict(), masters.state_dict()["state"]])
    loss_of(model, 7).backward()
    masters.found_inf = torch.ones(())
    masters.step()
    torch.testing.assert_close([model.state_dict(), masters.state_dict()["state"]], before, rtol=0, atol=0)
    train(model, masters, 1)
    assert not torch.equal(model.lm_head.weight, before[0]["lm_head.weight"])


def test_masters_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 2**10}))
    with pytest.raises(InputError, match="GiB of host memory, of which"):
        check_host_memory(made()[0])

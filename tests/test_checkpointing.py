"""Recomputing and offloading change no bit; the plan keeps what fits and learns from what a step took."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tiny import DEVICE, random_documents, run_packed, tiny_model

from unsloth_pack import patch_model
from unsloth_pack.cuda_graphs.checkpointing import ActivationOffload, RecomputedLayers
from unsloth_pack.cuda_graphs.memory import GraphMemory
from unsloth_pack.errors import InputError
from unsloth_pack.memory import checkpointing as planning
from unsloth_pack.memory.checkpointing import RecomputePlan, enable_checkpointing

LENGTHS = [33, 2, 64, 1]
MODES = [True, "offload", "auto"]


def checkpointed(mode, arch="llama"):
    model = tiny_model(arch, torch.float32)
    patch_model(model, "sdpa")
    enable_checkpointing(model, mode)
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "gemma4_text"])
def test_no_bit_changes(mode, arch, monkeypatch):
    # Blocks of softcapped logits are a checkpoint within the layer's
    monkeypatch.setattr("unsloth_pack.attention.sdpa._EAGER_BLOCK", 16)
    documents = random_documents(LENGTHS)
    expected = run_packed(checkpointed(False, arch), documents)
    got = run_packed(checkpointed(mode, arch), documents)
    assert torch.equal(got.logits, expected.logits)
    for name, grad in expected.grads.items():
        assert torch.equal(got.grads[name], grad), name


@pytest.mark.parametrize("mode", [True, "offload"])
def test_layers_of_a_capture_draw_the_same_dropout_again(mode):
    """A capture can not put the generator back: seeds are kept. The same bits as without checkpointing."""
    documents, grads = random_documents(LENGTHS), []
    for checkpointing in (False, mode):
        model = tiny_model("llama", torch.float32, lora={"lora_dropout": 0.5})
        patch_model(model, "sdpa")
        enable_checkpointing(model, checkpointing)
        torch.manual_seed(0)
        with RecomputedLayers(model.get_decoder(), GraphMemory()) if checkpointing else nullcontext():
            grads.append(run_packed(model, documents).grads)
    without, within = grads
    for name, grad in without.items():
        assert torch.equal(within[name], grad), name


@pytest.mark.parametrize("n_recomputed", [0, 1, 2])
def test_planned_layers_are_recomputed_and_no_others(n_recomputed, monkeypatch):
    documents = random_documents(LENGTHS)
    expected = run_packed(checkpointed(False), documents)
    model = checkpointed("auto")
    plan = model.get_decoder().recompute_plan
    monkeypatch.setattr(plan, "decide", lambda *_: setattr(plan, "n_recomputed", n_recomputed))
    runs = []
    for number, layer in enumerate(model.get_decoder().layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    got = run_packed(model, documents)
    assert sorted(runs) == sorted([0, 1, *range(n_recomputed)])
    assert all(torch.equal(got.grads[name], grad) for name, grad in expected.grads.items())
    assert str(plan) == f"{n_recomputed} of 2 layers are recomputed"


@pytest.mark.parametrize("mode", ["offload", "auto"])
def test_a_trainer_that_turns_checkpointing_on_leaves_the_mode_as_it_is(mode):
    model = checkpointed(mode)
    layers = model.get_decoder().layers
    chosen = [layer._gradient_checkpointing_func for layer in layers]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(layer._gradient_checkpointing_func is own for layer, own in zip(layers, chosen, strict=True))
    model.enable_input_require_grads()
    has_hook = bool(model.get_input_embeddings()._forward_hooks)
    assert has_hook is (mode == "offload")
    plan = model.get_decoder().recompute_plan
    model.gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in layers)
    assert model.get_decoder().recompute_plan is None
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(layer.gradient_checkpointing for layer in layers)
    assert all(layer._gradient_checkpointing_func is own for layer, own in zip(layers, chosen, strict=True))
    assert model.get_decoder().recompute_plan is plan


class FakeGpu:
    """Memory as the plan reads it, in bytes."""

    def __init__(self, monkeypatch, free):
        self.free, self.allocated, self.peak = free, 0, 0
        monkeypatch.setattr(planning, "free_bytes", lambda device: self.free)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: self.peak)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def step(self, plan, tokens, layer_bytes, beside):
        """The memory of a training step: every kept layer keeps some, then the loss and a backward pass."""
        plan.decide(tokens, torch.device("cuda"))
        at_rest = self.allocated
        for layer in range(plan.n_layers):
            if plan.keeps(layer):
                with plan.measure_layer():
                    self.allocated += layer_bytes * tokens
        self.peak = max(self.peak, self.allocated + beside * tokens)
        self.allocated = at_rest


@pytest.fixture
def plan():
    return RecomputePlan(tiny_model("llama", torch.bfloat16, "cpu").get_decoder())


@pytest.mark.parametrize(("layer_bytes", "beside"), [(500, 2000), (5000, 100), (900, 50_000)])
def test_the_plan_fits_what_it_measured(monkeypatch, plan, layer_bytes, beside):
    plan.n_layers = 40
    for free in (10**8, 5 * 10**7, 2 * 10**7):
        gpu = FakeGpu(monkeypatch, free)
        for tokens in (64, 512, 500, 1000, 1000):
            gpu.step(plan, tokens, layer_bytes, beside)
        n_kept = plan.n_layers - plan.n_recomputed
        if beside * 1000 > free:
            assert n_kept == 0
            continue
        beside = max(beside, layer_bytes)  # a backward pass works in one layer's worth at least
        taken = 1000 * (n_kept * layer_bytes + beside)
        assert n_kept == 0 or taken <= 0.95 * free
        assert n_kept == 40 or taken + 1000 * layer_bytes > 0.94 * free


def test_running_out_of_memory_lowers_the_plan(monkeypatch, plan):
    gpu = FakeGpu(monkeypatch, free=10**8)
    plan.n_layers = 40
    gpu.step(plan, 1000, 200, 1000)
    gpu.step(plan, 1000, 200, 1000)
    before, expected = plan.n_recomputed, 1.0
    assert before == 0
    while plan.n_recomputed < plan.n_layers:
        assert plan.lower()
        plan.decide(1000, torch.device("cuda"))
        assert plan.n_recomputed >= before
        before, expected = plan.n_recomputed, 1.2 * expected
        n_kept = plan.n_layers - plan.n_recomputed
        assert n_kept == 0 or 1000 * expected * (n_kept * 200 + 1000) <= 0.95 * 10**8
    assert not plan.lower()


def test_a_host_without_memory_is_not_filled(monkeypatch):
    """A tensor of 700 bytes takes 1,024; what a step has had is there for the next."""
    free = {"available": 3500}
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(**free))
    store, held = ActivationOffload(), [torch.zeros(1) for _ in range(4)]
    for step in range(2):
        for x in held[:3]:
            store._require_room(700)
            store._stack.append(weakref.ref(x))
            free["available"] -= 1024 * (step == 0)
        assert free["available"] == 428
        if step == 0:
            store._stack.clear()
    with pytest.raises(InputError, match=r"inputs of 4 layers take .* use_gradient_checkpointing=True"):
        store._require_room(700)
    del held[2], x  # a forward pass without its backward
    store._drop_untaken()
    store._require_room(700)
    with pytest.raises(InputError, match="inputs of 3 layers"):  # smaller, and yet blocks of their own
        store._require_room(500)


def test_a_forward_that_leaves_too_little_is_tried_again(monkeypatch):
    """Its layers kept more than was expected: the loss or the backward pass would run out of memory."""
    documents = random_documents(LENGTHS)
    expected = run_packed(checkpointed(False), documents)
    model = checkpointed("auto")
    plan, tried = model.get_decoder().recompute_plan, []

    def decide(tokens, device):
        plan.n_recomputed, plan._tokens, plan._before = len(tried), tokens, (0, 0)

    def free(device):
        tried.append(plan.n_recomputed)
        return plan._beside * plan._tokens * (0.9 if len(tried) < 2 else 1.0)

    monkeypatch.setattr(plan, "decide", decide)
    monkeypatch.setattr(plan, "measure_layer", nullcontext)
    monkeypatch.setattr(planning, "free_bytes", free)
    monkeypatch.setattr(plan, "lower", lambda: len(tried) < plan.n_layers)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    hooked = []
    model.get_decoder().register_forward_pre_hook(lambda *_: hooked.append("before"))
    model.get_decoder().register_forward_hook(lambda *_: hooked.append("after"))
    got = run_packed(model, documents)
    assert tried == [0, 1]
    assert hooked == ["before", "after"]  # once, though the layers ran twice
    assert all(torch.equal(got.grads[name], grad) for name, grad in expected.grads.items())
    model.eval()
    with torch.no_grad():
        run = model(input_ids=torch.cat(documents)[None].to(DEVICE), packed_seq_lengths=LENGTHS)
    assert run.logits is not None
    assert tried == [0, 1]  # there is no backward pass to leave room for

"""LoRA dropout inside the fused nodes: drawn anew at every call, the same in the backward pass, never kept.

That its outputs and gradients are right is held by the grid, over all architectures (`correctness/`).
"""

import copy

import pytest
import torch
from tiny import DEVICE, random_documents, run_packed, tiny_model
from torch import nn

from unsloth_pack import patch_model
from unsloth_pack.lora import mlp
from unsloth_pack.memory.checkpointing import enable_checkpointing

LENGTHS = [33, 2, 64, 1]


def patched(p=0.4, arch="llama"):
    model = tiny_model(arch, lora={"lora_dropout": p})
    report = patch_model(model, "sdpa").report
    assert "LoRA" not in report.not_fused
    return model


def outcome(model, seed=0, lengths=LENGTHS):
    torch.manual_seed(seed)
    return run_packed(model, random_documents(lengths))


def assert_alike(got, expected):
    torch.testing.assert_close(got.loss, expected.loss)
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        torch.testing.assert_close(got.grads[name], grad, rtol=1e-4, atol=1e-6, msg=name)


def test_it_is_drawn_anew_at_every_call_and_again_from_the_same_random_state():
    model = patched()
    losses = [outcome(model, seed).loss.item() for seed in (0, 1, 2, 0)]
    assert len(set(losses)) == 3
    assert losses[0] == losses[3]
    model.eval()
    without = patched(0.0).eval()
    assert outcome(model).loss == outcome(without).loss


@pytest.mark.parametrize("arch", ["llama", "phi3"])
@pytest.mark.parametrize("mode", [True, "offload", "reentrant"])
def test_recomputed_layers_drop_what_they_dropped(mode, arch):
    expected = outcome(patched(arch=arch))
    model = patched(arch=arch)
    if mode == "reentrant":
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    else:
        enable_checkpointing(model, mode)
    assert_alike(outcome(model), expected)


def test_tiles_drop_what_the_whole_does(monkeypatch):
    lengths = [200, 33, 64, 100]
    expected = outcome(patched(), lengths=lengths)
    monkeypatch.setattr(mlp, "_TILE", 128)
    assert len(mlp._tiles(sum(lengths), 128, keep=True)) == 4
    assert_alike(outcome(patched(), lengths=lengths), expected)


def test_layers_over_one_input_may_differ():
    """q and v drop, k does not: its gradient is that of a k without dropout."""
    model = tiny_model("llama", lora={"lora_dropout": 0.5})
    for name, module in model.named_modules():
        if name.endswith("k_proj"):
            module.lora_dropout["default"] = nn.Identity()
        elif name.endswith("up_proj.lora_dropout.default"):
            module.p = 0.0
    plain = copy.deepcopy(model)
    patch_model(model, "sdpa")
    attention, x = model.get_base_model().model.layers[0].self_attn, torch.randn(7, 64, device=DEVICE)
    twin = plain.get_base_model().model.layers[0].self_attn
    torch.testing.assert_close(attention.k_proj(x), twin.k_proj(x))
    assert not torch.equal(attention.q_proj(x), attention.q_proj(x))
    first, second = outcome(model), outcome(model)
    assert_alike(first, second)

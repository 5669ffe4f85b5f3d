"""Layers whose forward is Llama's add and norm in one launch; others keep transformers' own forward."""

import sys

import pytest
import torch
from tiny import random_documents, run_packed, tiny_model
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from unsloth_pack import patch_model
from unsloth_pack.layers.layer import FastLayer, is_plain
from unsloth_pack.models import supported_architectures

# Of the text models that stand alone. A release of transformers that changes such a forward shows here.
PLAIN = (
    *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma"),
    *("glm4_moe", "glm4_moe_lite", "deepseek_v3", "youtu", "olmoe", "ernie4_5", "hunyuan_v1_dense"),
    *("smollm3", "seed_oss", "arcee"),
)
DOCUMENTS = random_documents([7, 1, 12, 30])


@pytest.fixture
def joined(monkeypatch):
    """What was added and normed at once, in the order of the calls."""
    norm, seen = sys.modules["unsloth_pack.layers.layer"], []
    own = norm.add_rms_norm
    monkeypatch.setattr(
        norm, "add_rms_norm", lambda x, added, *a: seen.append(added is None) or own(x, added, *a)
    )
    return seen


def layers_of(model):
    return list(model.get_decoder().layers)


def patched(arch, dtype=torch.float32, plain=True):
    model = tiny_model(arch, dtype)
    with pytest.MonkeyPatch.context() as patching:
        if not plain:
            patching.setattr(sys.modules["unsloth_pack.patching.patch"], "is_plain", lambda layer: False)
        patch_model(model).skip_probe()
    return model


@pytest.mark.parametrize("arch", PLAIN)
def test_they_compute_what_transformers_layers_do(arch, joined):
    fused, own = patched(arch, torch.float64), patched(arch, torch.float64, plain=False)
    assert all(isinstance(layer, FastLayer) for layer in layers_of(fused))
    assert not any(isinstance(layer, FastLayer) for layer in layers_of(own))
    found = run_packed(fused, DOCUMENTS)
    assert joined == [True, False] * len(layers_of(fused))
    right = run_packed(own, DOCUMENTS, found.routes)
    assert len(joined) == 2 * len(layers_of(fused))
    assert torch.equal(found.logits, right.logits)
    assert found.grads.keys() == right.grads.keys()
    for name, grad in right.grads.items():
        assert torch.allclose(found.grads[name], grad, rtol=1e-10, atol=1e-12), name


def test_every_architecture_is_one_of_them():
    """Of those that stand alone."""
    plain = set()
    for name, spec in supported_architectures().items():
        if spec.stands_alone:
            model = tiny_model(name)
            plain |= {name} if all(map(is_plain, layers_of(model))) else set()
    assert plain == {*PLAIN}


def test_layers_with_a_forward_of_their_own():
    class Scaled(LlamaDecoderLayer):
        def forward(self, hidden_states, *args, **kwargs):
            return 2 * super().forward(hidden_states, *args, **kwargs)

    model = tiny_model("llama")
    first, second = layers_of(model)
    assert is_plain(first)
    first.__class__ = Scaled
    second.forward = lambda *args, **kwargs: None  # as accelerate's hooks do
    assert not is_plain(first)
    assert not is_plain(second)
    assert not is_plain(Gemma2DecoderLayer.__new__(Gemma2DecoderLayer))


@pytest.mark.parametrize(
    "hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_norms_with_hooks_are_called(hook, joined):
    model, seen = patched("llama"), []
    first = layers_of(model)[0]
    getattr(first.post_attention_layernorm, hook)(lambda *_: seen.append(True))
    run_packed(model, DOCUMENTS)
    assert len(seen) == 1
    assert joined == [True, False]  # the other layer

"""Gemma 4's text model: keys and values shared by layers, layers of two head sizes, embeddings by layer."""

from dataclasses import replace

import pytest
import torch
from tiny import DEVICE, error, random_documents, run_alone, run_packed, tiny_model

from unsloth_pack import patch_model
from unsloth_pack.attention import BACKENDS, choose_backend, why_unavailable
from unsloth_pack.errors import BackendUnavailable, InputError

LENGTHS = [5, 40, 1, 17]


def patched(dtype=torch.float32, backend="auto", **overrides):
    model = tiny_model("gemma4_text", dtype, **overrides)
    return model, patch_model(model, backend)


def joined(documents):
    return torch.cat(documents)[None].to(DEVICE)


@pytest.fixture
def small_flash(monkeypatch):
    """A backend named flash that takes the heads of sliding layers only, and computes as sdpa."""

    def why_not(need):
        return None if need.head_dim <= 8 else f"its head size is at most 8, not {need.head_dim}"

    flash = replace(BACKENDS["sdpa"], why_unavailable=why_not, can_be_captured=True)
    monkeypatch.setitem(BACKENDS, "flash", flash)
    monkeypatch.setitem(BACKENDS, "triton", replace(BACKENDS["triton"], why_unavailable=lambda _: "not here"))
    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()
    yield
    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()


def test_layers_of_other_head_sizes_have_other_backends(small_flash):
    model, patch = patched()
    assert patch.report.attn_backend == "flash and sdpa"
    assert "flash: its head size is at most 8, not 16" in patch.report.attn_reason
    assert "attention backend: flash and sdpa" in str(patch.report)
    documents = random_documents(LENGTHS)
    alone = run_alone(tiny_model("gemma4_text"), documents)
    assert error(run_packed(model, documents).logits, alone.logits) < 1e-5
    with pytest.raises(BackendUnavailable, match=r"'flash' cannot run: .* not 16; use 'auto' or one of"):
        patched(backend="flash")


def test_a_layer_that_reuses_sends_gradients_through_what_it_reads():
    """The loss reaches the stored values only through later layers, where the storing layer's own are off."""
    model, _ = patched()
    first = model.get_decoder().layers[0].self_attn  # of sliding layers, the one that stores
    torch.nn.init.zeros_(first.o_proj.base_layer.weight)
    torch.nn.init.zeros_(first.o_proj.lora_B["default"].weight)
    run_packed(model, random_documents(LENGTHS))
    assert first.v_proj.lora_B["default"].weight.grad.norm() > 0
    assert first.o_proj.lora_A["default"].weight.grad.norm() == 0


def test_reentrant_checkpointing_is_refused():
    model, _ = patched()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(InputError, match=r"use_reentrant=True loses .*'use_reentrant': False"):
        run_packed(model, random_documents(LENGTHS))
    model.eval()
    model(input_ids=joined(random_documents(LENGTHS)), packed_seq_lengths=LENGTHS)


def test_embeddings_may_come_from_outside():
    model, _ = patched()
    model.eval()
    base = model.get_base_model()
    ids, more = joined(random_documents(LENGTHS)), {"packed_seq_lengths": LENGTHS}
    with torch.no_grad():
        expected = model(input_ids=ids, **more).logits
        own = base.model.get_per_layer_inputs(ids, None)
        embeds = base.get_input_embeddings()(ids)
        found = model(inputs_embeds=embeds, **more).logits  # looked up in the vocabulary
        given = model(inputs_embeds=embeds, per_layer_inputs=own, **more).logits
        other = model(inputs_embeds=embeds, per_layer_inputs=own.flip(1), **more).logits
    assert torch.equal(found, expected)
    assert torch.equal(given, expected)
    assert not torch.equal(other, expected)
    with pytest.raises((InputError, ValueError), match="per_layer_inputs"):
        model(input_ids=ids, per_layer_inputs=own, **more)


def test_only_images_may_be_attended_both_ways():
    patched(use_bidirectional_attention="vision")
    with pytest.raises(InputError, match="use_bidirectional_attention=all: only causal attention is patched"):
        patched(use_bidirectional_attention="all")


def test_norms_with_wider_weights_return_the_dtype_of_their_input():
    """As transformers' do here; elsewhere the wider dtype goes on. PEFT trains such weights in float32."""
    x = torch.randn(2, 3, 64, device=DEVICE, dtype=torch.bfloat16)
    for arch, dtype in (("gemma4_text", torch.bfloat16), ("llama", torch.float32)):
        plain, model = tiny_model(arch, torch.bfloat16), tiny_model(arch, torch.bfloat16)
        patch_model(model)
        for one in (plain, model):
            norm = one.get_base_model().model.norm.float()
            assert norm(x).dtype == dtype

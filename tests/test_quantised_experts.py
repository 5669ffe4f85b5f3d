"""Experts in few bits: what they compute is what their weights stand for; files, merging, copies."""

import copy

import pytest
import torch
from mxfp4_folder import pack
from peft import PeftModel
from tiny import DEVICE, error, random_documents, run_packed
from tiny_experts import EVERY_LAYER, adapted, base, logits
from transformers import AutoModelForCausalLM
from transformers.utils import is_bitsandbytes_available

from unsloth_pack import FastLanguageModel, patch_model
from unsloth_pack.checkpoints.loading import load_adapter
from unsloth_pack.checkpoints.merging import merged_weights
from unsloth_pack.errors import InputError
from unsloth_pack.layers.kernel_warmup import find_layer_kinds
from unsloth_pack.lora.expert_stacks import (
    STACKS,
    dequantised_copy,
    hold_stack,
    is_experts,
    mxfp4_stack,
    quantise_experts,
)
from unsloth_pack.lora.quantised import count_weights

needs_bitsandbytes = pytest.mark.skipif(not is_bitsandbytes_available(), reason="bitsandbytes")
kinds = pytest.mark.parametrize("kind", [pytest.param("nf4", marks=needs_bitsandbytes), "fp8", "mxfp4"])


def dense(kind, **overrides):
    return base("gpt_oss", layer_types=["full_attention"] * 2) if kind == "mxfp4" else base(**overrides)


def quantised(kind, **overrides):
    model = dense(kind, **overrides)
    if kind != "mxfp4":
        assert quantise_experts(model, kind) == (2 if overrides else 1)
        return model
    for experts in filter(is_experts, list(model.modules())):
        for name in STACKS:
            hold_stack(experts, name, mxfp4_stack(*pack(getattr(experts, name)), torch.float32))
    assert quantise_experts(model, "nf4") == 0, "they stay as they are"
    return model


def exact(model):
    """The model with the weights that its experts stand for."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_experts(child):
                setattr(parent, name, dequantised_copy(child, torch.float32))
    return model


@kinds
def test_packed_weights_count_each(kind):
    model = quantised(kind)
    assert count_weights(model) == (0, sum(p.numel() for p in dense(kind).parameters()))
    adapter = adapted(model, None)
    n_trained, _ = adapter.get_nb_trainable_parameters()
    assert count_weights(adapter)[0] == n_trained > 0


def with_factors(model):
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = (0.2 * torch.randn(weight.shape, generator=generator)).to(DEVICE)
    return model


@kinds
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_logits_and_gradients_are_those_of_what_the_weights_stand_for(kind, is_recomputed):
    documents = random_documents([5, 1, 19])
    frozen = quantised(kind, **EVERY_LAYER)
    options = dict(use_gradient_checkpointing=is_recomputed)
    expected, got = (
        run_packed(with_factors(adapted(model, None, **options)), documents)
        for model in (exact(frozen), frozen)
    )
    assert error(got.logits, expected.logits) < 1e-5
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert error(got.grads[name], grad) < 1e-4, name
    report = frozen.unsloth_pack_patch.report
    form = {"nf4": "NF4", "mxfp4": "MXFP4"}.get(kind, kind)
    assert f"their {form} weights are dequantised at each use" in report.fused["experts"]
    assert not report.not_fused.keys() & {"LoRA", "experts"}
    assert error(logits(dense(kind, **EVERY_LAYER)), logits(frozen)) > 0.01


@kinds
def test_files_are_those_of_an_adapter_on_16_bits(kind, tmp_path):
    frozen = quantised(kind, **EVERY_LAYER)
    as_exact = exact(frozen)
    as_exact.save_pretrained(tmp_path / "base")
    model = with_factors(adapted(frozen, None))
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = PeftModel.from_pretrained(plain, tmp_path / "adapter").to(DEVICE)
    assert error(logits(plain), expected) < 1e-5
    back = load_adapter(quantised(kind, **EVERY_LAYER), tmp_path / "adapter").to(DEVICE)
    report = patch_model(back).report
    assert not report.not_fused.keys() & {"LoRA", "experts"}
    assert error(logits(back), expected) < 1e-5


@kinds
@pytest.mark.parametrize("has_adapter", [True, False])
def test_merging_gives_what_is_computed(kind, has_adapter):
    model = quantised(kind)
    patch_model(model)
    if has_adapter:
        model = with_factors(FastLanguageModel.get_peft_model(model, r=3))
        with pytest.raises(InputError, match="cannot be merged in place; use save_pretrained_merged"):
            model.merge_adapter()
    fresh = dense(kind)
    fresh.load_state_dict(dict(merged_weights(model, torch.float32)))
    assert error(logits(fresh), logits(model)) < 1e-5


@kinds
def test_undo_and_copies(kind):
    model = with_factors(adapted(quantised(kind), None))
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    kept = {name: type(one).__name__ for name, one in model.named_modules()}
    handle = (
        model.get_base_model().model.layers[0].mlp.experts.base_layer.register_forward_hook(lambda *_: None)
    )
    for _ in range(2):
        assert error(logits(model), expected) < 1e-5, "through PEFT's own forward"
    handle.remove()
    assert torch.equal(logits(model), expected)
    model.get_base_model().unsloth_pack_patch.undo()
    assert {name: type(one).__name__ for name, one in model.named_modules()} == kept
    patch_model(model)
    assert torch.equal(logits(model), expected)


@kinds
def test_alike_layers_are_one_kind_to_compile_kernels_for(kind):
    """The first step runs a layer of each kind without recomputation; all layers would not fit."""
    model = quantised(kind, **EVERY_LAYER)
    patch_model(model)
    assert len(model.get_decoder().layers) == 2
    assert list(find_layer_kinds(model.get_decoder())) == [0]

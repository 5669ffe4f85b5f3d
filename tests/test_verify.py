"""`verify` and `probe`: they pass what keeps documents apart, and catch every leak that is planted here."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import TINY, patched, positions_of, random_documents, tiny_config, tiny_model
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from unsloth_pack import (
    InputError,
    LeakFound,
    patch_model,
    probe,
    supported_architectures,
    verify,
)
from unsloth_pack.attention.backends import BACKENDS
from unsloth_pack.layers.mixers import attention
from unsloth_pack.losses import head
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.training.trl_setup import row_collator

FEW = [document.tolist() for document in random_documents([9, 1, 14])]
FIVE = [document.tolist() for document in random_documents([9, 1, 14, 40, 3])]
DAILY = ("gemma4_text", "gpt_oss", "olmoe", "lfm2", "qwen3_5_text", "phi3")  # windows, sinks, experts, states
LEAKS = {"leak into logits", "leak into gradients", "leak into trained gradients"}
AND_ALONE = {"leak into logits", "leak into gradients", "logits against alone"}


def plain(arch="llama", **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(arch), **options)


def failed(report):
    return [check.name for check in report.checks if not check.passed]


def uncached(lengths, **more):
    return {"position_ids": positions_of(lengths)[None], "use_cache": False, **more}


def cached(lengths):
    return uncached(lengths) | {"use_cache": True}


def masked(lengths):
    return uncached(lengths, attention_mask=torch.ones(1, sum(lengths)))


# What is right passes


@pytest.mark.parametrize(
    ("arch", "dtype", "checkpointing"),
    [
        *(
            pytest.param(arch, "float32", True, marks=[] if arch in DAILY else [pytest.mark.nightly])
            for arch in supported_architectures()
        ),
        *((arch, "bfloat16", False) for arch in ("llama", "qwen3_moe", "gemma2")),
    ],
)
def test_every_architecture_passes(arch, dtype, checkpointing):
    model = patched(arch, getattr(torch, dtype))
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    probe(model)
    report = verify(model, seed=1)
    assert report.passed, str(report)
    assert (report.model_type, report.dtype, report.checkpointing) == (arch, dtype, checkpointing)
    assert len(report.checks) == (13 if model.get_decoder().why_no_branches else 16)
    if "sliding_window" in TINY[arch]:
        assert 24 + 9 in report.lengths
    else:
        assert max(report.lengths) == 129


def test_plain_transformers_passes_where_it_keeps_documents_apart():
    """Which shows that the planted leaks below are what is caught."""
    model = tiny_model("llama", device="cpu")
    probe(model, uncached)
    assert verify(model, describe=uncached).passed


def test_trls_description_passes_and_so_do_real_documents():
    model = patched("qwen3")
    report = verify(model, documents=[[5, 6, 7], [8], [9] * 40], describe="trl")
    assert report.passed, str(report)
    assert report.lengths == (3, 1, 40)
    assert verify(model, documents=[[5], [6], [7]]).passed  # no label at all
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=64)
    assert verify(model, collate=collate).passed


def test_a_model_without_an_adapter_passes(caplog):
    base = plain("olmo2")
    base.requires_grad_(False)
    patch_model(base)
    report = verify(base)
    assert report.passed, str(report)
    assert not caplog.records  # it is not warned of as one that was to be trained
    assert "trained gradients against alone" not in [check.name for check in report.checks]


def test_sums_in_another_order_every_time_are_no_leak():
    """As in the backward pass of FlashAttention, which adds up dQ as its blocks finish."""
    model = patched()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda grad: grad * (1 + 3e-7 * torch.rand_like(grad)))
    report = verify(model)
    assert report.passed, str(report)
    check = next(check for check in report.checks if check.name == "leak into trained gradients")
    assert 0 < check.value <= check.allowed < 1e-5


# Planted leaks, one by one


@pytest.mark.parametrize("describe", [cached, masked])
def test_plain_transformers_leaks_with_a_cache_or_a_mask(describe):
    model = tiny_model("llama", device="cpu")
    report = verify(model, documents=FIVE, describe=describe)
    assert {*failed(report)} > LEAKS
    assert "first in layer 0 (LlamaDecoderLayer)" in str(report)
    with pytest.raises(LeakFound, match=r"attention sdpa first in layer 0 \(LlamaDecoderLayer\)"):
        probe(model, describe)


@pytest.mark.parametrize("off", [-1, 1])
def test_boundaries_off_by_one(off):
    """The patched model itself is right; its description is not."""

    def describe(lengths):
        return {"packed_seq_lengths": [*lengths[:2], lengths[2] + off, lengths[3] - off, *lengths[4:]]}

    model = patched()
    assert {*failed(verify(model, documents=FIVE, describe=describe))} > AND_ALONE
    with pytest.raises(LeakFound, match="attention sdpa first in layer 0"):
        probe(model, describe)


def test_boundaries_of_the_kernel_off_by_one(leak):
    """The description is right; the attention reads it wrongly."""
    assert {*failed(verify(patched(), documents=FIVE))} > AND_ALONE


@pytest.mark.parametrize(("off", "dtype"), [(1, torch.float32), (-1, torch.bfloat16)])
def test_a_window_off_by_one(off, dtype, monkeypatch):
    """No document leaks; only the reach of attention is wrong, which rounding in bfloat16 may cover."""
    right = attention.read_attention_options

    def wrong(attention, spec):
        options = right(attention, spec)
        return type(options)(options.scale, options.window + off, options.softcap, options.dropout)

    model = patched("mistral", dtype)
    monkeypatch.setattr(attention, "read_attention_options", wrong)
    report = verify(model)
    assert "reach of attention" in failed(report)
    assert not {*failed(report)} & LEAKS
    assert f"document 1 sees {24 + off} tokens, alone 24" in str(report)
    if dtype == torch.float32:
        assert "logits against alone" in failed(report)


@pytest.mark.parametrize("arch", ["lfm2", "qwen3_next", "falcon_h1"])
def test_a_hybrid_model_leaks_through_its_recurrent_state(arch):
    model = plain(arch)
    assert {*failed(verify(model, documents=FEW, describe=uncached))} > LEAKS
    with pytest.raises(LeakFound, match="first in layer 0"):
        probe(model, uncached)


def test_an_attention_name_without_its_mask_function():
    """transformers then passes no mask at all, and every document sees those before it."""
    AttentionInterface.register("forgotten_mask", sdpa_attention_forward)
    model = plain(attn_implementation="forgotten_mask")
    report = verify(model, describe=uncached)
    assert {*failed(report)} > LEAKS
    assert report.attn_backend == "forgotten_mask"
    with pytest.raises(LeakFound, match="attention forgotten_mask first in layer 0"):
        probe(model, uncached)


class Wrong:
    """TRL's collator with one thing done wrong to its batch."""

    def __init__(self, name):
        self.name = name

    def __call__(self, rows):
        batch = row_collator()(rows)
        if self.name == "boundary labels":
            starts = batch["position_ids"] == 0
            batch["labels"][starts] = batch["input_ids"][starts]
        elif self.name == "token count":
            batch["labels"][0, -1] = -100
        else:
            batch["position_ids"] = batch["position_ids"] + 1
        return batch


def test_what_a_collator_does_wrong(monkeypatch):
    model = patched()
    for name, also in (("boundary labels", ["token count"]), ("token count", []), ("positions", [])):
        assert failed(verify(model, documents=FEW, collate=Wrong(name))) == [name, *also]
    # The model masks labels at boundaries itself, unless its loss counts them
    monkeypatch.setattr(PackedRow, "mask_labels", lambda row, labels, ignore_index=-100: labels)
    assert "counted loss" in failed(verify(model, documents=FEW, collate=Wrong("boundary labels")))


@pytest.mark.parametrize("wrong", ["the loss", "its gradients"])
def test_the_loss_of_training_is_wrong(wrong, monkeypatch):
    """It is fused with the head: neither logits nor a loss without gradients tell."""
    right = head.linear_cross_entropy

    def shifted(hidden, *args, **options):
        hidden.register_hook(lambda gradient: gradient.roll(1, dims=-2))
        return right(hidden, *args, **options)

    def too_large(*args, **options):
        return right(*args, **options) * 1.1

    model = patched()
    monkeypatch.setattr(head, "linear_cross_entropy", too_large if wrong == "the loss" else shifted)
    expected = ["counted loss"] if wrong == "the loss" else []
    assert failed(verify(model)) == [*expected, "gradients of the counted loss"]


def test_attention_that_is_wrong_beyond_its_first_tile(monkeypatch):
    """As kernels that take 128 tokens at a time may be."""
    right = BACKENDS["sdpa"]

    def leaking(q, k, v, row, options):
        out = right.attend(q, k, v, row, options)
        return torch.cat([out[:128], out[128:] + 1e-2 * v[0].sum()])

    monkeypatch.setitem(BACKENDS, "sdpa", replace(right, attend=leaking))
    assert {*failed(verify(patched()))} > LEAKS


def test_a_model_that_looks_at_nothing_does_not_pass(monkeypatch):
    """What cannot fail must not pass."""
    model = patched()
    head = type(model.get_base_model().lm_head)
    nothing = lambda self, x: x[..., :1].expand(*x.shape[:-1], 256) * 0  # noqa: E731
    monkeypatch.setattr(head, "forward", nothing)
    assert {"leak into logits", "leak into gradients"} <= {*failed(verify(model))}
    with pytest.raises(LeakFound, match="no gradient reaches"):
        probe(model)


# The model is left as it was


def state_of(model):
    parts = [module.training for module in model.modules()]
    parts += [id(parameter.grad) for parameter in model.parameters()]
    parts += [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    parts += [vars(m).get("attention_dropout") for m in model.modules()]
    parts += [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    return parts


@pytest.mark.parametrize("look", [verify, probe])
def test_the_model_is_left_as_it_was(look):
    model = patched("qwen2", attention_dropout=0.3)
    for name, module in model.named_modules():
        if name.endswith("lora_dropout"):
            module["default"] = torch.nn.Dropout(0.5)
    patch_model(model)
    model.train()
    model.get_base_model().model.layers[0].eval()
    modes, shapes = [], []

    def note(module, args, kwargs):
        modes.append(module.training)
        shapes.append(kwargs["input_ids"].shape)
        np.random.shuffle([random.random(), 0.5])

    model.register_forward_pre_hook(note, with_kwargs=True)
    model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    weights = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    before = state_of(model)
    report = look(model)
    assert state_of(model) == before
    assert gradients
    assert all(torch.equal(p.grad, gradients[n]) for n, p in model.named_parameters() if p.grad is not None)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    if look is verify:
        assert {*modes} == {True, False}
        assert report.passed
        assert {check.allowed for check in report.checks if check.name in AND_ALONE & LEAKS} == {0}
    else:  # two short steps without branches, and two with some
        assert modes == [True] * 5
        assert all(shape[1] <= 64 for shape in shapes)


# What cannot be verified


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": [[1, 2], []]}, r"\[2, 0\] tokens; give two or more, none of them empty"),
        ({"documents": ["a", "b"]}, "give the tokenizer too"),
        ({"documents": "ab"}, "give the tokenizer too"),
        ({"documents": [[1, 2], [3, 256]]}, "token ids from 3 to 256, the model knows 0 to 255"),
        ({"max_seq_length": "x"}, "max_seq_length is 'x'; give a whole number"),
        ({"seed": -1}, "seed is -1; give a whole number"),
        ({"documents": [[1] * 30, [2] * 30], "max_seq_length": 50}, "60 tokens, the row 50; give fewer"),
        ({"max_seq_length": 50}, "max_seq_length is 50"),
        ({"describe": "lengths"}, "describe is 'lengths'; choose packed_seq_lengths"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(InputError, match=message):
        verify(patched(), **options)


CONFIG = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
@pytest.mark.parametrize("look", [verify, probe])
def test_a_model_without_a_head_has_no_logits_to_compare(look, kind):
    message = f"^a {kind.__name__} has no language model's head, .*; give a causal"
    with pytest.raises(InputError, match=message):
        look(kind(CONFIG))

"""Layers that carry a state: their two ways through a packed row, and what is planted in each is found.

The kernels are stand-ins, but in one test, which needs a GPU and the packages.
"""

import inspect
import logging
import sys
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import version

import pytest
import torch
from correctness.judge import Draw, holds, judge_as_few
from state_kernels import Kernels
from tiny import TINY, error, exactly, random_documents, run_alone, run_packed, tiny_model
from transformers import AutoConfig

from unsloth_pack import (
    LeakFound,
    UnsupportedArchitecture,
    patch_model,
    probe,
    supported_architectures,
    verify,
)
from unsloth_pack.layers.mixers import MIXERS, Request
from unsloth_pack.layers.mixers.state_space import BY_DOCUMENT, IN_ONE_ROW, FastStateLayer
from unsloth_pack.models import LEAKING, arch_spec_for
from unsloth_pack.patching.parts import mixers_by_layer

HYBRIDS = {name: spec for name, spec in supported_architectures().items() if spec.mixers}
SMALL = [name for name in HYBRIDS if not any("experts" in field for field in TINY[name])]
# A short convolution alone, a delta rule, Mamba-2 beside attention
DAILY = ("lfm2", "qwen3_5_text", "falcon_h1")
SMALL_PARAMS = [pytest.param(arch, marks=[] if arch in DAILY else [pytest.mark.nightly]) for arch in SMALL]
LENGTHS = [9, 1, 24, 2, 13]
# Of transformers' modeling files: what becomes a kernel of a package where that is installed
PASSES_OVER_AN_ADAPTER = "mamba2_split_conv1d_scan_combined"  # of the projection at the end
KERNELS_OF_TRANSFORMERS = (
    "causal_conv1d_fn",
    "mamba2_chunk_scan",
    PASSES_OVER_AN_ADAPTER,
    "torch_chunk_gated_delta_rule",
)
LEAKS = {"leak into logits", "leak into gradients", "leak into trained gradients"}


@pytest.fixture
def kernels(monkeypatch):
    made = Kernels()
    made.installed = lambda arch: made.install(monkeypatch, arch)
    return made


def state_layers(model):
    return [module for module in model.modules() if isinstance(module, FastStateLayer)]


def recurrence_of(arch):
    is_delta_net = "gated_delta_net" in mixers_of(arch)
    return "chunk_gated_delta_rule" if is_delta_net else "mamba_chunk_scan_combined"


def mixers_of(arch):
    return " ".join(HYBRIDS[arch].mixers.values()).split()


# Both ways are right


@pytest.mark.parametrize("arch", SMALL)
def test_a_row_goes_through_the_kernels_once_with_its_boundaries(arch, kernels):
    """Against documents alone without the kernels: outputs, loss, and every gradient, all in float64."""
    documents = random_documents(LENGTHS)
    truth = run_alone(tiny_model(arch, torch.float64, "cpu"), documents)
    kernels.installed(arch)
    model = tiny_model(arch, torch.float64, "cpu")
    report = patch_model(model).report
    assert report.attn_backend.startswith(IN_ONE_ROW)
    kernels.calls.clear()
    got = run_packed(model, documents, tail=5)
    parts = {"chunk_gated_delta_rule": 5, "mamba_chunk_scan_combined": 5, "causal_conv1d_fn": 1}
    kinds = {name: kernels.calls.count(name) // parts.get(name, 1) for name in set(kernels.calls)}
    probes = 2  # the model's own look before it trains
    assert kinds == dict.fromkeys(kinds, len(state_layers(model)) * (1 + probes)), kinds
    assert error(got.logits, truth.logits) < 1e-12
    for name, grad in truth.grads.items():
        assert error(got.grads[name], grad) < 1e-10, name


@pytest.mark.parametrize("arch", SMALL)
def test_both_ways_give_the_same(arch, kernels):
    documents = random_documents(LENGTHS)
    outcomes = []
    for installed in (False, True):
        if installed:
            kernels.installed(arch)
        model = tiny_model(arch, torch.float64, "cpu")
        name = patch_model(model).report.attn_backend
        assert name.startswith(IN_ONE_ROW if installed else BY_DOCUMENT)
        outcomes.append(run_packed(model, documents))
    assert error(outcomes[0].logits, outcomes[1].logits) < 1e-12


@pytest.mark.parametrize("described", [{}, {"packed_seq_lengths": [1]}], ids=["alone", "packed"])
@pytest.mark.parametrize("arch", SMALL)
def test_a_lone_token_trains_though_the_kernels_refuse_rows_of_one(arch, described, kernels):
    convolve = kernels.causal_conv1d_fn

    @wraps(convolve)
    def of_several_tokens(x, *args, **kwargs):
        assert x.shape[2] > 1 or not torch.is_grad_enabled()
        return convolve(x, *args, **kwargs)

    outcomes = []
    for is_patched in (False, True):
        if is_patched:
            kernels.causal_conv1d_fn = of_several_tokens
            kernels.installed(arch)
        model = tiny_model(arch, torch.float64, "cpu")
        if is_patched:
            patch_model(model)
        with exactly(model):
            given = described if is_patched else {}
            logits = model(input_ids=torch.tensor([[7]]), use_cache=False, **given).logits
        logits.square().sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        outcomes.append({"logits": logits} | grads)
    truth, got = outcomes
    assert truth.keys() == got.keys()
    for name, expected in truth.items():  # attention to one token has no gradient but rounding
        torch.testing.assert_close(got[name], expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("arch", HYBRIDS)
def test_the_packages_kernels_are_as_right_on_a_row_as_on_each_document_alone(arch, dtype, monkeypatch):
    """The real ones, where they are installed. The truth is transformers' own layers in torch.

    A token goes to every expert, so that no rounding chooses another one.
    """
    for package in {name for mixer in mixers_of(arch) for name in packages_of(mixer)}:
        pytest.importorskip(package)
    every = {} if arch in SMALL else {"num_experts_per_tok": 4}
    modeling = sys.modules[type(tiny_model(arch, dtype).get_base_model()).__module__]

    def drawn(seed):
        documents = random_documents(LENGTHS, seed)
        with in_torch(monkeypatch, modeling, *KERNELS_OF_TRANSFORMERS):
            truth = run_alone(tiny_model(arch, torch.float64, **every), documents)
        with in_torch(monkeypatch, modeling, PASSES_OVER_AN_ADAPTER):
            alone = run_alone(tiny_model(arch, dtype, **every), documents)
        return run_packed(model, documents), Draw(truth, alone, alone)

    model = tiny_model(arch, dtype, **every)
    report = patch_model(model).report
    if "produces incorrect results" in report.attn_reason:  # what fla says of this Triton on this GPU
        pytest.skip(report.attn_reason)
    assert report.attn_backend.startswith(IN_ONE_ROW), report.attn_reason
    row = judge_as_few(drawn, dtype)
    assert holds(row), row["failed"]
    report = verify(model)
    assert report.passed, str(report)


def packages_of(mixer):
    return getattr(MIXERS.get(mixer), "packages", ())


@contextmanager
def in_torch(monkeypatch, modeling, *names):
    """Meanwhile these functions of a modeling file run no kernels of a package."""
    with monkeypatch.context() as without_kernels:
        for name in names:
            if (wrapped := getattr(modeling, name, None)) is not None:
                without_kernels.setattr(modeling, name, inspect.unwrap(wrapped))
        yield


def test_mamba_reads_an_adapted_projection_through_its_adapter(kernels):
    """In training mamba_ssm's one kernel for all takes the weight of `out_proj`, without its adapter."""
    kernels.installed("granitemoehybrid")
    model = tiny_model("granitemoehybrid", torch.float64, "cpu")
    patch_model(model).skip_probe()
    documents, one = random_documents(LENGTHS), "mamba_split_conv1d_scan_combined"
    kernels.calls.clear()
    run_packed(model, documents)
    assert one not in kernels.calls
    (layer,) = state_layers(model)
    assert layer.training
    for parameter in layer.out_proj.parameters():
        assert parameter.grad is None or parameter.grad.any()
    adapted = run_packed(model, documents).logits
    layer.out_proj = layer.out_proj.base_layer
    run_packed(model, documents)
    assert one in kernels.calls
    assert error(run_packed(model, documents).logits, adapted) > 1e-3


# Which way is taken


@pytest.mark.parametrize("arch", SMALL)
def test_without_kernels_a_gpu_is_warned_of_and_told_what_to_install(arch, caplog):
    decoder = tiny_model(arch, device="cpu").get_base_model().get_decoder()
    mixer, module = mixers_by_layer(decoder, HYBRIDS[arch])[0]
    request = Request("cuda", torch.bfloat16, "auto", "the test", decoder.config)
    choice = mixer.choose(module, HYBRIDS[arch], request)
    assert choice.name == BY_DOCUMENT
    assert "not installed; pip install " in choice.remedy
    assert "causal-conv1d" in choice.remedy
    assert "reads the row on the host" in choice.why_not_captured
    with caplog.at_level(logging.WARNING, "unsloth_pack"):
        patch_model(tiny_model(arch, device="cpu"))
    assert not caplog.records  # on a CPU nothing is faster


@pytest.mark.parametrize("arch", SMALL_PARAMS)
def test_kernels_that_carry_over_are_not_used(arch, kernels):
    """As of a version that takes no boundaries, or passes over them."""
    for name in {"causal_conv1d_fn", recurrence_of(arch)} if arch != "lfm2" else {"causal_conv1d_fn"}:
        kernels.carrying = {name}
        kernels.installed(arch)
        model = tiny_model(arch, device="cpu")
        report = patch_model(model).report
        assert report.attn_backend.startswith(BY_DOCUMENT)
        assert "do not keep documents apart" in report.attn_reason
        assert verify(model, documents=[[5, 6, 7], [8], [9] * 12]).passed


# Planted leaks


@pytest.mark.parametrize(
    "what", ["the row", "convolution", "recurrence", pytest.param("both", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("arch", [param for param in SMALL_PARAMS if param.values != ("lfm2",)])
def test_what_carries_over_is_found(arch, what, kernels):
    """In a kernel, or because the row goes through the layer as one text."""
    if what != "the row":
        kernels.installed(arch)
    model = tiny_model(arch, device="cpu")
    patch_model(model)
    if what == "the row":
        for layer in state_layers(model):
            layer.boundaries = lambda row: {}
    else:
        parts = {"convolution": {"causal_conv1d_fn"}, "recurrence": {recurrence_of(arch)}}
        kernels.carrying = parts.get(what, set.union(*parts.values()))
    assert_found(model)


def assert_found(model):
    report = verify(model, documents=[document.tolist() for document in random_documents([9, 1, 14])])
    assert {check.name for check in report.checks if not check.passed} > LEAKS
    with pytest.raises(LeakFound, match="first in layer 0"):
        probe(model)
    documents = random_documents([9, 14])
    with pytest.raises(LeakFound, match="first in layer 0"):
        run_packed(model, documents)


# What they are made of


@pytest.mark.parametrize("model_type", sorted(LEAKING))
def test_architectures_that_leak_are_refused_by_name(model_type):
    with pytest.raises(UnsupportedArchitecture, match=f"'{model_type}' cannot be packed: ") as refusal:
        arch_spec_for(model_type)
    assert "\n" not in str(refusal.value)
    if version("transformers") >= "5.23":
        assert AutoConfig.for_model(model_type).model_type == model_type


def test_an_architecture_without_a_patch_is_told_which_is_the_nearest():
    for model_type, near in {
        "granitemoe": "the nearest name is 'granite'",
        "qwen9": "the nearest name is 'qwen",  # which transformers does not know
        "qwen3_5": "the nearest name is 'qwen3_5_text'",
        "gpt2": "add it to unsloth_pack/models",  # nothing is near
    }.items():
        with pytest.raises(UnsupportedArchitecture, match=f"'{model_type}' has no patch; {near}") as refusal:
            arch_spec_for(model_type)
        assert "\n" not in str(refusal.value)

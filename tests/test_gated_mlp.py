"""The MLP as one node: right in one or several tiles, with gate and up kept or recomputed, nothing twice."""

import weakref
from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import DEVICE, error, random_documents, tiny_model
from tiny_mlp import FEATURES, MLP, TOKENS, inputs, outcome
from torch import nn
from transformers.utils import is_bitsandbytes_available

from unsloth_pack import patch_model
from unsloth_pack.lora import mlp as module
from unsloth_pack.lora.linear import FastLoraLinear
from unsloth_pack.lora.mlp import gated_mlp
from unsloth_pack.memory.checkpointing import enable_checkpointing

needs_bitsandbytes = pytest.mark.skipif(not is_bitsandbytes_available(), reason="bitsandbytes")


def adapted(dtype, joined=False, bias=False, convert=lambda mlp: mlp):
    """A PEFT MLP with weights that are exact in bfloat16, some of them trained."""
    torch.manual_seed(0)
    mlp = convert(MLP(joined, bias).to(torch.bfloat16).to(dtype))
    names = ["gate_up_proj" if joined else "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=6, target_modules=names[:1] + names[1 + joined :])
    config.bias = "all" if bias else "none"
    peft_model = get_peft_model(mlp, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(1)
    for name, weight in peft_model.named_parameters():
        if "lora_" in name:
            weight.data = (0.2 * torch.randn(weight.shape, generator=generator)).bfloat16().to(dtype)
    return peft_model.to(DEVICE).train()


def fused(peft_model, keep):
    mlp = peft_model.get_base_model()
    for layer in [*mlp.inner, mlp.down_proj]:
        layer.__class__ = type(layer.__class__.__name__, (FastLoraLinear, layer.__class__), {})
    return lambda x: gated_mlp(x, mlp.inner, mlp.down_proj, "silu", keep)


def judge(make, dtype, run_of, again=False, n_tokens=TOKENS):
    """Against float64, beside the error of PEFT's own layers in the same dtype."""
    x, g = inputs(dtype, n_tokens)
    exact = make(torch.float64)
    truth = outcome(exact, exact, x.double(), g.double())
    plain_model, model = make(dtype), make(dtype)
    plain = outcome(plain_model, plain_model, x, g)
    got = outcome(model, run_of(model), x, g, again)
    assert got.keys() == truth.keys()
    for name, value in truth.items():
        ours, theirs = error(got[name], value), error(plain[name], value)
        assert ours <= 1.5 * max(theirs, torch.finfo(dtype).eps / 4), f"{name}: {ours} against {theirs}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("joined", "bias"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("tile", [2**26, 70 * FEATURES])
def test_against_float64(monkeypatch, dtype, joined, bias, keep, tile):
    monkeypatch.setattr(module, "_TILE", tile)
    assert len(module._tiles(TOKENS, FEATURES, keep)) == (1 if tile == 2**26 else 3)
    judge(lambda dtype: adapted(dtype, joined, bias), dtype, lambda model: fused(model, keep), again=True)


def test_many_tiles_sum_to_exact_gradients(monkeypatch):
    monkeypatch.setattr(module, "_TILE", 128 * FEATURES)

    def with_biases(dtype):  # the gradient of down's is a plain sum
        return adapted(dtype, bias=True)

    judge(with_biases, torch.bfloat16, lambda model: fused(model, keep=False), n_tokens=60 * 128)


@pytest.mark.parametrize("joined", [False, True])
def test_the_last_backward_pass_writes_gradients_over_gate_and_up(joined):
    model = adapted(torch.float32, joined)
    (x, g), run = inputs(torch.float32), fused(model, keep=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(x.requires_grad_())
    kept = [t for t in saved if t.shape[-1] % FEATURES == 0]
    before = [t.clone() for t in kept]
    first = torch.autograd.grad(y, x, g, retain_graph=True)
    assert len(kept) == (1 if joined else 2)
    assert all(map(torch.equal, kept, before))
    last = torch.autograd.grad(y, x, g)
    assert torch.equal(*first, *last)
    assert not any(map(torch.equal, kept, before))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, g)


@pytest.mark.parametrize("keep", [True, False])
def test_tiles_cover_every_token_once(keep):
    for n_tokens in (1, 127, 128, 129, 5000, 2**20 + 1):
        for n_features in (1, 192, 14336, 2**26):
            tiles = module._tiles(n_tokens, n_features, keep)
            assert tiles[0].start == 0
            assert tiles[-1].stop >= n_tokens
            assert all(one.stop == other.start for one, other in pairwise(tiles))
            assert all(tile.start < n_tokens for tile in tiles)


@pytest.mark.parametrize("keep", [True, False])
def test_a_weight_changed_in_between_is_noticed(keep):
    model = adapted(torch.float32)
    (x, g), run = inputs(torch.float32), fused(model, keep)
    y = run(x.requires_grad_())
    with torch.no_grad():
        model.get_base_model().down_proj.lora_B["default"].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.backward(g)


@needs_bitsandbytes
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("tile", [2**26, 70 * FEATURES])
def test_in_four_bits(monkeypatch, keep, tile):
    """The truth is float64 over the dequantised weights: what is judged is the arithmetic."""
    from bitsandbytes.nn import Linear4bit

    def quantised(mlp):
        for name, layer in list(mlp.named_children()):
            four = Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
            four.compute_dtype, four.compute_type_is_set = torch.bfloat16, True
            four.weight.data = layer.weight.data
            setattr(mlp, name, four.to(DEVICE))
        return mlp

    def dequantised(mlp):
        for name, four in quantised(mlp.bfloat16()).named_children():
            layer = nn.Linear(four.in_features, four.out_features, bias=False)
            from bitsandbytes.functional import dequantize_4bit

            layer.weight.data = dequantize_4bit(four.weight, four.weight.quant_state).double()
            setattr(mlp, name, layer)
        return mlp

    def make(dtype):
        return adapted(dtype, convert=dequantised if dtype == torch.float64 else quantised)

    monkeypatch.setattr(module, "_TILE", tile)
    judge(make, torch.bfloat16, lambda model: fused(model, keep))


@pytest.mark.parametrize("mode", [True, "offload"])
def test_what_is_recomputed_is_not_held(mode):
    """Of every layer only its input outlives the forward pass."""
    model = tiny_model("llama", torch.float32)
    patch_model(model, "sdpa")
    enable_checkpointing(model, mode)
    mlp_inputs = []
    for layer in model.get_decoder().layers:
        norm = layer.post_attention_layernorm
        norm.register_forward_hook(lambda _, args, out: mlp_inputs.extend(map(weakref.ref, (args[0], out))))
    documents = random_documents([33, 64])
    loss = model(torch.cat(documents)[None].to(DEVICE), packed_seq_lengths=[33, 64]).logits.mean()
    assert [ref() for ref in mlp_inputs] == [None] * len(mlp_inputs)
    loss.backward()

"""Models whose frozen layers are in fp8: what they compute, save and refuse. On a CPU by the oracles."""

import pytest
import torch
from model_folder import save_model
from tiny import random_documents, run_alone, run_packed, tiny_model
from torch import nn

from unsloth_pack import FastLanguageModel, patch_model
from unsloth_pack.errors import InputError
from unsloth_pack.lora.quantised import Fp8Linear, quantize_to_fp8

LENGTHS = [33, 2, 64, 1]


def in_fp8(arch="llama"):
    model = tiny_model(arch, torch.float32, "cpu")
    base = model.get_base_model()
    n_quantized = quantize_to_fp8(base.get_decoder().layers)
    return model, n_quantized


def with_exact_weights(arch="llama"):
    """The same model with the weights that fp8 stands for, in float32."""
    model, _ = in_fp8(arch)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Fp8Linear):
                linear = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                linear.weight = nn.Parameter(child.rows.dequantized(torch.float32), requires_grad=False)
                linear.bias = child.bias
                setattr(module, name, linear)
    return model


@pytest.mark.parametrize("arch", ["llama", "qwen2", "phi3"])
def test_only_the_rounding_of_activations_is_lost(arch):
    """e4m3 has 3 bits after the point: each product is off by some hundredths, a sum of many by as much."""
    documents = random_documents(LENGTHS)
    exact = run_packed(patched(with_exact_weights(arch)), documents)
    model, n_quantized = in_fp8(arch)
    got = run_packed(patched(model), documents)
    assert n_quantized == {"llama": 14, "qwen2": 14, "phi3": 8}[arch]
    assert 0 < distance(got.logits, exact.logits) < 0.1
    for name, grad in exact.grads.items():
        assert distance(got.grads[name], grad) < 0.2, name


def patched(model):
    patch_model(model, "sdpa")
    return model


def distance(got, exact):
    return float((got - exact).norm() / exact.norm())


def test_documents_stay_apart():
    """Rows are quantised one by one, so that packed and alone are as close as in float32."""
    documents = random_documents(LENGTHS)
    model = patched(in_fp8()[0])
    packed = run_packed(model, documents).logits
    changed = [documents[0] + 1, *documents[1:]]
    assert torch.equal(run_packed(model, changed).logits[33:], packed[33:])
    alone = run_alone(model, documents).logits
    assert distance(packed, alone) < 0.05  # a last bit may round to another e4m3 value


def test_merged_weights_are_the_dequantised_ones_and_the_adapter(tmp_path):
    folder = str(save_model(tmp_path / "base"))
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=128)
    quantize_to_fp8(model.get_decoder().layers)
    weight = model.model.layers[0].mlp.up_proj.rows.dequantized(torch.float32)
    model = FastLanguageModel.get_peft_model(model, r=4)
    lora = model.get_base_model().model.layers[0].mlp.up_proj
    nn.init.normal_(lora.lora_B["default"].weight)
    assert lora.lora_A["default"].weight.dtype == torch.float32
    expected = weight + lora.get_delta_weight("default").detach()
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged, _ = FastLanguageModel.from_pretrained(str(tmp_path / "merged"), 128, dtype="float32")
    torch.testing.assert_close(
        merged.model.layers[0].mlp.up_proj.weight.detach(), expected, rtol=2**-8, atol=2**-12
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora needs the exact base weights; load without load_in_fp8"),
        ({"modules_to_save": ["up_proj"], "target_modules": ["q_proj"]}, "modules_to_save names .*up_proj"),
    ],
    ids=str,
)
def test_what_needs_the_weights_is_refused(tmp_path, options, message):
    model, _ = FastLanguageModel.from_pretrained(str(save_model(tmp_path / "base")), max_seq_length=128)
    quantize_to_fp8(model.get_decoder().layers)
    with pytest.raises(InputError, match=message):
        FastLanguageModel.get_peft_model(model, r=4, **options)


@pytest.mark.gpu
def test_it_loads_trains_and_replays_on_a_gpu(tmp_path):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no e4m3")
    folder = str(save_model(tmp_path / "base"))
    model, _ = FastLanguageModel.from_pretrained(folder, 128, dtype="bfloat16", load_in_fp8=True)
    model = FastLanguageModel.get_peft_model(model, r=4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(3, 90, (1, 96), device="cuda")
    losses = []
    for _ in range(8):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, packed_seq_lengths=[40, 56]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert str(model.get_base_model().model.step_graphs).startswith("captured")

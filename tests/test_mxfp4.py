"""gpt-oss loaded from MXFP4: the weights that transformers unpacks, steps as in float64, in less memory."""

import pytest
import torch
from mxfp4_folder import save_in_mxfp4
from own_memory import own_memory
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_quantised_experts import exact, with_factors
from tiny import MIXED_LENGTHS, error, random_documents, run_alone, run_packed
from transformers import AutoModelForCausalLM

from unsloth_pack import FastLanguageModel
from unsloth_pack.config import TrainOptions, changed
from unsloth_pack.errors import InputError
from unsloth_pack.lora.expert_stacks import STACKS
from unsloth_pack.run.estimate import estimate_run

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_in_mxfp4(tmp_path_factory.mktemp("mxfp4"))


def load(folder, **arguments):
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, **arguments)[0]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"load_in_4bit": True}, {"load_in_8bit": True}, {"full_finetuning": True}],
    ids=lambda arguments: next(iter(arguments), "plain"),
)
def test_experts_stay_packed_unless_they_train(arguments, folder):
    is_full = "full_finetuning" in arguments
    if arguments and not is_full:
        pytest.importorskip("bitsandbytes")
    model = load(folder, dtype=torch.bfloat16, **arguments)
    unpacked = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for layer, plain in zip(model.model.layers, unpacked.model.layers, strict=True):
        for name in STACKS:
            assert torch.equal(getattr(layer.mlp.experts, name), getattr(plain.mlp.experts, name))
        is_packed = {p.dtype for p in layer.mlp.experts.parameters() if p.dim() > 2} == {torch.uint8}
        assert is_packed != is_full
        assert layer.self_attn.q_proj.weight.is_floating_point() == (is_full or not arguments)
    assert all(parameter.requires_grad == is_full for parameter in model.parameters())


def test_a_packed_row_makes_the_step_of_documents_alone_in_float64(folder, tmp_path):
    documents = random_documents(MIXED_LENGTHS[:4])
    model = load(folder, dtype=torch.float32)
    as_dense = exact(model)
    adapted = with_factors(FastLanguageModel.get_peft_model(model, r=3))
    got = run_packed(adapted, documents)
    same = run_packed(with_factors(FastLanguageModel.get_peft_model(as_dense, r=3)), documents)
    assert torch.equal(got.logits, same.logits)
    assert all(torch.equal(got.grads[name], grad) for name, grad in same.grads.items())

    adapted.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    plain.config._experts_implementation = "eager"
    truth = run_alone(PeftModel.from_pretrained(plain, tmp_path, is_trainable=True).double(), documents)
    assert error(got.logits, truth.logits) < 1e-5
    assert got.grads.keys() == truth.grads.keys()
    assert any("experts" in name for name in got.grads)
    for name, grad in truth.grads.items():
        assert error(got.grads[name], grad) < 1e-4, name


def damage(folder, name, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[name] = change(weights[name])
    save_file(
        {name: weight for name, weight in weights.items() if weight is not None}, path, {"format": "pt"}
    )


@pytest.mark.parametrize(
    ("part", "change", "dtype", "said"),
    [
        (
            "down_proj_scales",
            lambda scales: scales.fill_(255),
            torch.bfloat16,
            "is up to 2e+39, too large for",
        ),
        (
            "down_proj_scales",
            lambda scales: scales.fill_(141),
            torch.float16,
            "is up to 1e+05, too large for",
        ),
        ("down_proj_scales", lambda scales: None, torch.float32, f"{EXPERTS}.down_proj_scales among them"),
        (
            "gate_up_proj_blocks",
            lambda blocks: blocks[:, :, :1].contiguous(),
            torch.float32,
            "and config.json makes it",
        ),
    ],
    ids=["NaN", "float16", "missing", "cut"],
)
def test_broken_files_are_refused(part, change, dtype, said, tmp_path):
    save_in_mxfp4(tmp_path)
    damage(tmp_path, f"{EXPERTS}.{part}", change)
    with pytest.raises(InputError) as refused:
        load(tmp_path, dtype=dtype)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_estimate_knows_their_size(folder):
    values = {"model_name": str(folder), "max_seq_length": 128, "dtype": "bfloat16"}
    model = load(folder, dtype=torch.bfloat16)
    scales = sum(b.nbytes for name, b in model.named_buffers() if name.endswith("proj.0.values"))
    held = sum(p.nbytes for p in model.parameters()) + scales
    assert estimate_run(changed(TrainOptions(), values), None).memory.weights == held


@pytest.mark.nightly
def test_on_a_cpu_the_weights_stay_in_their_files(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": 16, "num_hidden_layers": 4}
    save_in_mxfp4(tmp_path, **sizes, layer_types=["full_attention"] * 4)
    load(save_in_mxfp4(tmp_path / "small"))
    layer = 16 * 3 * 1024 * 1024 // 2  # bytes of a layer's blocks
    with own_memory() as seen:
        load(tmp_path, dtype=torch.bfloat16)
    assert max(seen) - seen[0] < layer / 2

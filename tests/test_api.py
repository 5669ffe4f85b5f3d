"""`FastLanguageModel`: what it loads, adapts, saves, reloads and refuses."""

import json
from importlib.metadata import version

import pytest
import torch
from model_folder import save_model
from peft import PeftModel
from safetensors import safe_open
from tiny import DEVICE, TINY, error, random_documents, routing
from transformers import AutoModelForCausalLM, AutoTokenizer

from unsloth_pack import FastLanguageModel, InputError, supported_architectures
from unsloth_pack.patching.patch import patch_of

ARCHITECTURES = list(supported_architectures())
LENGTHS = [9, 1, 20, 14]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3"))


def load(folder, **options):
    options = {"max_seq_length": 64, "dtype": torch.float32, **options}
    return FastLanguageModel.from_pretrained(str(folder), **options)


def packed_row(seed=0):
    ids = torch.cat(random_documents(LENGTHS, seed=seed)).to(DEVICE)[None]
    return {"input_ids": ids, "packed_seq_lengths": LENGTHS}


def train(model, steps=3, lr=0.05):
    """A bare loop; the losses of its steps on one row."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    row, losses = packed_row(), []
    model.train()
    for _ in range(steps):
        loss = model(**row, labels=row["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(**packed_row(seed=5)).logits.double().cpu()


def plain(folder):
    """Untouched transformers, eager because transformers 5.17 drops Gemma 2's softcap otherwise."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.to(DEVICE)


def alone(model):
    """The same documents, each in a call of its own, of a model that knows no packing."""
    model.eval()
    with torch.no_grad():
        documents = random_documents(LENGTHS, seed=5)
        return torch.cat([model(d.to(DEVICE)[None]).logits[0] for d in documents])[None].double().cpu()


def test_the_demo_loads_and_answers():
    model, tokenizer = FastLanguageModel.from_pretrained(max_seq_length=512)
    assert model.name_or_path == "demo"
    assert patch_of(model) is not None
    assert not any(parameter.requires_grad for parameter in model.parameters())
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Copy the words.\nwords: fig cap car"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    FastLanguageModel.for_inference(model)
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).strip() == "fig cap car"


def test_the_dtype_is_what_the_device_has(folder):
    model, _ = load(folder, dtype=None)
    assert model.dtype == (torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    for dtype in ("bfloat16", torch.float16):
        expected = torch.bfloat16 if dtype == "bfloat16" else dtype
        model = FastLanguageModel.get_peft_model(load(folder, dtype=dtype)[0], r=4)
        assert model.dtype == expected
        assert all(torch.isfinite(torch.tensor(train(model, lr=1e-3))))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "down_proj"]},
        {"use_dora": True},
        {"lora_dropout": 0.1},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"use_gradient_checkpointing": True},
        {"use_gradient_checkpointing": "offload"},
        {"use_gradient_checkpointing": "auto"},
    ],
    ids=str,
)
def test_every_kind_of_adapter_trains_is_saved_and_comes_back(folder, tmp_path, options):
    model = FastLanguageModel.get_peft_model(load(folder)[0], r=4, **options)
    before, frozen = logits(model), _frozen(model)
    losses = train(model, steps=6)
    assert losses[-1] < losses[0]
    if options.get("bias") != "all":
        assert all(torch.equal(weight, _frozen(model)[name]) for name, weight in frozen.items())
    trained = logits(model)
    assert error(before, trained) > 1e-3

    model.save_pretrained(tmp_path / "adapter")
    again, _ = load(tmp_path / "adapter")
    assert torch.equal(logits(again), trained)
    assert train(again, steps=1)[0] < losses[0]  # it goes on from there

    of_peft = PeftModel.from_pretrained(plain(folder), tmp_path / "adapter")
    assert error(alone(of_peft), trained) < 1e-5  # PEFT's own format


def _frozen(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}], ids=str)
def test_tokens_that_were_added_come_back_with_the_adapter(folder, tmp_path, options):
    model, tokenizer = load(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<call>", "<result>"]})
    model.resize_token_embeddings(len(tokenizer))
    model = FastLanguageModel.get_peft_model(model, r=4, **options)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(InputError, match="size mismatch"):  # another tokenizer's tokens would be meaningless
        load(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    again, with_tokens = load(tmp_path / "adapter")
    assert with_tokens.convert_tokens_to_ids("<result>") == again.config.vocab_size - 1 == 259
    ids = torch.tensor([[258, 5, 259, 7]], device=DEVICE)
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_every_projection_of_latent_attention_gets_an_adapter(q_lora_rank, tmp_path):
    save_model(tmp_path / "model", "deepseek_v3", q_lora_rank=q_lora_rank)
    model, _ = load(tmp_path / "model")
    attention = model.get_decoder().layers[0].self_attn
    linear = {name for name, module in attention.named_children() if type(module) is torch.nn.Linear}
    assert len(linear) == (4 if q_lora_rank is None else 5)
    FastLanguageModel.get_peft_model(model, r=4)
    assert {name for name, module in attention.named_children() if hasattr(module, "lora_A")} == linear


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_merged_model_needs_no_package(arch, tmp_path):
    model, tokenizer = load(save_model(tmp_path / "base", arch))
    targets = "all-linear" if arch == "phi3" else None
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=targets)
    train(model, steps=4)
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = plain(tmp_path / "merged")
    base = plain(tmp_path / "base")
    with routing(model) as seen:
        trained = logits(model)
    routes = {name.removeprefix("base_model.model."): torch.cat(parts) for name, parts in seen.items()}
    model.save_pretrained(tmp_path / "adapter")
    has_experts = "moe_intermediate_size" in TINY[arch]
    if not has_experts or version("peft") >= "0.21":  # before, PEFT cannot load adapters of experts
        assert error(logits(load(tmp_path / "adapter")[0]), trained) < 1e-6
        by_peft = PeftModel.from_pretrained(plain(tmp_path / "base"), tmp_path / "adapter").merge_and_unload()
        with routing(by_peft, routes):
            assert error(alone(by_peft), trained) < 1e-5
        rounded = by_peft.bfloat16().float()
        with routing(merged, routes), routing(rounded, routes):
            assert error(alone(merged), alone(rounded)) < 0.02
    # bfloat16 rounds the weights by up to 2^-9, which a recurrence amplifies; training moved them by far more
    with routing(merged, routes):  # a rounded weight may send a token to another expert
        assert error(alone(merged), trained) < 0.02 or supported_architectures()[arch].mixers
    assert error(alone(base), trained) > 0.05
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == tokenizer.eos_token
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert str(tmp_path) not in json.dumps(config)
    assert _weight_names(tmp_path / "merged") == _weight_names(tmp_path / "base")
    assert load(tmp_path / "merged")[0].config.model_type == supported_architectures()[arch].model_type


def _weight_names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_quantised_weights_train_and_merge(folder, tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    base, tokenizer = load(folder, **{bits: True})
    kinds = {type(module).__name__ for module in base.modules()}
    assert ("Linear4bit" if bits == "load_in_4bit" else "Linear8bitLt") in kinds
    model = FastLanguageModel.get_peft_model(base, r=4)
    report = patch_of(model).report
    if bits == "load_in_4bit":
        assert "4 bits" in report.fused["base"]
        assert "LoRA" not in report.not_fused
    else:
        assert "on a Linear8bitLt" in report.not_fused["LoRA"]
    losses = train(model, steps=6)
    assert losses[-1] < losses[0]
    trained = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again, _ = load(tmp_path / "adapter", **{bits: True})
    assert error(logits(again), trained) < 1e-5
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    # int8 also rounds activations, so what was merged is judged beside the adapter on the full weights
    untrained = plain(folder)
    moved = error(alone(untrained), trained)
    twin = PeftModel.from_pretrained(untrained, tmp_path / "adapter")
    expected = trained if bits == "load_in_4bit" else alone(twin)
    assert error(alone(plain(tmp_path / "merged")), expected) < 0.1 * moved


def test_full_finetuning_trains_every_weight(folder, tmp_path):
    model, tokenizer = load(folder, full_finetuning=True, dtype=None)
    assert model.dtype == torch.float32
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, lr=1e-3)
    assert losses[-1] < losses[0]
    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = plain(tmp_path / "merged")
    assert error(alone(merged), logits(model)) < 0.02
    with pytest.raises(InputError, match="the model has no adapter; use 'merged_16bit'"):
        model.save_pretrained_merged(tmp_path / "lora", save_method="lora")


def test_generation_before_between_and_after_training(folder):
    model = FastLanguageModel.get_peft_model(load(folder)[0], r=4)
    ids = packed_row()["input_ids"][:, :5]
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "output_logits": True}

    def generate():
        out = FastLanguageModel.for_inference(model).generate(ids, **options, return_dict_in_generate=True)
        return torch.stack(out.logits)

    before = generate()
    assert torch.equal(before, generate())
    FastLanguageModel.for_training(model)
    assert model.training
    train(model)
    after = generate()
    assert not torch.equal(before, after)
    with model.disable_adapter():
        assert torch.equal(generate(), before)


def test_a_save_that_fails_leaves_what_was_there(folder, tmp_path, monkeypatch):
    model = FastLanguageModel.get_peft_model(load(folder)[0], r=4)
    target = tmp_path / "saved"
    model.save_pretrained_merged(target, save_method="lora")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    broken = next(p for name, p in model.named_parameters() if "lora_B" in name)
    with torch.no_grad():
        broken.fill_(torch.nan)
    with pytest.raises(InputError, match=r"layers.0.self_attn.q_proj.weight is not finite"):
        model.save_pretrained_merged(target)
    with torch.no_grad():
        broken.fill_(0)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unsloth_pack.checkpoints.saving.write_weights", full)
    with pytest.raises(InputError, match="No space left on device"):
        model.save_pretrained_merged(target)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_length": 257}, "max_seq_length is 257, .* has 256 positions; lower it"),
        ({"max_sequence_length": 64}, "does not know max_sequence_length=64; correct the name"),
        ({"torch_dtype": "float16"}, "torch_dtype is 'float16', which .* does not take; give dtype"),
        ({"quantization_config": {}}, "does not take; give load_in_4bit, load_in_8bit or load_in_fp8"),
        ({"attn_implementation": "eager"}, "from_pretrained does not take; give attn_backend"),
        ({"rope_scaling": {"factor": 2}}, "does not take; give rope_parameters whole, with rope_type"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_loaded(folder, options, message):
    with pytest.raises(InputError, match=message):
        load(folder, **options)


@pytest.mark.parametrize("name", ["demo", "folder"])
def test_a_pickled_model_saves_itself(name, folder, tmp_path):
    model, tokenizer = load(folder if name == "folder" else name)
    model = FastLanguageModel.get_peft_model(model, r=4)
    train(model)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    again.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(load(tmp_path / "adapter")[0]), logits(model))
    again.save_pretrained_merged(tmp_path / "merged", tokenizer)
    assert error(alone(plain(tmp_path / "merged")), logits(model)) < 0.02
    assert "save_method" in again.save_pretrained_merged.__doc__

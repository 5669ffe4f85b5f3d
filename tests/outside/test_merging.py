"""A merged model computes what was trained, or one line says why not: tuners and variants of PEFT."""

import copy
import re
from itertools import product
from typing import Any, NamedTuple

import peft
import pytest
import torch
from model_folder import save_model
from outside_models import DEVICE, IDS, logits
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from transformers import AutoModelForCausalLM

from unsloth_pack import FastLanguageModel, InputError, patch_model
from unsloth_pack.cli import main

TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]


class Case(NamedTuple):
    """An adapter: PEFT's config, and what the line that refuses it says; None where it merges."""

    config: str
    options: dict[str, Any]
    refused: str | None = None


def tuner(config, refused=None, **options):
    return Case(config, {"target_modules": TARGETS, "task_type": "CAUSAL_LM", **options}, refused)


def lora(refused=None, **options):
    return tuner("LoraConfig", refused, **{"r": 4, "lora_alpha": 8, **options})


TUNERS = {
    "LORA": lora(),
    "ADALORA": tuner("AdaLoraConfig", init_r=4, target_r=2, tinit=1, tfinal=1, total_step=10),
    "ADAPTION_PROMPT": Case(
        "AdaptionPromptConfig",
        {"task_type": "CAUSAL_LM", "adapter_len": 4, "adapter_layers": 1},
        "self_attn, ADAPTION_PROMPT, cannot be merged",
    ),
    "BOFT": tuner("BOFTConfig", boft_block_size=4),
    "FOURIERFT": tuner("FourierFTConfig", n_frequency=64, scaling=20.0),
    "HRA": tuner("HRAConfig", r=4),
    "IA3": tuner("IA3Config", feedforward_modules=["down_proj"]),
    "LN_TUNING": tuner("LNTuningConfig", target_modules=["input_layernorm", "norm"]),
    "LOHA": tuner("LoHaConfig", r=4, alpha=4),
    "POLY": tuner("PolyConfig", "POLY, cannot be merged: task_ids", r=4),
    "PROMPT_TUNING": Case(
        "PromptTuningConfig",
        {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4},
        "of type PROMPT_TUNING, and its weights",
    ),
    "ROAD": tuner("RoadConfig", group_size=8),
    "TRAINABLE_TOKENS": tuner(
        "TrainableTokensConfig", token_indices=[3, 40, 257], target_modules=["embed_tokens"]
    ),
    "VBLORA": tuner("VBLoRAConfig", r=4, num_vectors=16, vector_length=8),
    "VERA": tuner("VeraConfig", r=8),
    "XLORA": Case("XLoraConfig", {"task_type": "CAUSAL_LM", "hidden_size": 64}, "XLORA|XLora"),
}
ENDS = ["lm_head", "embed_tokens"]
# Named after the field of LoraConfig that they are about
VARIANTS = {
    "use_rslora": lora(use_rslora=True),
    "target_modules: both ends": lora(target_modules=ENDS),
    "ensure_weight_tying: adapters": lora(target_modules=ENDS, ensure_weight_tying=True),
    "ensure_weight_tying: modules": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "modules_to_save: head": lora(modules_to_save=["lm_head"]),
    "modules_to_save: both ends": lora(modules_to_save=ENDS),
    "modules_to_save: norms": lora(modules_to_save=["norm", "input_layernorm"]),
    "trainable_token_indices": lora(trainable_token_indices=[3, 40, 257]),
    "trainable_token_indices: both ends": lora(
        trainable_token_indices={"embed_tokens": [3, 4], "lm_head": [3, 5]}
    ),
    "use_dora": lora(use_dora=True),
    "use_dora: embedding": lora(target_modules=["embed_tokens", *TARGETS], use_dora=True),
    "monteclora_config": lora(monteclora_config=peft.MontecloraConfig()),
    "alora_invocation_tokens": lora("LORA ALora.*does not support merging", alora_invocation_tokens=[5, 6]),
    "lora_bias": lora("LORA, .*base layer has no bias", lora_bias=True),
    "init_lora_weights: pissa": lora(init_lora_weights="pissa"),
    "layer_replication": lora(layer_replication=[[0, 1], [0, 1]]),
    # on a model whose layers have biases
    "bias: all": lora(bias="all"),
    "lora_bias: with biases": lora(lora_bias=True),
    "IA3: with biases": tuner("IA3Config", feedforward_modules=["down_proj"]),
    # on a mixture of experts
    "target_parameters: experts": lora(
        target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    ),
}
CASES = TUNERS | VARIANTS
IN_4_BITS = [
    *("LORA", "IA3", "PROMPT_TUNING", "use_dora", "modules_to_save: both ends"),
    *("trainable_token_indices: both ends", "ensure_weight_tying: adapters"),
]
NOT_ON_A_PATCHED_MODEL = ("ADAPTION_PROMPT", "PROMPT_TUNING", "alora_invocation_tokens")
BASES = {"untied": {}, "tied": {"tie_word_embeddings": True}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes tiny models, each once."""
    made = {}

    def make(case, base):
        options = {**BASES[base], "num_hidden_layers": 1, "intermediate_size": 128}
        if "biases" in case or case.startswith("bias"):
            options |= {"attention_bias": True, "mlp_bias": True}
        if "experts" in case:
            options = {**BASES[base], "architecture": "qwen3_moe"}
        key = str(options)
        if key not in made:
            made[key] = str(save_model(tmp_path_factory.mktemp("base"), **options))
        return made[key]

    return make


def adapted(case, model, tmp_path):
    """The model with the adapter of a case."""
    peft_type, options, *_ = CASES[case]
    if case == "XLORA":
        model.config.use_cache = False
        get_peft_model(copy.deepcopy(model), lora_config()).save_pretrained(tmp_path / "expert")
        options = {**options, "adapters": {"one": str(tmp_path / "expert")}}
    if case in NOT_ON_A_PATCHED_MODEL:
        patch_model(model).undo()
    return get_peft_model(model, getattr(peft, peft_type)(**options))


def lora_config(**options):
    return LoraConfig(**{**lora().options, **options})


def train(model):
    """One forward and backward pass, as caches of tuners need, and then a large change of what is trained."""
    model.train()
    model(input_ids=IDS.to(model.device), labels=IDS.to(model.device)).loss.backward()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def reloaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)


def loaded(folder, **options):
    return FastLanguageModel.from_pretrained(folder, 128, torch.float32, **options)


def require_equal(folder, trained):
    """The model in a folder gives these logits, but for the rounding of its weights to bfloat16.

    How much that rounding matters is measured: by the same weights, rounded to one bit less.
    """
    merged = reloaded(folder)
    got = logits(merged)
    with torch.no_grad():
        for weight in merged.parameters():
            step = (2.0**17 + 1) * weight  # Veltkamp's splitting: keeps the first 7 of 24 bits
            weight.copy_(step - (step - weight))
    one_bit = (logits(merged) - got).norm()
    assert one_bit < 0.2 * trained.norm()  # else nothing would be compared
    assert (got - trained).norm() <= one_bit, f"{float((got - trained).norm() / trained.norm()):.3f}"


def refusal_of(save):
    with pytest.raises(InputError) as caught:
        save()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("case", "base"), [*product(CASES, BASES), *product(IN_4_BITS, ["4 bits"])])
def test_equal_or_refused(case, base, folders, tmp_path):
    in_4_bits = base == "4 bits"
    if in_4_bits:
        pytest.importorskip("bitsandbytes")
    model, tokenizer = loaded(folders(case, "tied" if in_4_bits else base), load_in_4bit=in_4_bits)
    target = tmp_path / "merged"
    if why := CASES[case].refused:

        def merge():
            wrapped = adapted(case, model, tmp_path)  # PEFT's model has to live while its base is saved
            wrapped.save_pretrained_merged(target, tokenizer)

        assert re.search(why, refusal_of(merge))
        assert not target.exists()
        return
    model = train(adapted(case, model, tmp_path))
    trained = logits(model)
    if in_4_bits:  # bitsandbytes packs its weights anew
        model.save_pretrained_merged(target, tokenizer)
    else:
        with model.disable_adapter():
            assert (logits(model) - trained).norm() > 0.05 * trained.norm(), "the adapter does nothing"
        model.train()
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        model.save_pretrained_merged(target, tokenizer)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(weight, after[name]) for name, weight in before.items())
        assert all(module.training for module in model.modules())
    require_equal(target, trained)


def two_adapters(folder, **options):
    """The first adapter is on q_proj and v_proj, the second on v_proj and up_proj; both are trained."""
    model, _ = loaded(folder, **options)
    model = get_peft_model(model, lora_config(target_modules=["q_proj", "v_proj"]))
    model.add_adapter("second", lora_config(target_modules=["v_proj", "up_proj"]))
    train(model)
    model.set_adapter("second")
    return train(model)


def activate_both(model):
    model.base_model.set_adapter(["default", "second"])


STATES = {
    "one of two": (lambda model: None, None),
    "both": (activate_both, None),
    "merged": (lambda model: model.merge_adapter(), None),
    "both merged": (lambda model: (activate_both(model), model.merge_adapter()), None),
    "merged and unmerged": (lambda model: (model.merge_adapter(), model.unmerge_adapter()), None),
    "deleted": (lambda model: model.delete_adapter("default"), None),
    "another one merged": (lambda model: model.merge_adapter(["default"]), "second.* only others are merged"),
    "disabled": (lambda model: model.base_model.disable_adapter_layers(), "is disabled"),
}


@pytest.mark.parametrize("state", [*STATES, "merged, on 4 bits"])
def test_adapters_in_every_state(state, folders, tmp_path):
    options = {"load_in_4bit": True} if "4 bits" in state else {}
    if options:
        pytest.importorskip("bitsandbytes")
    bring, why = STATES[state.partition(",")[0]]
    model = two_adapters(folders("LORA", "untied"), **options)
    bring(model)
    if why:
        assert re.search(why, refusal_of(lambda: model.save_pretrained_merged(tmp_path / "merged")))
        return
    trained = logits(model)
    model.save_pretrained_merged(tmp_path / "merged")
    require_equal(tmp_path / "merged", trained)


@pytest.mark.parametrize("case", ["LORA", "HRA"])
def test_on_eight_bits(case, folders, tmp_path):
    """HRA reads int8 as if it were the weight, so that no merged model computes what it trained."""
    pytest.importorskip("bitsandbytes")
    model, _ = loaded(folders(case, "untied"), load_in_8bit=True)
    trained = logits(train(model := adapted(case, model, tmp_path)))
    target = tmp_path / "merged"
    if case == "HRA":
        assert "HRA, cannot be merged: PEFT's merged layer computes something else" in refusal_of(
            lambda: model.save_pretrained_merged(target)
        )
        return
    model.save_pretrained_merged(target)
    assert torch.equal(logits(model), trained)
    moved = (logits(reloaded(folders(case, "untied"))) - trained).norm()
    assert (logits(reloaded(target)) - trained).norm() < 0.1 * moved  # int8 rounds activations too


def test_a_merge_that_computes_something_else_is_refused(folders, tmp_path, monkeypatch):
    """Wherever the fault lies, here in a merge with less than the scaling."""
    right = LoraLinear.get_delta_weight
    monkeypatch.setattr(LoraLinear, "get_delta_weight", lambda layer, name: right(layer, name) * 0.9)
    model, _ = loaded(folders("LORA", "untied"))
    model = train(FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj"]))
    said = refusal_of(lambda: model.save_pretrained_merged(tmp_path / "merged"))
    assert re.search(r"q_proj, LORA, cannot be merged: .* computes something else", said)
    assert not (tmp_path / "merged").exists()


def test_a_trained_weight_without_a_place_is_refused(folders, tmp_path):
    model, _ = loaded(folders("LORA", "untied"))
    model = FastLanguageModel.get_peft_model(model, r=4)
    model.get_base_model().model.norm.offset = torch.nn.Parameter(torch.ones(64))
    said = refusal_of(lambda: model.save_pretrained_merged(tmp_path / "merged"))
    assert "weight model.norm.offset is (64,), and not missing as in a new model" in said


def test_weights_beyond_float16_are_refused(folders, tmp_path):
    model, _ = FastLanguageModel.from_pretrained(folders("LORA", "untied"), 128, dtype="float16")
    model = FastLanguageModel.get_peft_model(model, r=4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(200.0)
    said = refusal_of(lambda: model.save_pretrained_merged(tmp_path / "merged"))
    assert re.search(r"merged weight model\.layers\.0\..* is not finite as torch.float16", said)


def mixed(folder, tmp_path):
    base, _ = loaded(folder)
    model = get_peft_model(base, lora_config(), mixed=True)
    model.add_adapter("second", peft.LoHaConfig(r=4, target_modules=["v_proj", "up_proj"]))
    model.set_adapter(["default", "second"])
    train(model).save_pretrained_merged(tmp_path / "merged")
    return model


def by_the_base(folder, tmp_path):
    base, _ = loaded(folder)
    model = train(get_peft_model(base, lora_config(use_dora=True, modules_to_save=["lm_head"])))
    base.save_pretrained_merged(tmp_path / "merged")
    return model


def by_the_own_door(folder, tmp_path):
    base, tokenizer = loaded(folder)
    model = train(FastLanguageModel.get_peft_model(base, r=4, kasa_config=peft.KasaConfig()))
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    return model


def patched_anew(folder, tmp_path):
    base, _ = loaded(folder)
    model = get_peft_model(base, peft.IA3Config(**CASES["IA3"].options))
    patch_model(model)
    train(model).save_pretrained_merged(tmp_path / "merged")
    return model


def put_in_by_transformers(folder, tmp_path):
    model, _ = loaded(folder)
    model.add_adapter(lora_config(trainable_token_indices=[3, 40]))
    train(model).save_pretrained_merged(tmp_path / "merged")
    return model


@pytest.mark.parametrize("door", [by_the_base, by_the_own_door, patched_anew, put_in_by_transformers, mixed])
def test_every_door(door, folders, tmp_path):
    model = door(folders("LORA", "tied"), tmp_path)
    require_equal(tmp_path / "merged", logits(model))


def peft_folder(case, base, tmp_path):
    """What PEFT saves of a model that was trained, and its logits."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = train(adapted(case, model, tmp_path))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", logits(model)


MERGED_BY_COMMAND = [
    *("LORA", "use_dora", "trainable_token_indices: both ends", "modules_to_save: both ends"),
    *("ensure_weight_tying: adapters", "target_parameters: experts"),
]


@pytest.mark.parametrize("case", MERGED_BY_COMMAND)
def test_the_command(case, folders, tmp_path, capsys):
    adapter, trained = peft_folder(case, folders(case, "tied"), tmp_path)
    code = main(["merge", f"--model_name={adapter}", f"--save_path={tmp_path / 'merged'}"])
    assert code == 0, capsys.readouterr().err
    require_equal(tmp_path / "merged", trained)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("lora_bias", "base layer has no bias"),
        ("IA3", "of type IA3; only LORA can be loaded"),
    ],
)
def test_the_command_refuses(case, why, folders, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(folders(case, "untied"))
    adapted(case, model, tmp_path).save_pretrained(tmp_path / "adapter")
    capsys.readouterr()
    target = tmp_path / "merged"
    assert main(["merge", f"--model_name={tmp_path / 'adapter'}", f"--save_path={target}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert why in line
    assert not target.exists()

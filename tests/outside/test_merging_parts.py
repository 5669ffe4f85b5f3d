"""Trained tokens, saved modules and LoRA on embeddings, together: merged is trained, and so is reloaded."""

import pytest
import torch
from model_folder import save_model
from outside_models import DEVICE, logits
from peft import PeftModel
from transformers import AutoModelForCausalLM

from unsloth_pack import FastLanguageModel, InputError

PROJECTIONS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
PARTS = {
    "tokens, head": {"trainable_token_indices": [3, 40], "modules_to_save": ["lm_head"]},
    "tokens, LoRA on the head": {
        "trainable_token_indices": [3, 257],
        "target_modules": [*PROJECTIONS, "lm_head"],
    },
    "LoRA on the embedding, head": {
        "target_modules": [*PROJECTIONS, "embed_tokens"],
        "modules_to_save": ["lm_head"],
    },
    "embedding, LoRA on the head": {
        "modules_to_save": ["embed_tokens"],
        "target_modules": [*PROJECTIONS, "lm_head"],
    },
    "tokens at both ends, norms": {
        "trainable_token_indices": {"embed_tokens": [3, 4], "lm_head": [5, 40]},
        "modules_to_save": ["norm"],
    },
}
BASES = {
    "float": {},
    "4 bits": {"load_in_4bit": True},
    "experts": {"architecture": "qwen3_moe"},
    "experts in 4 bits": {"architecture": "qwen3_moe", "load_in_4bit": True},
}
REFUSED_WHERE_TIED = {"tokens, head"}  # PEFT would train the head apart from the tokens, and fail in a call


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def make(architecture, is_tied):
        if (architecture, is_tied) not in made:
            folder = tmp_path_factory.mktemp("base")
            options = {"tie_word_embeddings": is_tied, "num_hidden_layers": 1, "intermediate_size": 128}
            if architecture == "qwen3_moe":
                options["num_experts_per_tok"] = 4  # all: rounding then changes no token's route
            made[architecture, is_tied] = str(save_model(folder, architecture, **options))
        return made[architecture, is_tied]

    return make


def trained_model(folder, parts, **options):
    """A model whose every trained number has moved."""
    model, tokenizer = FastLanguageModel.from_pretrained(folder, 128, torch.float32, **options)
    wanted = {"target_modules": PROJECTIONS, "adapter_on_head": True, **parts}
    model = FastLanguageModel.get_peft_model(model, r=4, **wanted)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.15 * torch.randn_like(parameter))
    return model, tokenizer


def distance(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("parts", PARTS)
def test_merged_is_trained(parts, base, is_tied, folders, tmp_path):
    options = dict(BASES[base])
    if options.get("load_in_4bit"):
        pytest.importorskip("bitsandbytes")
    folder = folders(options.pop("architecture", "llama"), is_tied)
    if is_tied and parts in REFUSED_WHERE_TIED:
        with pytest.raises(InputError, match="names lm_head, and trainable_token_indices trains single rows"):
            trained_model(folder, PARTS[parts], **options)
        return
    model, tokenizer = trained_model(folder, PARTS[parts], **options)
    expected = logits(model)
    untrained = logits(FastLanguageModel.from_pretrained(folder, 128, torch.float32, **options)[0])
    assert distance(untrained, expected) > 0.05, "what was trained matters"

    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).to(DEVICE)
    assert distance(logits(merged), expected) < 0.02  # weights in bfloat16

    model.save_pretrained_merged(tmp_path / "adapter", tokenizer, save_method="lora")
    ours, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), 128, torch.float32, **options)
    assert distance(logits(ours), expected) < 1e-6
    if not options:
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
        assert distance(logits(PeftModel.from_pretrained(plain, tmp_path / "adapter")), expected) < 1e-5

"""A tiny model with experts, adapted as users adapt it."""

import torch
from tiny import DEVICE, random_documents, tiny_config
from transformers import AutoModelForCausalLM

from unsloth_pack import FastLanguageModel, patch_model

EVERY_LAYER = dict(mlp_only_layers=[])  # as in Qwen3-30B-A3B


def base(arch="qwen3_moe", **overrides):
    torch.manual_seed(0)
    config = tiny_config(arch, **overrides)
    return AutoModelForCausalLM.from_config(config).requires_grad_(False).to(DEVICE)


def adapted(model, targets, **options):
    patch_model(model)
    return FastLanguageModel.get_peft_model(model, r=3, lora_alpha=5, target_modules=targets, **options)


def logits(model):
    model.eval()
    (ids,) = random_documents([23])
    with torch.no_grad():
        return model(input_ids=ids[None].to(DEVICE), use_cache=False).logits

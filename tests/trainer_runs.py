"""Rows, an adapted model and arguments for runs of trainers, all of them tiny."""

import torch
from tiny import DEVICE
from trl.trainer.utils import add_fused_lm_head

from unsloth_pack import FastLanguageModel

SIZES = [(5, 30), (12, 3), (1, 9), (20, 21), (2, 2), (7, 50), (3, 11), (30, 28), (1, 1), (16, 4)]  # bytes


PACKING = {"packing": True, "padding_free": True}


def text(n, start):
    return "".join(chr(97 + (start + 7 * i) % 26) for i in range(n))


PAIRS = [(text(p, i), text(c, 3 * i + 1)) for i, (p, c) in enumerate(SIZES)]
ROWS = {
    "text": [{"text": prompt + answer} for prompt, answer in PAIRS],
    "completion": [{"prompt": prompt, "completion": answer} for prompt, answer in PAIRS],
    "assistant": [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": a}]} for p, a in PAIRS
    ],
}


def adapted(folder):
    model, tokenizer = FastLanguageModel.from_pretrained(folder, max_seq_length=256, dtype=torch.float32)
    model = FastLanguageModel.get_peft_model(model, r=4)
    fill_adapter(model)
    return model, tokenizer


def fill_adapter(model):
    """B starts at 0, where A would have no gradient."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(weight)


def arguments(tmp_path, **options):
    given = {"output_dir": str(tmp_path), "num_train_epochs": 1, "per_device_train_batch_size": 1}
    given |= {"gradient_accumulation_steps": 32, "max_grad_norm": 0.0, "report_to": "none", "optim": "sgd"}
    given |= {"use_cpu": DEVICE == "cpu", "bf16": False, "disable_tqdm": True, "logging_steps": 1}
    given |= {"save_strategy": "no", "gradient_checkpointing": False, "logging_nan_inf_filter": False}
    return given | options


FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def base_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def asked_by_trl(model, fields=FIELDS, **options):
    add_fused_lm_head(base_of(model), outputs=fields, **options)
    return base_of(model)

"""Short runs of TRL's trainers, each over an untouched model or a patched one."""

import torch
import trl
from datasets import Dataset
from outside_models import DEVICE, fill_adapters
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.experimental import orpo

SIZES = [(3, 20), (12, 1), (1, 9), (9, 4), (2, 30), (5, 12), (20, 3), (1, 16)]
PAIRS = [("ab" * n, "cd" * m, "ef" * (m // 2 + 1)) for n, m in SIZES]
PREFERENCES = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
COMPLETIONS = [{"prompt": p, "completion": c} for p, c, _ in PAIRS]
LABELLED = [{**row, "label": place % 2 == 0} for place, row in enumerate(COMPLETIONS)]
PROMPTS = [{"prompt": p} for p, _, _ in PAIRS]
ROWS = {"SFT": COMPLETIONS, "KTO": LABELLED, "Distillation": COMPLETIONS, "GRPO": PROMPTS, "RLOO": PROMPTS}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(folder, kind, dtype=torch.float32):
    torch.manual_seed(0)
    loader, task, options = AutoModelForCausalLM, "CAUSAL_LM", {"attn_implementation": "sdpa"}
    if kind == "Reward":
        loader, task, options["num_labels"] = AutoModelForSequenceClassification, "SEQ_CLS", 1
    model = loader.from_pretrained(folder, dtype=torch.float32, **options).to(DEVICE)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS, task_type=task))
    return fill_adapters(model).to(dtype)


def variety(completions, **_):
    return [float(len(set(completion))) for completion in completions]


def trainer_of(kind, model, tokenizer, output, options, **more):
    home = orpo if kind == "ORPO" else trl
    if kind in ("GRPO", "RLOO"):
        options = {"max_completion_length": 8, "num_generations": 2, **options}
        more["reward_funcs"] = variety
    elif kind != "Distillation":
        options = {"max_length": 64, **options}
    config = getattr(home, f"{kind}Config")(
        output_dir=str(output), max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, optim="sgd", max_grad_norm=0.0, report_to="none", save_strategy="no", bf16=False,
        gradient_checkpointing=False, use_cpu=DEVICE == "cpu", disable_tqdm=True, logging_steps=1, seed=3,
        **options,
    )  # fmt: skip
    rows = Dataset.from_list(ROWS.get(kind, PREFERENCES))
    return getattr(home, f"{kind}Trainer")(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, **more
    )


def logged(trainer):
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]

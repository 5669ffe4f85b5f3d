"""Short runs of TRL's trainers, each over an untouched model or a patched one."""

from importlib import import_module

import torch
from datasets import Dataset
from outside_models import DEVICE, fill_adapters
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

SIZES = [(3, 20), (12, 1), (1, 9), (9, 4), (2, 30), (5, 12), (20, 3), (1, 16)]
PAIRS = [("ab" * n, "cd" * m, "ef" * (m // 2 + 1)) for n, m in SIZES]
PREFERENCES = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
COMPLETIONS = [{"prompt": p, "completion": c} for p, c, _ in PAIRS]
LABELLED = [{**row, "label": place % 2 == 0} for place, row in enumerate(COMPLETIONS)]
PROMPTS = [{"prompt": p} for p, _, _ in PAIRS]
CHATS = [
    {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]} for p, c, _ in PAIRS
]
TRIPLES = [{**row, "reference": "gh" * (place % 3 + 1)} for place, row in enumerate(PREFERENCES)]
DEMONSTRATED = [{"prompt": p, "privileged_context": c} for p, c, _ in PAIRS]
CUT, SHORT = {"max_length": 64}, {"max_completion_length": 8, "num_generations": 2}
TRAINERS = {  # where TRL has it, the name of its classes, rows, options
    "SFT": ("trl", "SFT", COMPLETIONS, CUT),
    "DPO": ("trl", "DPO", PREFERENCES, CUT),
    "DPO and SFT": ("trl", "DPO", PREFERENCES, CUT | {"loss_type": ["sigmoid", "sft"]}),
    "DPO precomputed": ("trl", "DPO", PREFERENCES, CUT | {"precompute_ref_log_probs": True}),
    "KTO": ("trl", "KTO", LABELLED, CUT),
    "ORPO": ("trl.experimental.orpo", "ORPO", PREFERENCES, CUT),
    "CPO": ("trl.experimental.cpo", "CPO", PREFERENCES, CUT),
    "SimPO": ("trl.experimental.cpo", "CPO", PREFERENCES, CUT | {"loss_type": "simpo", "cpo_alpha": 0.0}),
    "TPO": ("trl.experimental.tpo", "TPO", TRIPLES, CUT),
    "Reward": ("trl", "Reward", PREFERENCES, CUT),
    "GKD": ("trl.experimental.gkd", "GKD", CHATS, CUT | {"lmbda": 0.0}),
    "GKD on-policy": ("trl.experimental.gkd", "GKD", CHATS, CUT | {"lmbda": 1.0, "max_new_tokens": 6}),
    "GOLD": ("trl.experimental.gold", "GOLD", CHATS, CUT | {"lmbda": 0.0, "max_completion_length": 8}),
    "Distillation": ("trl", "Distillation", COMPLETIONS, {"max_completion_length": 6}),
    "SDFT": ("trl.experimental.sdft", "SDFT", DEMONSTRATED, SHORT),
    "OnlineDPO": ("trl.experimental.online_dpo", "OnlineDPO", PROMPTS, CUT | {"max_new_tokens": 6}),
    "GRPO": ("trl", "GRPO", PROMPTS, SHORT),
    "GSPO": ("trl", "GRPO", PROMPTS, SHORT | {"importance_sampling_level": "sequence"}),
    "DAPO": ("trl", "GRPO", PROMPTS, SHORT | {"loss_type": "dapo", "top_entropy_quantile": 0.5}),
    "GMPO": ("trl.experimental.gmpo", "GMPO", PROMPTS, SHORT),
    "RLOO": ("trl", "RLOO", PROMPTS, SHORT),
}
WITH_TEACHER, WITH_REWARD = ("GKD", "GOLD", "Distillation"), ("GRPO", "GMPO", "RLOO", "OnlineDPO")
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


def trainer_of(name, model, tokenizer, output, options, **more):
    home, kind, rows, own = TRAINERS[name]
    home = import_module(home)
    if kind in WITH_REWARD:
        more["reward_funcs"] = variety
    config = getattr(home, f"{kind}Config")(
        output_dir=str(output), max_steps=2,
        learning_rate=1e-2, optim="sgd", max_grad_norm=0.0, report_to="none", save_strategy="no", bf16=False,
        gradient_checkpointing=False, use_cpu=DEVICE == "cpu", disable_tqdm=True, logging_steps=1, seed=3,
        **{"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4} | own | options,
    )  # fmt: skip
    return getattr(home, f"{kind}Trainer")(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **more
    )


def perturbed(folder, dtype):
    """Return the model in a folder with other weights, as a teacher."""
    torch.manual_seed(5)
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE, dtype)
    for weight in teacher.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    return teacher


def logged(trainer):
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]

"""TRL's trainers hand over padded batches. A patched model computes no padding, and trains as the untouched.

Losses and gradients are compared in float64, where TRL's own head still computes in float32.
"""

import copy

import pytest
import torch
import trl
from datasets import Dataset
from outside_models import DEVICE, assert_close, fill_adapters
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental import orpo

from unsloth_pack import patch_model

BOUND = 2e-6  # float32 has rounding of 1e-7; a token more or less moves a loss by 1e-2
SIZES = [(3, 20), (12, 1), (1, 9), (9, 4), (2, 30), (5, 12), (20, 3), (1, 16)]
PAIRS = [("ab" * n, "cd" * m, "ef" * (m // 2 + 1)) for n, m in SIZES]
PREFERENCES = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
COMPLETIONS = [{"prompt": p, "completion": c} for p, c, _ in PAIRS]
LABELLED = [{**row, "label": place % 2 == 0} for place, row in enumerate(COMPLETIONS)]
PROMPTS = [{"prompt": p} for p, _, _ in PAIRS]
GENERATION = {"max_completion_length": 8, "num_generations": 2}


def variety(completions, **_):
    return [float(len(set(completion))) for completion in completions]


GENERATING = ("GRPO", "RLOO")
REWARDED = {"reward_funcs": variety}
TRAINERS = {
    "SFT": (COMPLETIONS, {"max_length": 64}, {}),
    "DPO": (PREFERENCES, {"max_length": 64}, {}),
    "KTO": (LABELLED, {"max_length": 64}, {}),
    "ORPO": (PREFERENCES, {"max_length": 64}, {}),
    "GRPO": (PROMPTS, GENERATION | {"beta": 0.1}, REWARDED),
    "RLOO": (PROMPTS, GENERATION, REWARDED),
    "Reward": (PREFERENCES, {"max_length": 64}, {}),
}
# Means over the logits of all places, padding too; and what a clock says
NOT_COMPARED = ("logits/", "runtime", "per_second", "time")


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


def adapted(folder, kind):
    torch.manual_seed(0)
    loader, task, options = AutoModelForCausalLM, "CAUSAL_LM", {"attn_implementation": "sdpa"}
    if kind == "Reward":
        loader, task, options["num_labels"] = AutoModelForSequenceClassification, "SEQ_CLS", 1
    model = loader.from_pretrained(folder, dtype=torch.float32, **options).to(DEVICE)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=names, task_type=task))
    return fill_adapters(model).double()


class PaddedInFront:
    """A collator's batches with the padding moved from the end of every row to its beginning."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, examples):
        batch = self.collate(examples)
        for name in [name for name in batch if name.endswith("attention_mask")]:
            mask = batch[name].clone()
            fellows = [key for key, x in batch.items() if torch.is_tensor(x) and x.shape == mask.shape]
            own = [key for key in fellows if key.startswith("KL_") == name.startswith("KL_")]
            for key in own:
                rows = zip(batch[key], mask, strict=True)
                batch[key] = torch.stack([row.roll(int((m == 0).sum())) for row, m in rows])
        return batch


class Watch(TrainerCallback):
    """The gradients of the first update; the tokens of all calls that make no cache, and those computed."""

    def __init__(self, model):
        self.gradients, self.given, self.real, self.computed = {}, 0, 0, 0
        base = model.get_base_model()
        base.register_forward_pre_hook(self._count, with_kwargs=True)
        base.model.layers[0].register_forward_pre_hook(self._count_computed, with_kwargs=True)

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if not self.gradients:
            trained = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
            self.gradients = {name: grad.clone() for name, grad in trained}

    def _count(self, module, args, kwargs):
        self.counts = "past_key_values" not in kwargs
        if self.counts:
            self.given += kwargs["attention_mask"].numel()
            self.real += int(kwargs["attention_mask"].sum())

    def _count_computed(self, module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        self.computed += hidden.shape[0] * hidden.shape[1] if self.counts else 0


def run(kind, model, tokenizer, side, output):
    rows, options, more = TRAINERS[kind]
    home = orpo if kind == "ORPO" else trl
    config = getattr(home, f"{kind}Config")(
        output_dir=str(output), max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, optim="sgd", max_grad_norm=0.0, report_to="none", save_strategy="no", bf16=False,
        gradient_checkpointing=False, use_cpu=DEVICE == "cpu", disable_tqdm=True, logging_steps=1, seed=3,
        **options,
    )  # fmt: skip
    watch = Watch(model)
    trainer = getattr(home, f"{kind}Trainer")(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[watch], **more,
    )  # fmt: skip
    if side == "left":
        trainer.data_collator = PaddedInFront(trainer.data_collator)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line], watch


@pytest.mark.parametrize(
    ("kind", "side"),
    [
        *((kind, side) for kind in TRAINERS if kind not in GENERATING for side in ("right", "left")),
        *((kind, "both") for kind in GENERATING),  # prompts in front, completions behind
    ],
)
def test_trains_as_the_untouched_model_without_the_padding(kind, side, model_folder, tokenizer, tmp_path):
    plain = adapted(model_folder, kind)
    patched = copy.deepcopy(plain)
    patch = patch_model(patched)
    expected, theirs = run(kind, plain, tokenizer, side, tmp_path / "plain")
    logs, ours = run(kind, patched, tokenizer, side, tmp_path / "patched")
    for got, truth in zip(logs, expected, strict=True):
        assert got.keys() == truth.keys()
        # Rewards and KL are differences of log-probabilities, which TRL sums in float32
        size = max(abs(value) for key, value in truth.items() if key == "loss" or "logps" in key)
        rounding = max(BOUND, torch.finfo(torch.float32).eps * size)
        for key in truth:
            if not any(part in key for part in NOT_COMPARED):
                within = rounding if key == "kl" or "reward" in key else BOUND
                assert got[key] == pytest.approx(truth[key], rel=BOUND, abs=within), key
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, truth in theirs.gradients.items():
        assert_close(ours.gradients[name], truth, name, slack=BOUND)
    assert (ours.given, ours.real) == (theirs.given, theirs.real)
    assert ours.computed == ours.real < theirs.computed == theirs.given
    assert "padding" not in patch.report.not_fused

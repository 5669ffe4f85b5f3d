"""Every trainer of TRL trains a patched model as it trains the untouched one. Only SFTTrainer packs rows."""

import copy
import gc
from collections import Counter

import pytest
import torch
import trl
from datasets import Dataset
from outside_models import DEVICE, assert_close, fill_adapters
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from unsloth_pack import FastLanguageModel, patch_model

PAIRS = [("ab" * size, "cd" * (9 - size), "ef" * (size + 2)) for size in range(1, 9)]
PREFERENCES = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
PROMPTS = [{"prompt": p} for p, _, _ in PAIRS]
COMPLETIONS = [{"prompt": p, "completion": c} for p, c, _ in PAIRS]
LABELLED = [{**row, "label": place % 2 == 0} for place, row in enumerate(COMPLETIONS)]


def length_reward(completions, **_):
    return [float(len(set(completion))) for completion in completions]


GENERATION = {"max_completion_length": 6, "num_generations": 2}
TRAINERS = {
    "SFT": (COMPLETIONS, {"max_length": 64}, {}),
    "SFT padding_free": (COMPLETIONS, {"max_length": None, "padding_free": True}, {}),
    "SFT packed": (COMPLETIONS, {"max_length": 64, "packing": True, "padding_free": True}, {}),
    "SFT packed, padded": (
        COMPLETIONS,
        {"max_length": 64, "packing": True, "padding_free": True, "pad_to_multiple_of": 48},
        {},
    ),
    "SFT label smoothing": (COMPLETIONS, {"max_length": 64, "label_smoothing_factor": 0.1}, {}),
    "SFT dft": (COMPLETIONS, {"max_length": 64, "loss_type": "dft"}, {}),
    "DPO": (PREFERENCES, {"max_length": 64}, {}),
    "DPO ipo": (PREFERENCES, {"max_length": 64, "loss_type": "ipo"}, {}),
    "KTO": (LABELLED, {"max_length": 64}, {}),
    "Reward": (PREFERENCES, {"max_length": 64}, {}),
    "GRPO": (PROMPTS, GENERATION, {"reward_funcs": length_reward}),
    "RLOO": (PROMPTS, GENERATION, {"reward_funcs": length_reward}),
    "Distillation": (COMPLETIONS, {"max_completion_length": 6}, {}),
}


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


def adapted(folder, kind):
    torch.manual_seed(0)
    loader, task = AutoModelForCausalLM, "CAUSAL_LM"
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if kind == "Reward":
        loader, task, options["num_labels"] = AutoModelForSequenceClassification, "SEQ_CLS", 1
    model = loader.from_pretrained(folder, **options).to(DEVICE)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return fill_adapters(get_peft_model(model, LoraConfig(r=4, target_modules=names, task_type=task)))


def run(name, model, tokenizer, folder, output):
    kind = name.split()[0]
    rows, options, more = TRAINERS[name]
    if kind == "Distillation":
        teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        more = {"teacher_model": teacher.to(DEVICE)}
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(output), max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, optim="sgd", report_to="none", save_strategy="no", gradient_checkpointing=False,
        bf16=False, use_cpu=DEVICE == "cpu", disable_tqdm=True, logging_steps=1, seed=3, **options,
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **more
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("name", TRAINERS)
def test_trains_as_the_untouched_model(name, model_folder, tokenizer, tmp_path):
    plain = adapted(model_folder, name.split()[0])
    before = {key: weight.detach().clone() for key, weight in plain.named_parameters()}
    patched = copy.deepcopy(plain)
    patch_model(patched)
    expected = run(name, plain, tokenizer, model_folder, tmp_path / "plain")
    logs = run(name, patched, tokenizer, model_folder, tmp_path / "patched")
    assert len(logs) == len(expected) == 2
    for ours, theirs in zip(logs, expected, strict=True):
        assert ours.keys() == theirs.keys()
        timed = [key for key in theirs if "time" in key or "runtime" in key or "per_second" in key]
        for key in theirs.keys() - timed:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key
    trained = [key for key, weight in plain.named_parameters() if weight.requires_grad]
    moved = 0
    for (key, one), (_, two) in zip(patched.named_parameters(), plain.named_parameters(), strict=True):
        if key in trained and not torch.equal(two, before[key]):
            moved += 1
            assert_close(one.detach() - before[key], two.detach() - before[key], key, slack=2e-3)
    assert moved


def held():
    """How many tensors, modules and objects of the package there are."""
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    return Counter(
        kind
        for kind in kinds
        if issubclass(kind, torch.Tensor | torch.nn.Module) or str(kind.__module__).startswith("unsloth_pack")
    )


def test_nothing_stays_of_a_run(model_folder, tokenizer, tmp_path):
    def train():
        patch_model(model := adapted(model_folder, "SFT"))
        return run("SFT packed", model, tokenizer, model_folder, tmp_path)

    train()  # what is made once for all runs
    before = held()
    for _ in range(2):
        train()
    assert held() == before


def test_trainers_find_what_belongs_to_a_bundled_model(tmp_path):
    """Its tokenizer, and the reference model, which they load by the name in the configuration."""
    model, _ = FastLanguageModel.from_pretrained("demo", max_seq_length=64, full_finetuning=True)
    logs = run("DPO", model, None, None, tmp_path)
    assert logs[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # ln 2: the reference is it

"""transformers' `Trainer` with many options trains a patched model on packed rows as the untouched one."""

import copy

import pytest
import torch
from outside_models import (
    DEVICE,
    LENGTHS,
    assert_close,
    documents,
    fill_adapters,
    plain_and_patched,
    plain_model,
)
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from trl.trainer.callbacks import BEMACallback

from unsloth_pack import patch_model

ROWS = [{"input_ids": document.tolist()} for document in documents()] * 3
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 5}
OPTIONS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "tokens counted": {"include_num_input_tokens_seen": True},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "8-bit AdamW": {"optim": "adamw_8bit"},
    "clipped": {"max_grad_norm": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "workers that stay": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "evaluation": EVALUATED,
    "metrics": {**EVALUATED, "compute_metrics": True},
    "best model": {**EVALUATED, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True},
}
COMPARED = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "num_input_tokens_seen")


def adapted():
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(plain_model(), LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM"))
    model.config.use_cache = False  # with a cache untouched transformers lets documents see each other
    return fill_adapters(model).train()


def accuracy(prediction):
    kept = prediction.label_ids[:, 1:] != -100
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right[kept].mean())}


def train(model, folder, compute_metrics=False, callbacks=(), **options):
    given = {
        "max_steps": 3,
        "per_device_train_batch_size": 5,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "seed": 3,
    }
    given |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    given |= {"use_cpu": DEVICE == "cpu", "output_dir": str(folder)}
    trainer = Trainer(
        model,
        TrainingArguments(**{**given, **options}),
        train_dataset=ROWS,
        eval_dataset=ROWS[:5],
        data_collator=DataCollatorWithFlattening(),
        compute_metrics=accuracy if compute_metrics else None,
        callbacks=[*callbacks],
    )
    trainer.train()
    return [{key: line[key] for key in COMPARED if key in line} for line in trainer.state.log_history]


@pytest.mark.parametrize("name", OPTIONS)
def test_trains_as_the_untouched_model(name, tmp_path):
    plain = adapted()
    before = {key: weight.detach().clone() for key, weight in plain.named_parameters()}
    patched = copy.deepcopy(plain)
    patch_model(patched)
    expected = train(plain, tmp_path / "plain", **OPTIONS[name])
    assert any("loss" in line for line in expected)
    for ours, theirs in zip(train(patched, tmp_path / "patched", **OPTIONS[name]), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    for (key, one), (_, two) in zip(patched.named_parameters(), plain.named_parameters(), strict=True):
        if two.requires_grad:
            assert_close(one - before[key], two - before[key], key, slack=5e-3)


def test_the_noise_of_neftune_is_that_of_each_document_alone():
    """Its noise is alpha / sqrt(tokens * features): over a whole row it would be smaller."""
    _, patched = plain_and_patched()
    hook = activate_neftune(patched.train(), 5.0)
    ids = torch.cat(documents())[None]
    noisy = patched(input_ids=ids, packed_seq_lengths=LENGTHS, output_hidden_states=True).hidden_states[0]
    deactivate_neftune(patched, hook)
    quiet = patched(input_ids=ids, packed_seq_lengths=LENGTHS, output_hidden_states=True).hidden_states[0]
    for part, length in zip((noisy - quiet).split(LENGTHS, 1), LENGTHS, strict=True):
        largest = 5.0 / (length * part.shape[-1]) ** 0.5
        assert 0.9 * largest < float(part.detach().abs().max()) <= largest * (1 + 1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])  # the second takes no sdpa
def test_the_class_of_a_patched_model_makes_plain_ones(architecture, tmp_path):
    plain, patched = plain_and_patched(architecture)
    made = type(patched)(patched.config)
    made.load_state_dict(patched.state_dict())
    patched.save_pretrained(tmp_path)
    loaded = type(patched).from_pretrained(tmp_path)
    ids = documents()[1][None]
    expected = plain(ids).logits
    for model in (made.to(DEVICE), loaded.to(DEVICE), patched):
        assert type(model).__name__ == type(plain).__name__
        assert_close(model.eval()(ids).logits, expected)


def test_a_callback_averages_a_patched_models_weights(tmp_path):
    """TRL's makes a model of the trained one's class, and saves it."""
    plain, patched = plain_and_patched()
    for name, model in {"plain": plain, "patched": patched}.items():
        train(model, tmp_path / name, callbacks=[BEMACallback(update_freq=1, device=DEVICE)])
    averages = [load_file(tmp_path / name / "bema" / "model.safetensors") for name in ("plain", "patched")]
    for key, average in averages[0].items():
        assert_close(averages[1][key], average, key)

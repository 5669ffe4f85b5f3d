"""Trainers of patched models load the next batches while an update is computed, and see the same batches."""

import late_metrics_runs as runs
import pytest
import torch
from datasets import Dataset
from tiny import tiny_model
from torch.utils.data import Dataset as OfTorch
from transformers import Trainer, TrainerCallback, default_data_collator

from unsloth_pack.patching.trainer_hooks import PatchedTraining


class Watch(TrainerCallback):
    """Which batches were made before which update began, and what the model got."""

    def __init__(self, trainer):
        self.made, self.made_before, self.trained = [], [], []
        collate, train = trainer.data_collator, trainer.training_step

        def noted_collate(examples):
            self.made.append([row["input_ids"] for row in examples])
            return collate(examples)

        def noted_step(model, inputs, *args, **kwargs):
            self.trained.append(inputs["input_ids"].flatten().tolist())
            return train(model, inputs, *args, **kwargs)

        trainer.data_collator, trainer.training_step = noted_collate, noted_step
        trainer.add_callback(self)

    def on_train_begin(self, *_, **__):
        self.made.clear()  # what was looked at for boundaries

    def on_step_end(self, *_, **__):
        self.made_before.append(len(self.made))


def trainer_of(folder, **options):
    return runs.sft_trainer(folder, True, **{"eval_strategy": "no"} | options)


def watched(trainer, **options):
    watch = Watch(trainer)
    trainer.train(**options)
    return watch


def without_prefetching(monkeypatch):
    monkeypatch.setattr(PatchedTraining, "on_optimizer_step", lambda *_, **__: None)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_batches_are_made_earlier(accumulation, tmp_path, monkeypatch):
    """accelerate is one batch ahead by itself, to know the last one. An epoch has nine rows."""
    early = watched(trainer_of(tmp_path, accumulation=accumulation))
    without_prefetching(monkeypatch)
    late = watched(trainer_of(tmp_path, accumulation=accumulation))
    assert early.trained == late.trained
    assert early.made == late.made
    assert len(late.made) == 2 * len(runs.LENGTHS)
    ahead = [a - b for a, b in zip(early.made_before, late.made_before, strict=True)]
    assert ahead[0] == max(ahead) == accumulation
    assert ahead[len(ahead) // 2 - 1] == ahead[-1] == 0  # there is nothing more in an epoch


def test_a_run_that_is_resumed_trains_on_the_same_rows(tmp_path):
    whole = watched(trainer_of(tmp_path / "whole", max_steps=6))
    options = {"save_strategy": "steps", "save_steps": 3}
    trainer_of(tmp_path / "half", max_steps=3, **options).train()
    resumed = watched(trainer_of(tmp_path / "half", max_steps=6, **options), resume_from_checkpoint=True)
    assert resumed.trained == whole.trained[3:]


class Follows(OfTorch):
    """A data set whose rows may depend on the training."""

    def __len__(self):
        return 12

    def __getitem__(self, number):
        return {"input_ids": torch.arange(5), "labels": torch.arange(5)}


@pytest.mark.parametrize("kind", ["plain", "of torch", "transformed", "workers", "not patched"])
def test_where_nothing_is_loaded_ahead(kind, tmp_path, monkeypatch):
    numbers = []
    monkeypatch.setattr(f"{runs.HOOKS}.PrefetchIterator.prefetch", lambda self, n: numbers.append(n))
    dataset = Dataset.from_list([{"input_ids": [*range(5)], "labels": [*range(5)]}] * 12)
    if kind == "of torch":
        dataset = Follows()
    if kind == "transformed":
        dataset.set_transform(lambda rows: rows)
    arguments = runs.config(tmp_path, False, eval_strategy="no", max_steps=2)
    arguments.dataloader_num_workers = 1 if kind == "workers" else 0
    patched = runs.model()
    model = tiny_model("qwen3") if kind == "not patched" else patched
    Trainer(model, arguments, default_data_collator, dataset).train()
    assert numbers == ([1] if kind == "plain" else [])

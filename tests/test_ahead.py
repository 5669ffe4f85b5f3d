"""Trainers of patched models load the next batches while an update is computed, and see the same batches."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from late_metrics_runs import LENGTHS, config, logged, model, rows, sft_trainer
from model_folder import byte_tokenizer
from tiny import tiny_model
from torch.utils.data import Dataset as OfTorch
from transformers import Trainer, TrainerCallback, default_data_collator

from unsloth_pack.patching.trainer_hooks.prefetch import PrefetchCallback, RowCollator
from unsloth_pack.training.trainer import make_trainer


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


def watched(trainer):
    watch = Watch(trainer)
    trainer.train()
    return watch


def without_looking_ahead(monkeypatch):
    monkeypatch.setattr(PrefetchCallback, "on_optimizer_step", lambda *_, **__: None)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_batches_are_made_earlier(accumulation, tmp_path, monkeypatch):
    """accelerate is one batch ahead by itself, to know the last one. An epoch has nine rows."""
    options = {"accumulation": accumulation, "eval_strategy": "no", "num_train_epochs": 2}
    early = watched(sft_trainer(tmp_path, True, **options))
    without_looking_ahead(monkeypatch)
    late = watched(sft_trainer(tmp_path, True, **options))
    assert early.trained == late.trained
    assert early.made == late.made
    assert len(late.made) == 2 * len(LENGTHS)
    ahead = [a - b for a, b in zip(early.made_before, late.made_before, strict=True)]
    assert ahead[0] == accumulation
    updates_an_epoch = len(ahead) // 2
    assert ahead[updates_an_epoch - 1] == ahead[-1] == 0  # there is nothing more in an epoch
    assert max(ahead) == accumulation


def test_nothing_is_made_for_an_update_that_never_comes(tmp_path):
    watch = watched(sft_trainer(tmp_path, True, max_steps=3, eval_strategy="no"))
    assert len(watch.trained) == 3
    assert watch.made_before == [3, 4, 4]  # accelerate's own is made when a batch is taken


def test_a_row_that_cannot_be_read_costs_no_update_before_it(tmp_path):
    trainer = sft_trainer(tmp_path, True, eval_strategy="no")
    watch = Watch(trainer)
    collate = trainer.data_collator

    def broken(examples):
        if len(watch.made) == 4:
            raise OSError("the fifth row is gone")
        return collate(examples)

    trainer.data_collator = broken
    with pytest.raises(OSError, match="the fifth row is gone"):
        trainer.train()
    # accelerate asks for the fifth to hand out the fourth
    assert trainer.state.global_step == 3
    assert len(watch.made_before) == 3


def test_a_run_that_is_resumed_trains_on_the_same_rows(tmp_path):
    whole = watched(sft_trainer(tmp_path / "whole", True, max_steps=6, eval_strategy="no"))
    options = {"eval_strategy": "no", "save_strategy": "steps", "save_steps": 3}
    sft_trainer(tmp_path / "half", True, max_steps=3, **options).train()
    trainer = sft_trainer(tmp_path / "half", True, max_steps=6, **options)
    watch = Watch(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert watch.trained == whole.trained[3:]


def test_rows_are_described_where_they_lie(tmp_path):
    """TRL's trainer hands on what its loader has described; a collator of a user's is left alone."""
    seen = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, train_dataloader=None, **_):
            seen.append(train_dataloader.base_dataloader.collate_fn)

    trainer = sft_trainer(tmp_path, True, max_steps=1)
    own = trainer.data_collator
    trainer.add_callback(Look())
    trainer.train()
    assert isinstance(seen[0], RowCollator)
    assert seen[0].collate is own
    assert trainer.data_collator is own
    trainer = sft_trainer(tmp_path, True, max_steps=1)
    trainer.data_collator = users = lambda examples: own(examples)
    trainer.add_callback(Look())
    trainer.train()
    assert seen[-1] is users


class Follows(OfTorch):
    """A data set whose rows depend on the training."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 12

    def __getitem__(self, number):
        self.asked.append(number)
        return {"input_ids": torch.arange(5), "labels": torch.arange(5)}


@pytest.mark.parametrize("kind", ["of torch", "transformed", "workers", "not patched"])
def test_where_nothing_is_loaded_ahead(kind, tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(
        "unsloth_pack.patching.trainer_hooks.prefetch._Ahead.fetch", lambda self, n: fetched.append(n)
    )
    dataset = Dataset.from_list([{"input_ids": [*range(5)], "labels": [*range(5)]}] * 12)
    if kind == "of torch":
        dataset = Follows()
    if kind == "transformed":
        dataset.set_transform(lambda rows: rows)
    arguments = config(tmp_path, False, eval_strategy="no", max_steps=2)
    arguments.dataloader_num_workers = 1 if kind == "workers" else 0
    trained = tiny_model("qwen3") if kind == "not patched" else model()
    Trainer(trained, arguments, default_data_collator, dataset).train()
    assert not fetched
    if kind == "not patched":
        Trainer(model(), arguments, default_data_collator, dataset).train()
        assert fetched == [1]


def test_the_trainer_of_a_run(tmp_path, monkeypatch):
    """Its order of rows, its counts and its log are the same."""
    logs = []
    for looks_ahead in (True, False):
        if not looks_ahead:
            without_looking_ahead(monkeypatch)
        arguments = config(tmp_path, True, accumulation=2)
        trainer = make_trainer(model(), byte_tokenizer(), arguments, rows(True), rows(True, 50), [])
        logs.append((logged(trainer), replace(trainer.trained, seconds=0)))
    assert logs[0] == logs[1]

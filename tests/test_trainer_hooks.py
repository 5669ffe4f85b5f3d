"""What a patch changes outside its model is one table, and the last `undo()` takes all of it back."""

import copy
import gc
import sys
from importlib import import_module
from types import FunctionType, SimpleNamespace

import late_metrics_runs as runs
import pytest
import torch
from datasets import Dataset
from tiny import random_documents, tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS
from trl import SFTTrainer

from unsloth_pack import patch_model
from unsloth_pack.patching.trainer_hooks import CALLBACKS, HOOKS, METHODS

LIBRARIES = ("transformers", "trl", "peft", "accelerate", "torch")
for name in ("GRPOTrainer", "DPOTrainer", "RewardTrainer"):  # TRL imports a trainer when it is asked for
    getattr(import_module("trl"), name)


@pytest.fixture(scope="module", autouse=True)
def _what_libraries_change_themselves(tmp_path_factory):
    """When they are first used: torch wraps `AdamW.step`, for one."""
    runs.sft_trainer(tmp_path_factory.mktemp("warm"), True, trained=tiny_model("qwen3"), max_steps=1).train()
    copy.deepcopy(patched()._model)


@pytest.fixture(autouse=True)
def _hooks_of_other_tests():
    """Models that other tests keep have their hooks installed."""
    gc.collect()
    n_users = HOOKS._n_users
    for _ in range(n_users):
        HOOKS.uninstall()
    yield
    gc.collect()
    assert HOOKS._n_users == 0
    for _ in range(n_users):
        HOOKS.install()


def outside():
    """Every function and class of the libraries' modules, every attribute of their classes, the callbacks."""
    there = {"callbacks": [*DEFAULT_CALLBACKS]}
    for path, module in [*sys.modules.items()]:
        if path.partition(".")[0] in LIBRARIES:
            for name, value in [*vars(module).items()]:
                if isinstance(value, FunctionType | type):
                    there[path, name] = value
                if isinstance(value, type) and value.__module__ == path:
                    there |= {(path, name, attribute): one for attribute, one in vars(value).items()}
    return there


def changes(before):
    """What is not as before, or was not there before."""
    now, there = outside(), object()
    return {
        key for key in before.keys() | now.keys() if before.get(key, there) is not now.get(key, there)
    } - {"callbacks"}


def patched():
    return patch_model(tiny_model("qwen3"))


def test_the_table_is_all_that_changes(tmp_path):
    before = outside()
    patch = patched()
    assert changes(before) == METHODS.keys()
    assert [*DEFAULT_CALLBACKS] == [*before["callbacks"], *CALLBACKS]
    runs.sft_trainer(tmp_path, True, trained=patch._model, max_steps=1).train()
    assert changes(before) == METHODS.keys()
    patch.undo()
    assert changes(before) == set()
    assert before["callbacks"] == DEFAULT_CALLBACKS


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_undo_takes_it_back(order):
    before, patches = outside(), [patched(), patched()]
    patches[order[0]].undo()
    patches[order[0]].undo()  # counts once
    assert changes(before) == METHODS.keys()
    patches[order[1]].undo()
    assert changes(before) == set()


def in_a_context(model):
    with patch_model(model):
        assert HOOKS._n_users == 1


def anew(model):
    patch_model(model)
    patch_model(model).undo()


def deleted(model):
    """Without `undo()`: the patch goes with the model."""
    patch_model(model)
    del model


def copied(model):
    patch = patch_model(model)
    copies = [copy.deepcopy(model)]
    patch.undo()
    assert HOOKS._n_users == 1  # the copy is patched
    copies.pop().unsloth_pack_patch.undo()


@pytest.mark.parametrize("end", [in_a_context, anew, deleted, copied])
def test_ways_to_end_a_patch(end):
    models = [copy.deepcopy(tiny_model("qwen3"))]
    before = outside()
    end(models.pop())
    gc.collect()
    assert changes(before) == set()


def test_a_method_that_another_library_has_wrapped_stays(tmp_path, monkeypatch):
    before = outside()
    patch = patched()
    ours = SFTTrainer.log
    monkeypatch.setattr(SFTTrainer, "log", lambda self, *args: ours(self, *args))
    patch.undo()
    again = patched()
    assert SFTTrainer.log is not ours
    monkeypatch.undo()
    assert SFTTrainer.log is ours
    again.undo()
    assert changes(before) == set()


def test_a_run_trains_with_the_hooks_whatever_its_model_is(tmp_path):
    model = tiny_model("qwen3")
    before = outside()
    arguments = runs.config(tmp_path, True, max_steps=2, eval_strategy="no")
    trainer = runs.make_trainer(model, runs.byte_tokenizer(), arguments, runs.rows(True), None, [])
    trainer.train()
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == [2]
    assert changes(before) == set()


# Callbacks of every trainer, which act for patched models alone


class Look(TrainerCallback):
    """Whether losses are filtered in a step, and what torch could give back to a GPU after training."""

    def on_step_end(self, args, *_, **__):
        self.is_filtered = args.logging_nan_inf_filter

    def on_train_end(self, *_, **__):
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        self.reserved, self.spare = before, before - torch.cuda.memory_reserved()


def look_at(model, folder, is_filtered=True):
    rows = [ids.tolist() for ids in random_documents([512, 512])]
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        logging_nan_inf_filter=is_filtered,
    )
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    Trainer(model, arguments, train_dataset=dataset, callbacks=[look := Look()]).train()
    assert arguments.logging_nan_inf_filter == is_filtered  # as before
    return look


@pytest.mark.parametrize(
    ("is_patched", "on_gpu", "is_filtered"),
    [(True, True, True), (True, True, False), (True, False, True), (False, True, True)],
)
def test_losses_are_filtered_and_memory_is_given_back(is_patched, on_gpu, is_filtered, tmp_path, monkeypatch):
    calls, patch = [], patched()
    cuda = SimpleNamespace(is_initialized=lambda: on_gpu, empty_cache=lambda: calls.append(True))
    monkeypatch.setattr(f"{runs.HOOKS}.torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(runs.ON_A_GPU, lambda arguments: on_gpu)
    look = look_at(patch._model if is_patched else tiny_model("qwen3"), tmp_path, is_filtered)
    assert look.is_filtered == (is_filtered and not (is_patched and on_gpu))
    assert calls == [True] * (is_patched and on_gpu)

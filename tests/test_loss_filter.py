"""While a patched model trains on a GPU, no trainer waits for it to look at the loss of a step."""

import pytest
import torch
from datasets import Dataset
from tiny import random_documents, tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS

from unsloth_pack import patch_model
from unsloth_pack.patching.trainer_hooks import deferred_logging


class Look(TrainerCallback):
    def on_step_end(self, args, *_, **__):
        self.seen = args.logging_nan_inf_filter


def train(model, folder, is_on):
    rows = [ids.tolist() for ids in random_documents([12, 12])]
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        logging_nan_inf_filter=is_on,
    )
    look = Look()
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    Trainer(model, arguments, train_dataset=dataset, callbacks=[look]).train()
    assert arguments.logging_nan_inf_filter == is_on  # as before
    return look.seen


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("patched", [True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_for_patched_models_on_a_gpu_alone(patched, on_gpu, is_on, tmp_path, monkeypatch):
    patch_model(tiny_model("llama"))  # every trainer from now on
    model = tiny_model("llama")
    if patched:
        patch_model(model)
    monkeypatch.setattr(deferred_logging, "_is_on_gpu", lambda decoder: on_gpu)
    assert train(model, tmp_path, is_on) == (is_on and not (patched and on_gpu))
    assert DEFAULT_CALLBACKS.count(deferred_logging.NanFilterCallback) == 1


def test_an_error_in_between(monkeypatch):
    model = tiny_model("llama")
    patch_model(model)
    monkeypatch.setattr(deferred_logging, "_is_on_gpu", lambda decoder: True)
    callback, arguments = deferred_logging.NanFilterCallback(), TrainingArguments(use_cpu=True)
    callback.on_train_begin(arguments, None, None, model=model)  # ends in an error
    callback.on_train_begin(arguments, None, None, model=model)
    assert not arguments.logging_nan_inf_filter
    callback.on_train_end(arguments, None, None)
    assert arguments.logging_nan_inf_filter


@pytest.mark.gpu
def test_a_patched_model_on_a_gpu(tmp_path):
    model = tiny_model("llama").cuda()
    patch_model(model)
    assert train(model, tmp_path, True) is False

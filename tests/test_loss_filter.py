"""While a patched model trains on a GPU, no trainer waits for it to look at the loss of a step."""

import pytest
import torch
from datasets import Dataset
from tiny import random_documents, tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS

from unsloth_pack import patch_model
from unsloth_pack.patching import loss_filter


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
@pytest.mark.parametrize("where", ["patched on a GPU", "patched on a CPU", "not patched"])
def test_for_patched_models_on_a_gpu_alone(where, is_on, tmp_path, monkeypatch):
    patch_model(tiny_model("llama"))  # every trainer from now on
    model = tiny_model("llama")
    if where != "not patched":
        patch_model(model)
    if where == "patched on a GPU":
        monkeypatch.setattr(loss_filter, "_is_patched_on_gpu", lambda module: True)
    elif where == "patched on a CPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train(model, tmp_path, is_on) == (is_on and where != "patched on a GPU")
    assert DEFAULT_CALLBACKS.count(loss_filter.LogsEveryLoss) == 1


@pytest.mark.gpu
def test_a_patched_model_on_a_gpu(tmp_path):
    model = tiny_model("llama").cuda()
    patch_model(model)
    assert train(model, tmp_path, True) is False

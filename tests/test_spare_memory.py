"""When a trainer of a patched model is done, what torch keeps beyond its tensors goes back to the device."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny import random_documents, tiny_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS

from unsloth_pack import patch_model
from unsloth_pack.memory.spare import GiveBackSpareMemory


class Look(TrainerCallback):
    """How much torch holds when training ends, and how much of that it could still give back."""

    def on_train_end(self, *_, **__):
        before = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        self.held, self.spare = before, before - torch.cuda.memory_reserved()


def train(model, folder, callbacks=()):
    rows = [ids.tolist() for ids in random_documents([512, 512])]
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    arguments = TrainingArguments(
        str(folder), max_steps=2, report_to="none", save_strategy="no", use_cpu=not torch.cuda.is_available()
    )
    Trainer(model, arguments, train_dataset=dataset, callbacks=[*callbacks]).train()


@pytest.mark.parametrize("patched", [True, False])
def test_once_and_for_patched_models_alone(patched, tmp_path, monkeypatch):
    given_back = []
    cuda = SimpleNamespace(is_initialized=lambda: True, empty_cache=lambda: given_back.append(True))
    patch_model(tiny_model("llama"))  # every trainer from now on may give back
    model = tiny_model("llama")
    if patched:
        patch_model(model)
    monkeypatch.setattr("unsloth_pack.memory.spare.torch", SimpleNamespace(cuda=cuda))
    train(model, tmp_path)
    assert given_back == [True] * patched
    assert DEFAULT_CALLBACKS.count(GiveBackSpareMemory) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("patched", [True, False])
def test_the_device_has_it_back(patched, tmp_path):
    """A tensor that lives on may lie in what was spare, so what is left of that is no measure."""
    model = tiny_model("llama")
    if patched:
        patch_model(model)
    spare = torch.empty(2**30, dtype=torch.int8, device="cuda")
    del spare
    look = Look()
    train(model, tmp_path, [look])
    assert look.held
    assert (look.spare == 0) == patched

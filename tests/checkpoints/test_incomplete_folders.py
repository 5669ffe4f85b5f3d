"""A folder whose weights are not those of its configuration is no model, and no adapter."""

import math

import pytest
import torch
from model_folder import save_model
from safetensors.torch import load_file, save_file

from unsloth_pack import FastLanguageModel, InputError

NAME = "model.layers.0.mlp.up_proj.weight"


def load(folder):
    return FastLanguageModel.from_pretrained(str(folder), 128, torch.float32)[0]


def change(path, how):
    weights = load_file(path)
    how(weights)
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda weights: weights.pop(NAME), f"its files lack 1 weights, {NAME}"),
        (lambda weights: weights.update({NAME: weights[NAME][:-1].clone()}), rf"weight {NAME} is \["),
        (lambda weights: weights[NAME][0].fill_(math.inf), f"weight {NAME} is not finite"),
        (lambda weights: weights[NAME][0, :1].fill_(math.nan), f"weight {NAME} is not finite"),
    ],
    ids=["one missing", "another shape", "an infinity", "a NaN"],
)
def test_a_model(how, says, tmp_path):
    folder = save_model(tmp_path / "model")
    change(folder / "model.safetensors", how)
    with pytest.raises(InputError, match=says):
        load(folder)


def test_an_adapter(tmp_path):
    model = FastLanguageModel.get_peft_model(load(save_model(tmp_path / "model")), target_modules=["q_proj"])
    model.save_pretrained_merged(tmp_path / "adapter", save_method="lora")
    load(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    change(path, lambda weights: weights.pop(min(weights)))
    with pytest.raises(InputError, match=r"it lacks weights, or has others, such as .*lora_A"):
        load(tmp_path / "adapter")

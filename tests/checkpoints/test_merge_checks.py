"""A merge that does not compute what the adapter does is refused, wherever the fault lies."""

import pytest
import torch
from model_folder import save_model
from peft.tuners.lora.layer import Linear

from unsloth_pack import FastLanguageModel, InputError


@pytest.fixture
def adapted(tmp_path):
    model, _ = FastLanguageModel.from_pretrained(str(save_model(tmp_path / "base")), 128, torch.float32)
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def test_a_merge_without_the_scaling(adapted, tmp_path, monkeypatch):
    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda layer, name: right(layer, name) * 0.9)
    with pytest.raises(InputError, match=r"q_proj, LORA, cannot be merged: .* computes something else"):
        adapted.save_pretrained_merged(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()

"""Merged weights on the disk: in one file or several, and written one at a time."""

import pytest
import torch
from model_folder import byte_tokenizer, save_model
from transformers import AutoModelForCausalLM

from unsloth_pack import FastLanguageModel

IDS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"))
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, dtype="float32")
    return FastLanguageModel.get_peft_model(model, r=4)


@pytest.mark.parametrize("sharded", [(True, False), (False, True)])
def test_weights_in_other_files(sharded, model, tmp_path, monkeypatch):
    for number, in_shards in enumerate(sharded):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.02 * (number + 1))
        monkeypatch.setattr("unsloth_pack.checkpoints.saving.SHARD", "50KB" if in_shards else "1GB")
        model.save_pretrained_merged(tmp_path / "saved", byte_tokenizer())
        assert ((tmp_path / "saved" / "model.safetensors.index.json").exists()) == in_shards
        assert ((tmp_path / "saved" / "model.safetensors").exists()) != in_shards
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        with torch.no_grad():
            expected = model.eval()(input_ids=IDS).logits
            torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, rtol=0.05, atol=0.05)
    model.save_pretrained_merged(tmp_path / "saved", save_method="lora")  # it was all saved here
    assert not list((tmp_path / "saved").glob("model*"))

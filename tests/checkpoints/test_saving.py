"""Merged weights on the disk: in one file or several, and written one at a time."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from model_folder import byte_tokenizer, save_model
from own_memory import own_memory
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from warm import call

from unsloth_pack import FastLanguageModel
from unsloth_pack.checkpoints import saving
from unsloth_pack.cli import main

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


def merged_by_command(adapters, model_bytes):
    """Merge a small model and then a large one, which takes the memory of few layers."""
    torch.set_num_threads(1)
    with patch.object(saving, "SHARD", "4MB"):
        for adapter in adapters:
            with own_memory() as seen:
                assert main(["merge", f"--model_name={adapter}", f"--save_path={adapter}-merged"]) == 0
    assert max(seen) - seen[0] < 0.4 * model_bytes


def test_a_merge_leaves_the_base_in_its_files(tmp_path):
    """To the bit what a merge of the loaded model gives."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    adapters = [tmp_path / "small", tmp_path / "large"]
    for adapter, options in zip(adapters, ({}, sizes | heads), strict=True):
        base = save_model(f"{adapter}-base", dtype=torch.bfloat16, **options)
        model, _ = FastLanguageModel.from_pretrained(str(base), max_seq_length=128, dtype="float32")
        model = FastLanguageModel.get_peft_model(model, r=4)
        for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
            torch.nn.init.normal_(weight, std=0.1)
        model.save_pretrained(adapter)
    (file,) = Path(base).glob("*.safetensors")
    assert file.stat().st_size > 120e6  # in bfloat16
    done = call(merged_by_command, [*map(str, adapters)], file.stat().st_size)
    assert done.returncode == 0, done.stderr
    model.save_pretrained_merged(tmp_path / "whole")
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    for path in (tmp_path / "large-merged").glob("*.safetensors"):
        for name, weight in load_file(path).items():
            assert torch.equal(weight, expected.pop(name)), name
    assert not expected

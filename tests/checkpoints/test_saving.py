"""Merged weights on the disk: in one file or several, and written one at a time."""

import pytest
import torch
from model_folder import byte_tokenizer, save_model
from transformers import AutoModelForCausalLM

from unsloth_pack import FastLanguageModel
from unsloth_pack.checkpoints.merging import merged_weights

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


AT_THE_ENDS = {
    "on both": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "on the head": {"target_modules": ["lm_head", "q_proj"], "use_rslora": True},
    "tokens": {"trainable_token_indices": [5, 97, 20000]},
    "on the head of tokens": {"target_modules": ["lm_head"], "trainable_token_indices": [5, 97, 20000]},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


def adapted_at_the_ends(folder, how, tied):
    """A model that is little else than its embedding and its head, with random adapters."""
    save_model(folder, tie_word_embeddings=tied, vocab_size=20011)
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, dtype="float32")
    model = FastLanguageModel.get_peft_model(model, r=4, adapter_on_head=True, **AT_THE_ENDS[how])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", [how for how in AT_THE_ENDS if how != "saved"])
def test_rows_are_merged_as_the_whole_layer_is(how, tied, tmp_path, monkeypatch):
    model = adapted_at_the_ends(tmp_path / "base", how, tied)
    by_rows = dict(merged_weights(model, torch.float32))
    monkeypatch.setattr("unsloth_pack.checkpoints.merging.LARGE", 10**9)
    as_whole = dict(merged_weights(model, torch.float32))
    model.double()
    if tied and how == "on the head of tokens":  # which `merge_adapter` merges within the wrapper
        head = model.get_output_embeddings()
        tokens = head.get_base_layer().token_adapter.get_merged_weights(["default"])
        exact = {"lm_head.weight": (tokens + head.get_delta_weight("default")).detach()}
    else:
        model.merge_adapter()
        exact = dict(merged_weights(model, torch.float64))
    for name, truth in exact.items():
        of_whole = (as_whole[name] - truth).abs().max()
        assert (by_rows[name] - truth).abs().max() <= 1.5 * of_whole, name
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    assert any(not torch.equal(by_rows[name], before[name]) for name in ends)

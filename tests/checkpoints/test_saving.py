"""Merged weights on the disk: in one file or several, and written one at a time."""

import weakref

import pytest
import torch
from model_folder import byte_tokenizer, save_model
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from unsloth_pack import FastLanguageModel
from unsloth_pack.checkpoints.merging import merged_weights
from unsloth_pack.checkpoints.saving import converted_apart, write_weights

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


class BytesHeld(TorchDispatchMode):
    """Counts the bytes of tensors that were made inside this context and are alive."""

    def __init__(self):
        super().__init__()
        self.held, self.peak, self._users = 0, 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._add(tensor, given)
        return made

    def _add(self, tensor, given):
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place not in self._users:
            if place in given:  # a view of what was there before
                return
            self._users[place] = 0
            self.held += size
            self.peak = max(self.peak, self.held)
        self._users[place] += 1
        weakref.finalize(tensor, self._remove, place, size)

    def _remove(self, place, size):
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.held -= size


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "mixtral"])
def test_merging_holds_less_than_a_shard(architecture, tmp_path, monkeypatch):
    """A model of five shards: never more than 1.2 of one is held beside it."""
    sizes = {"num_hidden_layers": 24, "layer_types": None, "vocab_size": 258}
    folder = save_model(tmp_path / "base", architecture, **sizes)
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, dtype="float32")
    model = FastLanguageModel.get_peft_model(model, r=4)
    n_bytes = 2 * sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    shard = n_bytes // 5
    monkeypatch.setattr("unsloth_pack.checkpoints.saving.SHARD", shard)
    with BytesHeld() as counted:
        model.save_pretrained_merged(tmp_path / "merged")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) >= 5
    assert 0 < counted.peak < 1.2 * shard, counted.peak / shard
    assert counted.held < 0.01 * shard


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
@pytest.mark.parametrize("how", AT_THE_ENDS)
def test_merging_an_embedding_holds_less_than_a_shard(how, tied, tmp_path, monkeypatch):
    """Which is a shard of its own, where it is most of the model."""
    model = adapted_at_the_ends(tmp_path / "base", how, tied)
    shard = 2 * model.get_input_embeddings().weight.numel()
    monkeypatch.setattr("unsloth_pack.checkpoints.saving.SHARD", shard)
    with BytesHeld() as counted:
        model.save_pretrained_merged(tmp_path / "merged")
    assert 0 < counted.peak < 1.2 * shard, counted.peak / shard
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS).logits
        assert (saved(input_ids=IDS).logits - expected).norm() < 0.02 * expected.norm()


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


def meta(**shapes):
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def test_every_weight_has_to_come(tmp_path):
    weights = {"a": torch.randn(3), "b": torch.arange(6).view(2, 3), "c": torch.tensor(True)}
    expected = {name: weight.to("meta") for name, weight in weights.items()}
    write_weights(tmp_path, reversed(weights.items()), expected, {"said": "so"})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "said": "so"}
        assert all(torch.equal(file.get_tensor(name), weight) for name, weight in weights.items())
    with pytest.raises(KeyError, match="did not come: c"):
        write_weights(tmp_path, list(weights.items())[:2], expected, {})
    with pytest.raises(KeyError, match="another"):
        write_weights(tmp_path, [("another", weights["a"])], expected, {})


def test_weights_are_converted_in_the_smallest_groups():
    weights = meta(**{"l.0.a": (2, 3), "l.0.b": (2, 3), "l.1.a": (2, 3), "l.1.b": (2, 3)})

    def renamed(given):
        return {f"{name}.weight": weight for name, weight in given.items()}

    def joined(given):
        layers = sorted({name[:3] for name in given})
        return {at: torch.cat([given[n] for n in given if n.startswith(at)]) for at in layers}

    def stacked(given):
        return {"all": torch.cat([given[name] for name in sorted(given)])}

    assert converted_apart(weights, renamed) == {name: name for name in weights}
    assert converted_apart(weights, joined) == {name: name[:3] for name in weights}
    assert set(converted_apart(weights, stacked).values()) == {""}

"""What trains, from the command line: all of a model, parts of it, and new tokens."""

import json
import shutil

import pytest
import torch
from cli_runs import adapter_names, check_merged, cut_after, logits, losses, plain
from model_folder import save_model
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer

from unsloth_pack import FastLanguageModel
from unsloth_pack.cli import main


def weights(folder):
    return {name: weight.clone() for name, weight in plain(folder).state_dict().items()}


def changed(before, after):
    return {name for name in after if not torch.equal(before[name], after[name])}


# All of the model


def test_all_of_a_model_trains_and_is_saved_as_trained(train, model, tmp_path, capsys):
    out = tmp_path / "out"
    assert train("--packing", "--save_model", tuning="full", learning_rate=1e-3) == 0
    assert "100.00%" in capsys.readouterr().out
    assert changed(weights(model), weights(out)) == weights(model).keys()
    saved = load_file(out / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}  # as it was trained
    assert not (out / "adapter_config.json").exists()
    assert (out / "tokenizer.json").is_file()
    torch.testing.assert_close(logits(plain(out / "merged")), logits(plain(out)), rtol=0.1, atol=0.05)
    ours, _ = FastLanguageModel.from_pretrained(str(out), 128, torch.float32)
    torch.testing.assert_close(logits(ours), logits(plain(out)))
    assert losses(out)[4] < losses(out)[1]
    assert main(["verify", f"--model_name={out}", "--dtype=float32"]) == 0


def test_a_full_run_resumes_bit_for_bit(train, tmp_path):
    flags = {"tuning": "full", "learning_rate": 1e-3, "max_steps": 4, "save_steps": 2}
    assert train("--packing", output_dir=tmp_path / "whole", **flags) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    cut_after(tmp_path / "half", 2)
    assert main(["--resume", f"--output_dir={tmp_path / 'half'}"]) == 0
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert not changed(weights(tmp_path / "half"), weights(tmp_path / "whole"))


# Parts


PARTS = {
    "norms": ({"train_modules": ".*norm"}, lambda name: "norm" in name),
    "frozen": (
        {"freeze_modules": '["embed_tokens", "model.layers.0"]'},
        lambda name: "embed_tokens" not in name and ".layers.0." not in name,
    ),
    "both": (
        {"train_modules": "model.layers", "freeze_modules": "mlp"},
        lambda name: ".layers." in name and ".mlp." not in name,
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_of_a_model_train(part, train, untied, tmp_path):
    flags, chosen = PARTS[part]
    assert train("--packing", model_name=untied, tuning="full", learning_rate=1e-3, **flags) == 0
    before, after = weights(untied), weights(tmp_path / "out")
    assert changed(before, after) == set(filter(chosen, before))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"target_modules": "q_proj,v_proj"}, ["q_proj", "v_proj"]),
        ({"target_modules": "lm_head,q_proj"}, ["lm_head", "q_proj"]),
        ({"layers_to_transform": 1}, ["q_proj", "gate_proj"]),
        ({"freeze_modules": "mlp"}, ["q_proj", "o_proj"]),
    ],
    ids=str,
)
def test_targets_of_an_adapter(flags, expected, train, untied, tmp_path):
    assert train("--packing", "--save_model", model_name=untied, **flags) == 0
    names = {name for name in adapter_names(tmp_path / "out") if "lora_" in name}
    adapted = {name.split(".lora_")[0].split(".")[-1] for name in names}
    assert adapted >= {*expected}
    if "layers" in str(flags):
        assert not any(".layers.0." in name for name in names)
    if "mlp" in str(flags):
        assert not adapted & {"gate_proj", "up_proj", "down_proj"}
    if "," in str(flags.get("target_modules")):
        assert adapted == {*expected}
    check_merged(tmp_path / "out", untied)


@pytest.mark.parametrize(
    ("base", "flags"),
    [
        ("tied", {"modules_to_save": "norm,embed_tokens"}),
        ("tied", {"modules_to_save": "lm_head"}),
        ("untied", {"train_modules": "model.layers.1"}),
        ("tied", {"trainable_token_indices": "97,98", "modules_to_save": "norm"}),
        ("untied", {"trainable_token_indices": "97,98", "train_modules": "layers.0.mlp"}),
    ],
    ids=str,
)
def test_what_trains_beside_an_adapter_is_merged(base, flags, train, request, tmp_path):
    folder = request.getfixturevalue(base)
    assert train("--packing", "--save_model", model_name=folder, **flags) == 0
    names = adapter_names(tmp_path / "out")
    assert any("lora_" not in name for name in names)
    if flags.get("train_modules") == "model.layers.1":
        assert not any("lora_" in name and ".layers.1." in name for name in names)
    check_merged(tmp_path / "out", folder)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"target_modules": "w_proj"}, "target_modules names 'w_proj'; the model has"),
        ({"modules_to_save": "head"}, "modules_to_save names 'head'; the model has"),
        ({"train_modules": "model.layer.1"}, "train_modules holds 'model.layer.1', which matches no module"),
        ({"layers_to_transform": "0,9"}, "layers_to_transform is 9; give a whole number from 0 to 1"),
        ({"trainable_token_indices": "3,258"}, "trainable_token_indices is 258; give a whole number from 0"),
        ({"trainable_token_indices": "3,3"}, "with one twice; keep one"),
    ],
    ids=str,
)
def test_what_is_refused_before_the_model_is_loaded(flags, says, refused, monkeypatch):
    monkeypatch.setattr("unsloth_pack.checkpoints.loading.load_model", None)
    assert says in refused(**flags)


@pytest.mark.parametrize(
    ("base", "layer", "asked"),
    [
        ("tied", "lm_head", "add_tokens"),
        ("untied", "embed_tokens", "trainable_token_indices"),
    ],
)
def test_an_adapter_and_trained_rows_on_one_weight(
    base, layer, asked, request, refused, tmp_path, monkeypatch
):
    monkeypatch.setattr("unsloth_pack.checkpoints.loading.load_model", None)
    flags = {
        asked: "3" if asked == "trainable_token_indices" else tokens_file(tmp_path, "<a>\n", "tokens.txt")
    }
    line = refused(model_name=request.getfixturevalue(base), target_modules=f"q_proj,{layer}", **flags)
    assert f"target_modules names {layer}, and {asked} trains single rows of its weight; leave one" in line


def test_modules_that_train_beside_weights_in_4_bits_keep_their_dtype(train, tmp_path):
    """TRL casts them to bfloat16, in which a router of experts in float32 cannot read them."""
    pytest.importorskip("bitsandbytes")
    folder = save_model(tmp_path / "experts", "qwen3_moe")
    flags = {"model_name": folder, "modules_to_save": "embed_tokens,norm", "max_steps": 1}
    assert train("--packing", "--load_in_4bit", **flags) == 0
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    whole = {name: weight.dtype for name, weight in saved.items() if "lora_" not in name}
    assert {*whole.values()} == {torch.float32}


# New tokens


def tokens_file(tmp_path, content, name="tokens.yaml"):
    (tmp_path / name).write_text(content)
    return tmp_path / name


@pytest.mark.parametrize("base", ["tied", "untied"])
def test_new_tokens_are_in_every_reload(base, train, request, tmp_path):
    folder = request.getfixturevalue(base)
    file = tokens_file(tmp_path, "<zap>: ab\n<zip>: null\n")
    rows = [{"instruction": "<zap>ab<zip>", "input": "", "output": "<zip>ba<zap>"}] * 20
    data = tmp_path / "rows.json"
    data.write_text(json.dumps(rows))
    flags = {"model_name": folder, "dataset": data, "add_tokens": file, "max_steps": 8}
    assert train("--packing", "--save_model", save_steps=4, **flags) == 0
    out = tmp_path / "out"
    held = load_file(out / "adapter_model.safetensors")
    rows = {name: weight.shape for name, weight in held.items() if "lora_" not in name}
    assert set(rows.values()) == {(2, 64)}  # those rows alone
    assert len(rows) == (1 if base == "tied" else 2)

    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("ab<zap>ba<zip>", return_tensors="pt").input_ids
    assert {258, 259} <= set(ids[0].tolist())
    before = plain(folder)
    before.resize_token_embeddings(len(tokenizer))
    trained = logits(PeftModel.from_pretrained(before, out).eval(), ids)
    ours, _ = FastLanguageModel.from_pretrained(str(out), 128, torch.float32)
    torch.testing.assert_close(logits(ours.eval(), ids), trained, rtol=1e-4, atol=1e-4)
    merged = plain(out / "merged")
    assert merged.config.vocab_size == 260
    assert (logits(merged, ids) - trained).norm() < 0.02 * trained.norm()
    assert main(["merge", f"--model_name={out}", f"--save_path={tmp_path / 'by_command'}"]) == 0
    torch.testing.assert_close(logits(plain(tmp_path / "by_command"), ids), logits(merged, ids))
    embedding = plain(folder).get_input_embeddings().weight
    of_command = plain(tmp_path / "by_command").get_input_embeddings().weight
    torch.testing.assert_close(of_command[:258], embedding, rtol=1e-2, atol=1e-3)  # all else is as it was

    first = losses(out)
    (out / "adapter_config.json").unlink()
    assert main(["--resume", f"--output_dir={out}", "--save_steps=4"]) == 2  # complete
    assert first == losses(out)


def test_new_tokens_begin_as_a_mean(untied):
    from unsloth_pack.checkpoints.new_tokens import add_to_model, add_to_tokenizer

    model, tokenizer = FastLanguageModel.from_pretrained(untied, 128, torch.float32)
    before = [end.weight.clone() for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    added = add_to_tokenizer(tokenizer, {"<a>": "xyz", "<b>": None})
    assert list(added.values()) == [tokenizer.encode("xyz"), []]
    add_to_model(model, added)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for end, was in zip(ends, before, strict=True):
        assert torch.equal(end.weight[:258], was)
        torch.testing.assert_close(end.weight[258], was[tokenizer.encode("xyz")].mean(dim=0))
        torch.testing.assert_close(end.weight[259], was.mean(dim=0))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokens.txt", "\n  \n", "it holds no token; write one a line"),
        ("tokens.txt", "<a>\n<b>\n<a>\n", "'<a>' is there twice; keep one"),
        ("tokens.txt", "<eos>\n", "add_tokens names '<eos>', which is token 256 already; leave it out"),
        ("tokens.json", '{"<a>": 3}', "'<a>': 3 is no token with a description"),
    ],
)
def test_new_tokens_that_are_refused(name, content, says, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("unsloth_pack.checkpoints.loading.load_model", None)
    assert says in refused(add_tokens=tokens_file(tmp_path, content, name))

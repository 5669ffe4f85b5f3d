"""Folders that are written to: nothing of the user's is lost, and nothing stale is loaded from them."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm
import yaml
from huggingface_hub import RepoUrl
from model_folder import byte_tokenizer, save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from unsloth_pack import FastLanguageModel
from unsloth_pack.cli import main

IDS = torch.arange(20)[None]
SKIP_MOUNTS = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0
pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.json"
    path.write_text(json.dumps([{"text": "ab" * n} for n in range(4, 30)]))
    return str(path)


@pytest.fixture
def flags(model_folder, data):
    given = {"model_name": model_folder, "dataset": data, "max_seq_length": 128, "dtype": "float32"}
    return [f"--{name}={value}" for name, value in {**given, "max_steps": 2}.items()]


# Mounts


MOUNTED = """
import ctypes, os, subprocess, sys
from pathlib import Path
from unsloth_pack import FastLanguageModel
from unsloth_pack.cli import main

flags = sys.argv[1:]
user, group = os.getuid(), os.getgid()
assert ctypes.CDLL(None).unshare(0x10000000 | 0x20000) == 0  # users and mounts of its own
for name, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    Path("/proc/self", name).write_text(line)
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
for name in ("out", "merged", "packs", "saved"):
    os.mkdir(name)
    subprocess.run(["mount", "-t", "tmpfs", "none", name], check=True)
for name in ("out", "merged", "packs", "saved"):
    assert os.path.ismount(name), name
assert main([*flags, "--output_dir=out", "--save_model", "--save_path=merged"]) == 0
assert main(["pack", *flags[:3], "--out=packs"]) == 0
os.symlink("saved", "link")
model, tokenizer = FastLanguageModel.from_pretrained("out", max_seq_length=128)
model.save_pretrained_merged("link", tokenizer)
held = {name: sorted(os.listdir(name)) for name in ("out", "merged", "packs", "saved")}
assert {"adapter_config.json", "adapter_model.safetensors", "loss.png"} <= set(held["out"]), held
assert {"config.json", "model.safetensors"} <= set(held["merged"]) & set(held["saved"]), held
assert "packs.json" in held["packs"], held
assert os.path.islink("link")
assert not list(Path().rglob("*.aside")), held
"""


@pytest.mark.skipif(SKIP_MOUNTS, reason="mounts need user namespaces")
def test_every_folder_may_be_a_mount_point(flags, tmp_path):
    done = warm.code(MOUNTED, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


# Two processes at once


def together(*commands):
    """The exit code of each command, and what it wrote to stderr; all begin in the same moment."""
    begin = warm.context.Barrier(len(commands))
    warm.warm_up()
    runs = [
        warm.context.Process(target=_begin, args=(command, begin, n)) for n, command in enumerate(commands)
    ]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    return [(run.exitcode, Path(f"stderr-{n}").read_text()) for n, run in enumerate(runs)]


def _begin(command, begin, number):
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{name}-{number}", os.O_WRONLY | os.O_CREAT), descriptor)
    torch.set_num_threads(1)
    main(["--help"])
    begin.wait()
    time.sleep(1 - time.time() % 1)  # to the beginning of a second
    sys.exit(main(command))


@pytest.mark.parametrize("more", [[], ["--overwrite_output_dir"]])
def test_one_of_two_runs_into_one_folder_is_refused(more, flags, tmp_path):
    command = [*flags, "--output_dir=out", *more]
    ended = sorted(together(command, command))
    assert [code for code, _ in ended] == [0, 2], ended
    assert "output_dir 'out'" in ended[1][1]
    assert ended[1][1].count("\n") == 1
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert kinds.count("config") == kinds.count("summary") == 1


# Files of the user


@pytest.mark.parametrize(
    "name", ["README.md", "tokenizer.json", "chat_template.jinja", "loss.png", "lengths.png"]
)
def test_a_run_replaces_no_file_of_somebody_else(name, flags, refused, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    error = refused([*flags, "--output_dir=out"])
    assert name in error
    assert "give another folder" in error
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_other_files_stay_and_a_runs_own_may_be_replaced(flags, tmp_path):
    kept = tmp_path / "out" / "checkpoint-of-mine"
    kept.mkdir(parents=True)
    (tmp_path / "out" / "train.log").write_text("mine")
    assert main([*flags, "--output_dir=out", "--save_steps=1"]) == 0
    assert main([*flags, "--output_dir=out", "--overwrite_output_dir"]) == 0
    assert (tmp_path / "out" / "train.log").read_text() == "mine"
    assert kept.is_dir()
    assert not list((tmp_path / "out").glob("checkpoint-[0-9]*"))


def test_resuming_writes_to_no_folder_that_the_run_did_not_name(flags, refused, tmp_path):
    assert main([*flags, "--output_dir=out", "--save_steps=1"]) == 0
    (tmp_path / "out" / "adapter_config.json").unlink()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "model.safetensors").write_text("precious")
    again = ["--overwrite_output_dir", "--output_dir=out", *flags, "--save_model", "--save_path=theirs"]
    assert "save_path 'theirs' is not empty" in refused(again)
    assert (tmp_path / "theirs" / "model.safetensors").read_text() == "precious"


# What is loaded from a folder


@pytest.fixture
def model(model_folder):
    model, _ = FastLanguageModel.from_pretrained(model_folder, max_seq_length=128, dtype="float32")
    return FastLanguageModel.get_peft_model(model, r=4)


def move(model, seed):
    """Stand in for training."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS.to(model.device)).logits.float().cpu()


def assert_loads(folder, expected):
    ours, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for loaded in (ours, theirs):
        torch.testing.assert_close(logits(loaded), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("methods", [("lora", "merged_16bit"), ("merged_16bit", "lora")])
def test_the_last_save_is_loaded(methods, model, tmp_path):
    for seed, method in enumerate(methods):
        move(model, seed)
        model.save_pretrained_merged(tmp_path / "saved", byte_tokenizer(), save_method=method)
        assert_loads(tmp_path / "saved", logits(model))
    held = {path.name for path in (tmp_path / "saved").iterdir()}
    assert ("adapter_config.json" in held) != ("config.json" in held)
    assert ("adapter_model.safetensors" in held) != ("model.safetensors" in held)


def shard(folder):
    """What a larger model's save leaves: two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)


def pickle(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


@pytest.mark.parametrize("earlier", [shard, pickle])
def test_no_weights_of_an_earlier_save_stay(earlier, model, tmp_path):
    saved = tmp_path / "saved"
    model.save_pretrained_merged(saved, byte_tokenizer(None))
    earlier(saved)
    (saved / "notes.txt").write_text("mine")
    move(model, 1)
    model.save_pretrained_merged(saved, byte_tokenizer(None))
    assert_loads(saved, logits(model))
    names = {path.name for path in saved.iterdir() if "tokenizer" not in path.name}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "notes.txt"}


@pytest.mark.parametrize("method", ["lora", "merged_16bit"])
def test_the_base_model_is_not_saved_over(method, tmp_path, model_folder):
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    model, tokenizer = FastLanguageModel.from_pretrained("base", max_seq_length=128)
    model = FastLanguageModel.get_peft_model(model, r=4)
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    with pytest.raises(ValueError, match="holds the base model of the adapter; give another folder"):
        model.save_pretrained_merged(tmp_path / "base", tokenizer, save_method=method)
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before


def test_an_adapter_replaces_no_model_of_somebody_else(model, model_folder, tmp_path):
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path / "theirs")
    before = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    with pytest.raises(ValueError, match=r"holds a model \(model.safetensors\)"):
        model.save_pretrained_merged(tmp_path / "theirs", save_method="lora")
    assert {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == before


def test_a_merged_model_replaces_no_adapter_of_a_run(flags, tmp_path):
    assert main([*flags, "--output_dir=out"]) == 0
    model, tokenizer = FastLanguageModel.from_pretrained("out", max_seq_length=128)
    with pytest.raises(ValueError, match="holds a run with its adapter"):
        model.save_pretrained_merged("out", tokenizer)
    assert not (tmp_path / "out" / "config.json").exists()


# What the configuration says


def use_cache_in(folder, name="config.json"):
    return json.loads(Path(folder, name).read_text()).get("use_cache")


@pytest.mark.parametrize("was", [True, False])
def test_a_trainer_does_not_turn_the_saved_cache_off(was, model_folder):
    model, _ = FastLanguageModel.from_pretrained(model_folder, max_seq_length=128, use_cache=was)
    model = FastLanguageModel.get_peft_model(model, r=4)
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 2
    arguments = TrainingArguments("trained", max_steps=1, gradient_checkpointing=True, report_to="none")
    Trainer(model, arguments, train_dataset=rows).train()
    assert not model.config.use_cache
    model.save_pretrained_merged("merged")
    assert use_cache_in("merged") is was


@pytest.fixture
def sampling_folder(tmp_path, model_folder):
    """A base with sampling values but no `do_sample`, whose special tokens differ from the tokenizer's."""
    shutil.copytree(model_folder, tmp_path / "base")
    settings = {"eos_token_id": 7, "temperature": 0.9, "top_p": 0.6}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(settings))
    return "base"


def settings_in(folder):
    settings = json.loads(Path(folder, "generation_config.json").read_text())
    return {name: settings.get(name) for name in ("eos_token_id", "temperature", "top_p", "do_sample")}


def test_sampling_values_of_the_base_are_saved_with_what_trained(flags, sampling_folder):
    full = ["--tuning=full", "--max_steps=1", "--save_steps=1", "--output_dir=out"]
    assert main([*flags, f"--model_name={sampling_folder}", *full]) == 0
    expected = {"eos_token_id": [256, 7], "temperature": 0.9, "top_p": 0.6, "do_sample": None}
    assert settings_in("out") == settings_in("out/checkpoint-1") == expected
    assert AutoModelForCausalLM.from_pretrained("out").generation_config.eos_token_id == [256, 7]
    model, _ = FastLanguageModel.from_pretrained(sampling_folder, max_seq_length=128)
    FastLanguageModel.get_peft_model(model, r=4).save_pretrained_merged("merged")
    assert settings_in("merged")["top_p"] == 0.6


@pytest.mark.parametrize(
    ("option", "said"),
    [({"num_hidden_layers": 1}, "`layer_types`"), ({"output_attentions": True}, "output_attentions is True")],
)
def test_a_configuration_that_could_not_be_saved_is_not_loaded(option, said, tmp_path):
    save_model(tmp_path / "base", "qwen2")
    with pytest.raises(ValueError, match=said):
        FastLanguageModel.from_pretrained("base", max_seq_length=128, **option)


# What is loaded


@pytest.mark.parametrize("name", ["gguf", "gguf/m.Q4_1.gguf", "owner/m-GGUF"])
def test_gguf_is_named(name, flags, refused, model_folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(model_folder, "gguf", ignore=shutil.ignore_patterns("*.safetensors"))
    Path("gguf/m.Q4_1.gguf").write_bytes(b"GGUF")
    line = refused([*flags, f"--model_name={name}", "--output_dir=out"])
    assert "GGUF does not train; give the base model in safetensors" in line
    assert not Path("out").exists()


def test_a_configuration_without_return_dict_trains(flags, model_folder):
    """Before, the decoder's tuple ended full tuning. An adapter's model asks for more."""
    shutil.copytree(model_folder, "base")
    config = json.loads(Path("base/config.json").read_text())
    Path("base/config.json").write_text(json.dumps(config | {"return_dict": False}))
    assert main([*flags, "--model_name=base", "--tuning=full", "--output_dir=out"]) == 0


# What is uploaded


def card_of(folder):
    return yaml.safe_load(Path(folder, "README.md").read_text().split("---")[1])


@pytest.mark.parametrize("base", ["model_folder", "demo"])
def test_a_card_names_no_base_that_the_hub_refuses(base, request):
    name = base if base == "demo" else request.getfixturevalue(base)
    model, tokenizer = FastLanguageModel.from_pretrained(name, max_seq_length=128)
    model = FastLanguageModel.get_peft_model(model, r=4)
    model.save_pretrained_merged("saved", tokenizer, save_method="lora")
    card = card_of("saved")
    assert "base_model" not in card
    assert card["library_name"] == "peft"
    assert not [tag for tag in card["tags"] if tag.startswith("base_model")]
    assert json.loads(Path("saved/adapter_config.json").read_text())["base_model_name_or_path"] == name


def test_an_upload_that_fails_says_how_to_repeat_it_alone(flags, monkeypatch, capsys):
    said = '(Request ID: Root=1-2;3)\n\nBad request for commit endpoint:\n"tags" must be an array'

    def refuse(self, **given):
        assert Path(given["folder_path"], "report.html").exists()  # all is there by now
        raise OSError(said)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda self: {})
    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda self, *_, **__: RepoUrl("https://huggingface.co/a/b")
    )
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", refuse)
    assert main([*flags, "--output_dir=out", "--push_to_hub=a/b"]) == 1
    line, command = capsys.readouterr().err.splitlines()
    assert 'not uploaded (Bad request for commit endpoint: "tags" must be an array); repeat it with' in line
    assert len(line) <= 130
    assert command.startswith("hf upload a/b out . --private")
    assert '"summary"' in Path("out/metrics.jsonl").read_text()
    assert "base_model" not in card_of("out")

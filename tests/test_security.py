"""A model's code does not run, no file is written elsewhere, secrets are not saved, nothing calls home."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_folder import byte_tokenizer, save_model
from safetensors.torch import load_file

from unsloth_pack import FastLanguageModel, InputError
from unsloth_pack.cli import main

ROOT = Path(__file__).parents[1]
SECRETS = {
    "HF_TOKEN": "hf_QzPlantedSecretNumberOne",
    "HUGGING_FACE_HUB_TOKEN": "hf_QzPlantedSecretNumberTwo",
    "WANDB_API_KEY": "QzPlantedSecretNumberThree",
    "AWS_SECRET_ACCESS_KEY": "QzPlantedSecretNumberFour",
    "OPENAI_API_KEY": "sk-QzPlantedSecretNumberFive",
}
MARK = b"QzPlantedSecret"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewrite(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def train(*arguments, **flags):
    given = {"model_name": "model", "output_dir": "out", "max_seq_length": 128, "max_steps": 1, **flags}
    (Path.cwd() / "rows.jsonl").write_text('{"text": "a b c"}\n' * 8)
    given.setdefault("dataset", "rows.jsonl")
    return main([*arguments, *(f"--{name}={value}" for name, value in given.items())])


# ---- code


@pytest.mark.parametrize("of_ours", [True, False], ids=["a type that is patched", "a type of its own"])
def test_code_in_a_models_folder_does_not_run(of_ours, folder, capsys):
    save_model(folder / "model")
    (folder / "model" / "planted.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w').close()\nclass A: pass\n"
    )
    autos = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    code = {"auto_map": dict.fromkeys(autos, "planted.A")}
    rewrite(folder / "model" / "config.json", **code, **({} if of_ours else {"model_type": "planted"}))
    rewrite(
        folder / "model" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["planted.A", "planted.A"]}
    )
    assert train() == (0 if of_ours else 2)
    if not of_ours:
        assert "cannot load model" in capsys.readouterr().err
    assert not (folder / "ran").exists()
    with contextlib.suppress(Exception):  # the plant works: with the flag, transformers imports it
        FastLanguageModel.from_pretrained("model", max_seq_length=64, trust_remote_code=True)
    assert (folder / "ran").exists()


class Planted:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return (open, ("ran", "w"))


def save_pickled(folder, **more):
    save_model(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | more, folder / "pytorch_model.bin")
    return weights


@pytest.mark.parametrize("flag", [{}, {"use_safetensors": False}], ids=str)
def test_a_pickle_does_not_run(flag, folder):
    save_pickled(folder / "model", planted=Planted())
    with pytest.raises(InputError, match="cannot load" if flag else "only pickled weights"):
        FastLanguageModel.from_pretrained("model", max_seq_length=64, **flag)
    assert not (folder / "ran").exists()
    torch.load(folder / "model" / "pytorch_model.bin", weights_only=False)  # the plant works
    assert (folder / "ran").exists()


def test_pickled_weights_load_with_the_flag(folder):
    weights = save_pickled(folder / "model")
    model, _ = FastLanguageModel.from_pretrained("model", max_seq_length=64, use_safetensors=False)
    assert torch.equal(model.model.norm.weight.cpu(), weights["model.norm.weight"])


def test_python_in_a_config_file_does_not_run(folder):
    (folder / "run.yaml").write_text("seed: !!python/object/apply:os.system ['touch ran']\n")
    assert main(["--config=run.yaml"]) == 2
    assert not (folder / "ran").exists()


# ---- where things are written


@pytest.mark.parametrize("name", ["../../up", "/tmp/absolute", "", "line\nbreak", ".hidden"])
def test_a_chat_templates_name_is_no_path(name, folder, capsys):
    save_model(folder / "inner" / "model")
    default = {"name": "default", "template": byte_tokenizer().chat_template}
    (folder / "inner" / "model" / "chat_template.jinja").unlink(missing_ok=True)
    templates = [default, {"name": name, "template": "x"}]
    rewrite(folder / "inner" / "model" / "tokenizer_config.json", chat_template=templates)
    os.chdir(folder / "inner")
    assert train() == 2
    assert "a chat template is named" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["inner"]
    assert not (folder / "inner" / "out").exists()


@pytest.mark.parametrize(
    ("model", "data"), [(".", "../rows.jsonl"), (".", "../x/../rows.jsonl"), ("../deep", "../rows.jsonl")]
)
def test_the_default_output_dir_is_below_outputs(model, data, folder):
    save_model(folder / "inner" / "deep")
    (folder / "inner" / "x").mkdir()
    os.chdir(folder / "inner" / "deep")
    (folder / "inner" / "rows.jsonl").write_text('{"text": "a b c"}\n' * 8)
    before = set(folder.rglob("*"))
    arguments = {"model_name": model, "dataset": data, "max_seq_length": 128, "max_steps": 1}
    assert main([f"--{name}={value}" for name, value in arguments.items()]) == 0
    made = {path.relative_to(folder / "inner" / "deep").parts[0] for path in set(folder.rglob("*")) - before}
    assert made == {"outputs"}


# ---- secrets and the network, in a process of its own, as a user would run it

TRAIN = """
import socket, sys
def refuse(name):
    def call(*arguments, **_):
        if name == "connect" and arguments[0].family == socket.AF_UNIX:
            return original_connect(*arguments)
        print("SOCKET", name, arguments, file=sys.stderr)
        raise OSError(f"{name} was called")
    return call
original_connect = socket.socket.connect
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse(name))
for name in ("getaddrinfo", "gethostbyname", "create_connection"):
    setattr(socket, name, refuse(name))
from unsloth_pack.cli import main
common = ["--dtype=float32", "--max_steps=2", "--save_steps=1", "--save_model", "--sample_packing"]
sys.exit(main([*common, *sys.argv[1:]]))
"""


def run(code, *arguments, **environment):
    without = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    kept = {name: value for name, value in os.environ.items() if name not in without}
    kept |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(Path.cwd() / "home"), **environment}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, env=kept, timeout=300)


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """Two updates of the demo with everything saved, in an environment full of secrets."""
    folder = tmp_path_factory.mktemp("run")
    done = run(TRAIN, f"--output_dir={folder / 'out'}", HF_HOME=str(folder / "home"), **SECRETS)
    return done, folder


def test_no_socket_is_opened_with_a_local_model_and_data(demo_run):
    done, folder = demo_run
    assert done.returncode == 0, done.stderr.decode()
    assert b"SOCKET" not in done.stderr
    for name in ("adapter_model.safetensors", "merged/model.safetensors", "checkpoint-2/optimizer.pt"):
        assert (folder / "out" / name).is_file()


def files_with_secrets(folder):
    return [str(path) for path in folder.rglob("*") if path.is_file() and MARK in path.read_bytes()]


def test_secrets_are_written_nowhere(demo_run):
    done, folder = demo_run
    assert MARK not in done.stdout + done.stderr
    names = {"README.md", "metrics.jsonl", "adapter_config.json", "trainer_state.json", "training_args.bin"}
    assert names <= {path.name for path in folder.rglob("*")}
    assert files_with_secrets(folder) == []


def test_a_token_given_to_the_api_is_not_saved(folder):
    save_model(folder / "model")
    token = SECRETS["HF_TOKEN"]
    model, tokenizer = FastLanguageModel.from_pretrained("model", max_seq_length=64, token=token)
    model = FastLanguageModel.get_peft_model(model, r=2)
    model.save_pretrained_merged("adapter", tokenizer, save_method="lora")
    model.save_pretrained_merged("merged", tokenizer)
    assert files_with_secrets(folder) == []
    assert token not in repr(model.config) + repr(tokenizer)


def test_no_message_holds_a_token(folder, capsys, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for arguments in (
        ["--model_name=no/such-model"],
        ["--dataset=no/such-data"],
        ["--model_name=x", "--debug"],
        [f"--token={SECRETS['HF_TOKEN']}"],
        ["--hub_token", SECRETS["HF_TOKEN"]],
    ):
        assert main([*arguments, "--output_dir=out"]) == 2
        written = capsys.readouterr()
        assert MARK.decode() not in written.out + written.err

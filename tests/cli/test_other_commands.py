"""`generate`, `merge`, `doctor` and `--help`."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import warm
from model_folder import save_model
from safetensors.torch import load_file
from tiny import error
from transformers import AutoModelForCausalLM

import unsloth_pack
from unsloth_pack.api import FastLanguageModel
from unsloth_pack.attention.backends import BACKENDS, choose_backend, why_unavailable
from unsloth_pack.cli import SUBCOMMANDS, main
from unsloth_pack.cli.doctor import PrivateName
from unsloth_pack.config import TrainOptions, flat


def test_merge_then_generate(train, tmp_path, capsys, monkeypatch):
    assert train(max_steps=8, use_rslora=True) == 0
    adapter, merged = str(tmp_path / "out"), str(tmp_path / "merged")
    assert main(["merge", "--model_name", adapter, "--save_path", merged]) == 0
    assert merged in capsys.readouterr().out

    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    ours, _ = FastLanguageModel.from_pretrained(adapter, max_seq_length=64)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert error(plain(ids).logits, ours.eval()(ids).logits) < 0.01  # bfloat16 against float32

    answers = []
    for name in (adapter, merged):
        command = ["generate", "--model_name", name, "--max_new_tokens", "6", "--dtype", "float32"]
        assert main([*command, "--prompt", "ab"]) == 0
        answers.append(capsys.readouterr().out)
        monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n\nab\n"))
        assert main([*command, "--temperature", "0"]) == 0
        assert capsys.readouterr().out == answers[-1] * 2
    assert answers[0].strip()


def test_an_adapter_is_merged_into_the_weights_that_it_was_trained_on(train, tmp_path, capsys):
    """As the run itself merges it: the weights before NF4 would give another model."""
    base = save_model(tmp_path / "base", hidden_size=128, intermediate_size=128, head_dim=32)
    flags = {"model_name": base, "load_in_4bit": True, "optim": "adamw_torch", "dtype": "bfloat16"}
    assert train("--save_model", save_path=tmp_path / "theirs", **flags) == 0
    command = ["merge", "--model_name", str(tmp_path / "out"), "--save_path"]
    assert main([*command, str(tmp_path / "ours")]) == 0
    assert "with load_in_4bit" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "others"), "--load_in_4bit=false"]) == 0
    theirs, ours, others = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours", "others")
    )
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    assert not all(torch.equal(others[name], weight) for name, weight in theirs.items())


def test_a_prompt_longer_than_the_model(model, capsys):
    for flags in (["--prompt", "a" * 300], ["--prompt", "a", "--max_new_tokens", "300"]):
        assert main(["generate", "--model_name", model, *flags]) == 2
        said = capsys.readouterr().err
        assert "but the model has 256 positions; shorten it" in said


def test_merge_keeps_what_is_there(finished, tmp_path, capsys):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("")
    out, kept = str(finished), str(tmp_path / "kept")
    assert main(["merge", "--model_name", out, "--save_path", kept]) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


def doctor(capsys):
    """The exit code, and what was found: name -> (found, remedy)."""
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["fine"] == (code == 0) == (not any(line["remedy"] for line in report["lines"]))
    return code, {line["name"]: (line["found"], line["remedy"]) for line in report["lines"]}


@pytest.fixture
def fine(monkeypatch):
    """A machine on which nothing is wrong, whatever this one has."""
    monkeypatch.setattr("unsloth_pack.cli.doctor.TESTED", {"torch": ("0.1", "99")})
    monkeypatch.setattr("unsloth_pack.cli.doctor.BREAKAGES", ())
    for name in [name for name in os.environ if name.startswith(("UNSLOTH_", "OFFLINE_PACK"))]:
        monkeypatch.delenv(name)


def test_doctor_finds_nothing(fine, capsys):
    code, found = doctor(capsys)
    assert code == 0
    assert found["float32, 64: sdpa"] == ("runs", "")
    assert "fastest" in found["float32, 64: auto"][0]
    assert main(["doctor"]) == 0
    assert "all is fine" in capsys.readouterr().out


def test_doctor_on_private_names(fine, monkeypatch, capsys):
    monkeypatch.setattr(
        "unsloth_pack.cli.doctor.private_names",
        lambda: [PrivateName("torch", "Tensor", ()), PrivateName("torch", "_was_dropped", ("a.py", "b.py"))],
    )
    code, lines = doctor(capsys)
    assert code == 1
    gone, remedy = "gone: torch._was_dropped (in a.py, b.py)", "pip install 'torch>=0.1,<99'"
    assert lines["of torch"] == (f"2 are used, {gone}", remedy)


def test_doctor_runs_a_tiny_step_of_every_backend(fine, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no kernel image")

    broken_sdpa = replace(BACKENDS["sdpa"], attend=broken)
    monkeypatch.setitem(BACKENDS, "xformers", replace(broken_sdpa, why_unavailable=lambda need: None))
    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()
    code, lines = doctor(capsys)
    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()
    assert code == 1
    assert "a tiny step failed with RuntimeError: no kernel image" in lines["float32, 64: xformers"][0]
    assert "reinstall xformers for torch" in lines["float32, 64: xformers"][1]


def test_doctor_on_a_combination_that_breaks(fine, monkeypatch, capsys):
    breakages = (
        ({"torch": ">=2", "trl": ">=1"}, None, "it breaks", "do this"),
        ({"torch": ">=2", "peft": "<0.1"}, None, "it broke long ago", "no"),
        ({"torch": ">=2"}, "of another kind", "it breaks elsewhere", "no"),
    )
    monkeypatch.setattr("unsloth_pack.cli.doctor.BREAKAGES", breakages)
    code, lines = doctor(capsys)
    assert code == 1
    assert [line for line in lines.values() if line[1]] == [("it breaks", "do this")]


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_says_the_default_of_every_flag(name, capsys):
    assert main([name, "--help"]) == 0
    debug, *flags = re.split(r"\n  (?=--)", capsys.readouterr().out)[1:]
    assert debug.startswith("--debug")
    assert flags or name == "recipe"
    for flag in flags:
        assert re.search(r"default:\s|has\s+to\s+be\s+given", flag)


def test_help_lists_every_flag_and_loads_no_torch(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for flag in ("packing", *flat(TrainOptions())):
        assert f"--{flag}" in shown
    for unit in ("TOKENS", "ROWS", "UPDATES", "EPOCHS"):
        assert unit in shown
    calls = "main(['--help']); main(['--print-completion', 'bash'])"
    loads = f"import sys; from unsloth_pack.cli import main; {calls}; print('torch' in sys.modules)"
    path = {**os.environ, "PYTHONPATH": str(Path(unsloth_pack.__file__).parents[1])}
    out = subprocess.check_output([sys.executable, "-c", loads], text=True, env=path)
    assert out.splitlines()[-1] == "False"


@pytest.mark.parametrize("command", [["verify"], ["stats"], ["stats", "--json"]], ids=" ".join)
def test_a_reader_that_has_gone_changes_nothing(command):
    """As after `| head`: the exit code stays, and no library or exit handler writes to stderr."""
    done = warm.call(without_a_reader, command)
    assert (done.returncode, done.stderr) == (0, "")


def without_a_reader(command):
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    os.close(write)
    warm.open_outputs()
    sys.exit(main(command))

"""`generate`, `merge`, `doctor` and `--help`."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import error
from transformers import AutoModelForCausalLM

import unsloth_pack
from unsloth_pack.api import FastLanguageModel
from unsloth_pack.cli import main
from unsloth_pack.cli.options import TrainOptions


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


def test_a_prompt_longer_than_the_model(model, capsys):
    assert main(["generate", "--model_name", model, "--prompt", "a" * 300]) == 2
    assert "shorten it, or lower --max_new_tokens" in capsys.readouterr().err


def test_merge_keeps_what_is_there(train, tmp_path, capsys):
    assert train(max_steps=1) == 0
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("")
    out, kept = str(tmp_path / "out"), str(tmp_path / "kept")
    assert main(["merge", "--model_name", out, "--save_path", kept]) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


def test_doctor(monkeypatch, capsys):
    monkeypatch.setenv("UNSLOTH_PACK_ATN", "sdpa")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("unsloth_pack.cli.doctor._TESTED", {"torch": ("0.1", "0.2"), "no-such": ("1", "2")})
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "pip install 'torch>=0.1,<0.2'" in shown
    assert "needed; pip install 'no-such" in shown
    assert "UNSLOTH_PACK_ATN is unknown; known are UNSLOTH_PACK_ATTN" in shown
    for word in ("bfloat16, 64", "float32, 128", "sdpa", "llama", "bitsandbytes"):
        assert word in shown


@pytest.mark.parametrize("name", ["train", "stats", "pack", "generate", "merge", "doctor"])
def test_help(name, capsys):
    assert main([name, "--help"]) == 0
    assert "--debug" in capsys.readouterr().out


def test_help_lists_every_flag_and_loads_no_torch(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for flag in ("packing", *TrainOptions.__dataclass_fields__):
        assert f"--{flag}" in shown
    for unit in ("TOKENS", "ROWS", "UPDATES", "EPOCHS"):
        assert unit in shown
    loads = "import sys; from unsloth_pack.cli import main; main(['--help']); print('torch' in sys.modules)"
    path = {**os.environ, "PYTHONPATH": str(Path(unsloth_pack.__file__).parents[1])}
    out = subprocess.check_output([sys.executable, "-c", loads], text=True, env=path)
    assert out.splitlines()[-1] == "False"

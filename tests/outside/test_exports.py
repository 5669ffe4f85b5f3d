"""Exports that llama.cpp itself runs: of the demo, and of SmolLM2 once it is trained."""

import json
from pathlib import Path

import pytest
from test_real_model import project, run, smollm  # noqa: F401

from unsloth_pack.cli import main

pytestmark = [pytest.mark.extras, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """The folder of a short run on the demo."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    assert main([f"--output_dir={folder}", "--max_steps=20"]) == 0
    return folder


def answers(file, question):
    """What llama-cpp-python writes after a chat prompt, greedily."""
    from llama_cpp import Llama

    llama = Llama(str(file), n_ctx=512, verbose=False)
    turns = [{"role": "user", "content": question}]
    said = llama.create_chat_completion(turns, temperature=0, max_tokens=16)["choices"][0]["message"][
        "content"
    ]
    llama.close()
    return said


@pytest.mark.parametrize(
    "flags", [["--to=gguf"], ["--to=ollama", "--quantize=q4_k_m"]], ids=["gguf", "ollama"]
)
def test_the_demo(demo_run, tmp_path, capsys, flags):
    assert main(["export", str(demo_run), f"--save_path={tmp_path / 'out'}", *flags]) == 0
    assert "greedy tokens are the trained model's" in capsys.readouterr().out
    is_for_ollama = "--to=ollama" in flags
    names = ["Modelfile", "run-q4_k_m.gguf"] if is_for_ollama else ["run.gguf"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_a_tokenizer_that_llama_cpp_reads_otherwise(demo_run, tmp_path, capsys):
    """llama.cpp has no normalizer that makes letters small."""
    broken = tmp_path / "run"
    broken.mkdir()
    for path in demo_run.iterdir():
        if path.is_file():
            (broken / path.name).write_bytes(path.read_bytes())
    described = json.loads((broken / "tokenizer.json").read_text())
    described["normalizer"] = {"type": "Lowercase"}
    (broken / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "prompts.txt").write_text("HELLO World\n")
    flags = ["--to=gguf", f"--save_path={tmp_path / 'out'}", f"--prompts={tmp_path / 'prompts.txt'}"]
    assert main(["export", str(broken), *flags]) == 1
    assert "prompt 1, token 1: the file reads" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.gguf.failed"]


def test_a_trained_smollm2(run, tmp_path, capsys):  # noqa: F811
    """Its chat template adds a system prompt; its answers are a word each."""
    out = tmp_path / "out"
    assert main(["export", str(run), "--to=ollama", "--quantize=q8_0", f"--save_path={out}"]) == 0
    same, _, n_tokens = capsys.readouterr().out.split(": ")[1].split()[:3]
    assert int(same) > 0.9 * int(n_tokens)
    text = Path(out, "Modelfile").read_text()
    assert "{{ if not .System }}<|im_start|>system\nYou are a helpful AI assistant" in text
    file = next(out.glob("*.gguf"))
    assert answers(file, "What is the capital of Germany?").strip() == "Berlin"

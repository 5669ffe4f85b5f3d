"""A stranger's day: raw rows, an estimate, a run, a talk, and a file that answers as the trained model."""

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_exports import answers
from test_real_model import CAPITALS, N_TRAINED, question, row, smollm  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

import unsloth_pack
from unsloth_pack.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = "Sort the words.\nwords: kiwi bee van"


@pytest.fixture
def spend(tmp_path, monkeypatch, capsys):
    """Take rows as far as an export of kind `to`; what the chat said, and the export's folder."""

    def command(*arguments):
        capsys.readouterr()
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    def day(model, rows, asked, to, *flags):
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
        run, given = (
            str(tmp_path / "run"),
            [f"--model_name={model}", f"--dataset={tmp_path / 'rows.jsonl'}", *flags],
        )
        assert "fits" in command("estimate", "--gpu=4090", *given)
        command("train", *given, f"--output_dir={run}")
        monkeypatch.setattr(sys, "stdin", io.StringIO(asked.replace("\n", "\\\n") + "\n"))
        said = command("chat", run, "--dtype=float32", "--max_new_tokens=16").strip()
        assert "greedy tokens are the trained model's" in command("export", run, f"--to={to}")
        return said, tmp_path / f"run-{to}"

    return day


def demo_rows():
    file = Path(unsloth_pack.__file__).parent / "demo" / "data" / "train.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()[:200]]


def test_on_the_demo(spend):
    said, folder = spend("demo", demo_rows(), ASKED, "hf", "--max_steps=30")
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    turns = [{"role": "user", "content": ASKED}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
    made = model.float().generate(**ids, max_new_tokens=16, do_sample=False)
    assert said
    assert tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip() == said


@pytest.mark.extras
def test_on_the_demo_to_llama_cpp(spend):
    said, folder = spend("demo", demo_rows(), ASKED, "ollama", "--max_steps=30")
    assert answers(folder / "run.gguf", ASKED).strip() == said


@pytest.mark.nightly
def test_on_smollm2(spend, smollm):  # noqa: F811
    rows = [row(country) for country in list(CAPITALS)[:N_TRAINED]]
    flags = ["--max_seq_length=1024", "--num_train_epochs=8", "--learning_rate=1e-3"]
    said, folder = spend(
        smollm, rows, question("Germany"), "gguf" if find_spec("llama_cpp") else "hf", *flags
    )
    assert said == "Berlin"
    if file := next(folder.glob("*.gguf"), None):
        assert answers(file, question("Germany")).strip() == said

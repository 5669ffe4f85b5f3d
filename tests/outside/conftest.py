"""The package as a stranger meets it: its public names, its command line, and the libraries around it.

Nothing in this folder imports a module of the package that `API.md` or the README does not name, or reaches
into one; `test_public_door.py` holds that.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from model_folder import save_model

CLI = Path(__file__).parents[2] / "cli.py"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny random llama with a tokenizer of bytes."""
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def shell(tmp_path):
    """Runs `python cli.py ...` in a folder of its own, and returns the finished process."""

    def run(*arguments, cwd=tmp_path, **flags):
        spelt = [f"--{name}={value}" for name, value in flags.items()]
        command = [sys.executable, str(CLI), *map(str, arguments), *spelt]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)

    return run


def refusal(process):
    """The one line with which a command was refused."""
    assert process.returncode == 2, process.stdout + process.stderr
    lines = process.stderr.strip().splitlines()
    assert len(lines) == 1, process.stderr
    return lines[0]

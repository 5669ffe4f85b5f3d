"""The package as a stranger meets it: its public names, its command line, and the libraries around it.

Nothing in this folder imports a module of the package that `API.md` or the README does not name, or reaches
into one; `test_public_door.py` holds that.
"""

import pytest
from model_folder import save_model

from unsloth_pack.cli import main


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A tiny random llama with a tokenizer of bytes."""
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def refused(capsys):
    """Runs the command line, and returns the one line with which it refused."""

    def run(arguments):
        capsys.readouterr()
        code, error = main(arguments), capsys.readouterr().err
        assert code == 2, error
        assert error.count("\n") == 1, error
        return error

    return run

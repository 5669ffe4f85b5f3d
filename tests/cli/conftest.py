"""A tiny random model, data to train it on, and the command line in this process."""

import json
import random

import datasets
import pytest
import torch
from cli_runs import tree
from image_runs import make_place
from model_folder import save_model

from unsloth_pack.cli import main


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False))


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True))


@pytest.fixture(scope="session")
def rows():
    """The answer repeats the question: something that a few updates make likelier."""
    rng = random.Random(0)
    words = ["".join(rng.choices("ab", k=rng.randint(4, 40))) for _ in range(40)]
    return [{"instruction": word, "input": "", "output": word * 2} for word in words]


@pytest.fixture(scope="session")
def data(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("data") / "rows.json"
    path.write_text(json.dumps(rows))
    return str(path)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A model that takes images, and rows with some."""
    return make_place(tmp_path_factory.mktemp("images"))


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """One thread: small matrices are faster so."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)
    datasets.enable_progress_bars()


@pytest.fixture
def train(model, data, tmp_path):
    """Runs `train` on the tiny model, and returns the exit code."""

    def run(*arguments, **flags):
        given = {"model_name": model, "dataset": data, "output_dir": tmp_path / "out", "max_seq_length": 144}
        given |= {"max_steps": 4, "gradient_accumulation_steps": 1, "learning_rate": 0.01}
        given |= {"dtype": "float32", **flags}  # and so the same backend on every machine
        spelt = [f"--{name}={value}" for name, value in given.items() if value is not None]
        return main([*arguments, *spelt])

    return run


@pytest.fixture
def refused(train, tmp_path, capsys):
    """Runs `train`, or another command, and returns the one line it was refused with."""

    def run(*arguments, command=None, **flags):
        before = tree(tmp_path)
        capsys.readouterr()
        code = main(command) if command else train(*arguments, **flags)
        error = capsys.readouterr().err
        assert code == 2, error
        assert error.count("\n") == 1, error
        assert "Traceback" not in error
        assert tree(tmp_path) == before
        return error

    return run

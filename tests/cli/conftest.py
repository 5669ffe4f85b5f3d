"""A tiny random model, data to train it on, and the command line in this process."""

import json
import random
import shutil

import datasets
import pytest
import torch
from cli_runs import command_line, tree
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
        return main(command_line(model, data, tmp_path / "out", *arguments, **flags))

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    return tmp_path_factory.mktemp("finished") / "out"


@pytest.fixture
def finished(finished_run, train, tmp_path):
    """A run of three updates, with checkpoints after the last two, in the folder that `train` writes to."""
    if not finished_run.exists():
        assert train(output_dir=finished_run, max_steps=3, save_steps=1) == 0
    return shutil.copytree(finished_run, tmp_path / "out")


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

"""A folder for every case, with a tiny model in it."""

import datasets
import pytest
import torch
from model_folder import save_model
from refusals import FEW


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture
def place(tiny_model, tmp_path, monkeypatch):
    """The folder of a case, which is the working folder too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "few.jsonl").write_text(FEW)
    yield tmp_path
    torch.set_num_threads(threads)
    datasets.enable_progress_bars()

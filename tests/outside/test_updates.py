"""An update is the mean over all labels, however rows are dealt out to batches and processes."""

from pathlib import Path

import one_update
import pytest
import torch
from outside_models import assert_close
from safetensors.torch import load_file
from warm import torchrun

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

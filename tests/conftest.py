import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices are faster so; read when torch is imported

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def plain_torch_on_a_cpu(monkeypatch):
    """What a user without a GPU runs; the interpreter, which truncates to bfloat16, is for tests/kernels."""
    monkeypatch.setattr("unsloth_pack.kernels.launch.INTERPRETED", False)

import pytest
import torch
from interpreter import compute_as_hardware


@pytest.fixture(autouse=True)
def plain_torch_on_a_cpu():
    """Not here: without a GPU these run under Triton's interpreter."""


@pytest.fixture(autouse=True)
def poisoned_memory():
    """New memory is NaN, so that what a kernel does not write shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def as_hardware(monkeypatch):
    if torch.cuda.is_available():
        yield
        return
    pytest.importorskip("triton")
    from quick_interpreter import without_repeated_work

    from unsloth_pack.kernels import launch

    assert launch.INTERPRETED
    compute_as_hardware(monkeypatch)
    with without_repeated_work():
        yield


@pytest.fixture(params=["kernel", "plain torch"])
def path(request, monkeypatch):
    """Either way through a chunk of the head's logits; on a GPU the first only."""
    from unsloth_pack.kernels import launch

    if request.param == "plain torch":
        if torch.cuda.is_available():
            pytest.skip("CUDA tensors run on Triton")
        monkeypatch.setattr(launch, "INTERPRETED", False)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 4 rows of logits, whatever the vocabulary."""
    from unsloth_pack.kernels import head

    for name, value in (("_CHUNK_BYTES", 0), ("_MIN_ROWS", 4), ("_STEP", 4)):
        monkeypatch.setattr(head, name, value)

"""The part of the image grid that runs on the package's own attention kernels: without a GPU interpreted."""

import sys

import pytest
from correctness.cases import Case
from correctness.judge import holds
from correctness.measure import measure

from unsloth_pack.attention import choose_backend, why_unavailable

# Each takes 40 seconds in the interpreter. Three axes, ordinary positions, and images in both directions
pytestmark = pytest.mark.nightly
ARCHS = ("qwen3_vl", "internvl", "gemma3")


@pytest.fixture
def asked_anew():
    """Whether a backend can run here: tests of plain torch have got another answer in this process."""
    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()
    yield
    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()


@pytest.fixture
def attention_alone(monkeypatch):
    """The other kernels have tests of their own, and the interpreter is slow."""
    for name, module in list(sys.modules.items()):
        is_other = name.startswith("unsloth_pack.kernels.") and not name.endswith(("attention", "launch"))
        if is_other and hasattr(module, "takes_fused_path"):
            monkeypatch.setattr(module, "takes_fused_path", lambda *_: False)


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_is_as_right_as_each_document_alone(arch, asked_anew, attention_alone):
    uncaptured, captured = measure(Case(arch, "none", "frozen tower", "float32", "triton", "False"))
    assert holds(uncaptured), uncaptured
    assert holds(captured), captured
    assert "logits" in uncaptured

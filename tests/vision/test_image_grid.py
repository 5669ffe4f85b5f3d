"""A part of the grid of models with images on this device, and that the grid sees what is planted."""

import pytest
from correctness.cases import WITH_IMAGES, Case, cases
from correctness.judge import holds
from correctness.measure import measure
from late_parts import late_deepstack, late_windows

from unsloth_pack.attention import BACKENDS

# What `test_packed_images.py` and `test_tiled_images.py` leave out: float16, NF4, other backends, and
# checkpointing as the package does it.
PART = [
    Case(arch, "none", variant, dtype, backend, checkpointing)
    for backend in BACKENDS
    for arch, variant, dtype, checkpointing in (
        ("qwen2_5_vl", "tower", "float16", "False"),
        ("qwen3_vl", "aligner", "nf4", "offload"),
        ("mistral3", "all", "float16", "True"),
        ("gemma3", "frozen tower", "nf4", "auto"),
        ("smolvlm", "aligner", "float16", "auto"),
    )
]


@pytest.mark.parametrize("case", PART, ids=lambda case: "-".join(vars(case).values()))
def test_packed_is_as_right_as_each_document_alone(case):
    rows = measure(case)
    for row in rows:
        assert holds(row), row
    assert "logits" in rows[0] or any(said in rows[0]["refused"] for said in ("bitsandbytes", "attn_backend"))


def test_the_whole_holds_every_combination():
    whole = cases(images=True)
    assert len(whole) == len(set(whole)) == len(WITH_IMAGES) * 4 * 4 * 4 * 4


# What is planted


def failures(arch, variant="frozen tower"):
    row, _ = measure(Case(arch, "none", variant, "float32", "sdpa", "False"))
    return row.get("failed", [])


def assert_seen(arch, monkeypatch):
    monkeypatch.setattr("correctness.judge.NUMBERS_OF_DRAWS", (1,))  # more would only take longer
    said = " ".join(failures(arch))
    assert "logits: " in said
    assert "pixel_values: " in said


@pytest.mark.parametrize("which", [-2, slice(1, -1)], ids=["inside the last image", "all"])
def test_windows_that_end_late(which, monkeypatch):
    assert not failures("qwen2_5_vl")
    late_windows(monkeypatch, which)
    assert_seen("qwen2_5_vl", monkeypatch)


def test_deepstack_a_layer_late(monkeypatch):
    assert not failures("qwen3_vl")
    late_deepstack(monkeypatch)
    assert_seen("qwen3_vl", monkeypatch)

"""A part of the grid of models with images on this device."""

import pytest
from correctness.cases import Case
from correctness.judge import holds
from correctness.measure import measure

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

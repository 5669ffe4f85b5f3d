"""Every case of the correctness grid on this device."""

import pytest
from grid import cases, holds, measure

from unsloth_pack.attention import BACKENDS


@pytest.mark.parametrize(
    "case", cases(), ids=lambda c: f"{c.arch}-{c.dtype}-ckpt{c.checkpointing:d}-{c.window}"
)
def test_packed_is_as_right_as_each_document_alone(case):
    measured = 0
    for backend in BACKENDS:
        result = measure(case, backend)
        if "refused" not in result:
            measured += 1
            assert holds(result), (backend, result)
    assert measured > 0

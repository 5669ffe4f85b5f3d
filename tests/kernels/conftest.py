import numpy as np
import pytest
import torch


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
def round_to_bfloat16(monkeypatch):
    """Triton's interpreter truncates to bfloat16 where the hardware rounds to nearest even: let it round."""
    if torch.cuda.is_available():
        return
    tl = pytest.importorskip("triton.language")
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    truncating = InterpreterBuilder.cast_impl

    def rounding(self, src, dst_type):
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return truncating(self, src, dst_type)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding)

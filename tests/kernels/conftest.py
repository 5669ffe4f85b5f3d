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
def round_as_hardware_does(monkeypatch):
    """To nearest even: Triton's interpreter truncates to bfloat16, and to e4m3 it loses the carry."""
    if torch.cuda.is_available():
        return
    tl = pytest.importorskip("triton.language")
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    right = {
        tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, np.uint8),
    }

    def rounding(wrong):
        def cast(self, src, dst_type, *how):
            if src.dtype.scalar != tl.float32 or dst_type.scalar not in right:
                return wrong(self, src, dst_type, *how)
            dtype, bits, stored = right[dst_type.scalar]
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(dtype)
            return TensorHandle(rounded.view(bits).numpy().view(stored), dst_type.scalar)

        return cast

    for name in ("cast_impl", "create_fp_to_fp"):
        monkeypatch.setattr(InterpreterBuilder, name, rounding(getattr(InterpreterBuilder, name)))


@pytest.fixture(autouse=True)
def multiply_bfloat16_as_hardware_does(monkeypatch):
    """Its values: Triton's interpreter multiplies their bits."""
    if torch.cuda.is_available():
        return
    tl = pytest.importorskip("triton.language")
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    wrong = InterpreterBuilder.create_dot

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self, a, b, *rest):
        return wrong(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


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
    from unsloth_pack.kernels import chunked_head

    for name, value in (("_CHUNK_BYTES", 0), ("_LEAST_ROWS", 4), ("_STEP", 4)):
        monkeypatch.setattr(chunked_head, name, value)

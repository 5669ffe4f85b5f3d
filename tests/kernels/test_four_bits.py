"""Weights in four bits: the bits of bitsandbytes and transformers, in the kernel and in the reference."""

import pytest
import torch
from exactness import DEVICE
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from unsloth_pack.kernels import NestedScales, dequantize_4bit, reference
from unsloth_pack.lora.expert_stacks import mxfp4_stack
from unsloth_pack.lora.quantised import Nf4Weight

functional = pytest.importorskip("bitsandbytes.functional")
pytest.importorskip("triton")


def quantised(n_elements, block, dtype, nested):
    """bitsandbytes' tensors, and what they stand for by bitsandbytes, which compiles nothing for it."""
    x = torch.randn(n_elements) * torch.logspace(-4, 4, n_elements)
    x = x.to(DEVICE, dtype)
    packed, state = functional.quantize_4bit(x, blocksize=block, quant_type="nf4", compress_statistics=nested)
    scales = state.absmax
    if nested:
        outer = state.state2
        scales = NestedScales(scales, outer.code, outer.absmax, state.offset, outer.blocksize)
    with torch.compiler.set_stance("force_eager"):
        expected = functional.dequantize_4bit(packed, state)
    return (packed.view(-1), state.code, scales, block, dtype), expected.view(-1)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("n_blocks", "block"), [(1, 64), (300, 64), (64, 32), (3, 4096)])
def test_the_same_bits_as_by_bitsandbytes(n_blocks, block, dtype, nested):
    given, expected = quantised(n_blocks * block, block, dtype, nested)
    assert torch.equal(dequantize_4bit(*given), expected)
    assert torch.equal(reference.dequantize_4bit(*given), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_byte_with_every_scale_of_mxfp4_is_what_transformers_unpacks(path, dtype):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)  # 255 is NaN, refused
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    got = mxfp4_stack(blocks.to(DEVICE), scales.to(DEVICE), dtype).dequantized(dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(got.cpu().contiguous().view(bits), expected.view(bits))


@pytest.mark.gpu
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (3, 192), (5, 33)], ids=str)
def test_a_weight_of_bitsandbytes_on_a_gpu(shape, nested):
    """Rows may be no whole blocks, and the last block may be incomplete."""
    weight = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
    for dtype in (torch.bfloat16, torch.float32):
        expected = functional.dequantize_4bit(packed, state).to(dtype)
        assert torch.equal(Nf4Weight(packed, state).dequantized(dtype), expected)


def test_what_lies_behind_the_result_stays(monkeypatch):
    given, expected = quantised(5 * 64, 64, torch.float32, False)
    arena = torch.full((1000,), 7.0, device=DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda n, **_: arena[:n])
        got = dequantize_4bit(*given)
    assert torch.equal(got, expected)
    assert got.data_ptr() == arena.data_ptr()
    assert (arena[len(got) :] == 7).all()

"""fp8 rows against float64: every element within half a step of e4m3, the GEMMs within their rounding."""

import pytest
import torch
from exactness import DEVICE

from unsloth_pack.kernels import Fp8Rows, fp8_linear, fp8_linear_backward, quantize_rows, reference
from unsloth_pack.kernels.fp8 import _transposed

pytest.importorskip("triton")
HAS_FP8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="the GPU has no e4m3")


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (3, 1000), (33, 4096)], ids=str)
def test_every_element_is_within_half_a_step(shape, dtype):
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(DEVICE, dtype)
    rows = quantize_rows(x)
    assert rows.values.dtype == torch.float8_e4m3fn
    exact = x.double()
    scale = exact.abs().amax(dim=1, keepdim=True) / 448
    torch.testing.assert_close(rows.scale.double(), scale, rtol=1e-6, atol=0)
    # e4m3 has 3 bits after the point and steps of 2**-9 below 2**-6; and a hair for the scale itself.
    step = torch.maximum(exact.abs() / scale * 2**-3, torch.full_like(exact, 2**-9))
    error = (rows.dequantized(torch.float64) - exact).abs() / scale
    assert (error <= 0.5001 * step).all()


@needs_fp8
def test_the_kernel_gives_the_reference(monkeypatch):
    x = torch.randn(9, 200, device=DEVICE)
    column_scale = torch.rand(200, 1, device=DEVICE) + 0.1
    for columns in (None, column_scale):
        values, scale = reference.quantize_rows(x, columns)
        rows = quantize_rows(x, columns)
        torch.testing.assert_close(rows.scale, scale, rtol=1e-6, atol=0)
        same = (rows.values.float() == values.float()).float().mean()
        assert same > 0.99  # a quotient on the edge of two values may fall to either side


@needs_fp8
def test_rows_of_zeros_and_strided_rows():
    x = torch.randn(8, 64, device=DEVICE)
    x[3] = 0
    wide = torch.cat([x, x], dim=1)[:, :64]
    assert torch.equal(quantize_rows(wide).values.float(), quantize_rows(x).values.float())
    assert not quantize_rows(x).dequantized(torch.float32)[3].any()


@needs_fp8
@pytest.mark.parametrize(("n", "i", "o"), [(1, 16, 32), (33, 64, 48), (130, 256, 512)])
def test_the_products_are_those_of_the_quantised_matrices(n, i, o):
    x, g = (torch.randn(n, c).to(DEVICE, torch.bfloat16) for c in (i, o))
    weight = quantize_rows(torch.randn(o, i).to(DEVICE, torch.bfloat16))
    x_rows = quantize_rows(x)
    exact = x_rows.dequantized(torch.float64) @ weight.dequantized(torch.float64).t()
    _close_for_bfloat16(fp8_linear(x_rows, weight, torch.bfloat16), exact)

    g_rows = Fp8Rows(*reference.quantize_rows(g, weight.scale))
    exact = g_rows.dequantized(torch.float64) @ weight.values.double()
    _close_for_bfloat16(fp8_linear_backward(g, weight), exact, slack=0.02)


def _close_for_bfloat16(out, exact, slack=0.01):
    error = (out.double() - exact).norm() / exact.norm()
    assert error < slack, error


@pytest.mark.gpu
@needs_fp8
@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (1024, 4096)], ids=str)
def test_a_transposed_matrix(shape):
    values = torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn)
    assert torch.equal(_transposed(values).float(), values.float().t())

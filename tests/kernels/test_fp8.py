"""fp8 rows against float64: every element within half a step of e4m3, the GEMMs within their rounding."""

import pytest
import torch
from exactness import DEVICE

from unsloth_pack.kernels import (
    Fp8Rows,
    fp8_linear,
    fp8_linear_backward,
    fp8_transposed,
    quantize_rows,
    reference,
)

pytest.importorskip("triton")
HAS_FP8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="the GPU has no e4m3")
GROUPS = [(32,), (48, 16, 16), (192, 192), (16, 80)]  # outputs of the layers over one input


def _within_half_a_step(rows, exact):
    assert rows.values.dtype == torch.float8_e4m3fn
    scale = exact.abs().amax(dim=1, keepdim=True) / 448
    torch.testing.assert_close(rows.scale.double(), scale, rtol=1e-6, atol=0)
    # e4m3 has 3 bits after the point and steps of 2**-9 below 2**-6; and a hair for the scale itself.
    step = torch.maximum(exact.abs() / scale * 2**-3, torch.full_like(exact, 2**-9))
    error = (rows.dequantized(torch.float64) - exact).abs() / scale
    assert (error <= 0.5001 * step).all()


@needs_fp8
@pytest.mark.parametrize("widths", [(1000, 48), (4096, 1024, 1024), (16, 16, 16, 16, 3)], ids=str)
@pytest.mark.parametrize("is_scaled", [True, False])
def test_parts_side_by_side_share_a_scale(widths, is_scaled):
    parts = [
        torch.randn(5, width).to(DEVICE, torch.bfloat16) * 10.0 ** (i % 3) for i, width in enumerate(widths)
    ]
    column_scales = [(torch.rand(width, 1) + 0.1).to(DEVICE) for width in widths] if is_scaled else None
    exact = torch.cat(parts, dim=1).double()
    if is_scaled:
        exact = exact * torch.cat(column_scales).t().double()
    _within_half_a_step(quantize_rows(*parts, column_scales=column_scales), exact)


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (3, 1000), (70, 520)], ids=str)
def test_what_they_stand_for_is_rounded_once(shape, dtype):
    rows = quantize_rows(
        torch.randn(shape, device=DEVICE) * torch.logspace(-3, 3, shape[0], device=DEVICE)[:, None]
    )
    exact = rows.values.double() * rows.scale.double()
    assert torch.equal(rows.dequantized(dtype), exact.float().to(dtype))
    assert torch.equal(rows.dequantized(torch.float64), exact.float().double())


@needs_fp8
@pytest.mark.parametrize(("n", "i", "o"), [(1, 16, 32), (33, 64, 48), (130, 256, 512)])
def test_the_product_is_that_of_the_quantised_matrices(n, i, o):
    x = _rows(n, i)
    weight, x_rows = quantize_rows(_rows(o, i)), quantize_rows(x)
    exact = x_rows.dequantized(torch.float64) @ weight.dequantized(torch.float64).t()
    out = x.new_empty(n, o)
    assert fp8_linear(x_rows, weight, out) is out
    _close_for_bfloat16(out, exact)


@needs_fp8
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize(("n", "i"), [(1, 16), (33, 64), (130, 256)])
def test_the_gradient_is_that_of_the_quantised_matrices(group, n, i):
    gs, weights = [_rows(n, o) for o in group], [quantize_rows(_rows(o, i)) for o in group]
    scales = [weight.scale for weight in weights]
    g_rows = Fp8Rows(*reference.quantize_rows(*gs, column_scales=scales))
    values = torch.cat([weight.values.double() for weight in weights])
    out = gs[0].new_empty(n, i)
    assert fp8_linear_backward(gs, fp8_transposed(weights), out) is out
    _close_for_bfloat16(out, g_rows.dequantized(torch.float64) @ values, slack=0.02)


def _rows(n, c):
    return torch.randn(n, c).to(DEVICE, torch.bfloat16)


def _close_for_bfloat16(out, exact, slack=0.01):
    assert (out.double() - exact).norm() < slack * exact.norm()


@needs_fp8
@pytest.mark.parametrize(
    ("heights", "width"), [((16,), 16), ((48,), 80), ((80, 16, 64), 48), ((1024, 256), 208)]
)
def test_transposed_matrices_side_by_side(heights, width):
    weights = [
        Fp8Rows(torch.randn(height, width, device=DEVICE).to(torch.float8_e4m3fn), torch.rand(height, 1))
        for height in heights
    ]
    expected = torch.cat([weight.values.float() for weight in weights]).t()
    values = fp8_transposed(weights).values
    assert values.is_contiguous()
    assert torch.equal(values.float(), expected)

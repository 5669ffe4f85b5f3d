"""Layers in fp8 inside the fused nodes: one GEMM back to an input that several share, in tiles or not.

On a CPU by the oracles, which round as the kernels do. What is judged is all but that rounding.
"""

from itertools import product

import pytest
import torch
from tiny import random_documents, run_packed, tiny_model

from unsloth_pack import patch_model
from unsloth_pack.kernels import quantize_rows
from unsloth_pack.lora import arithmetic, mlp
from unsloth_pack.lora.quantised import quantize_to_fp8

LENGTHS = [33, 2, 64, 1]
ROWS, WIDTH, RANK = 37, 48, 4
OUTPUTS = (32, 16, 48)
KINDS = list(product(["fp8", "dense"], repeat=3))


def group(kinds, dropping):
    """A, and layers over one input: some in fp8, some with a bias, and where asked some with dropout."""
    generator = torch.Generator().manual_seed(0)
    frozen, tensors = [], []
    for number, (kind, o) in enumerate(zip(kinds, OUTPUTS, strict=True)):
        weight = torch.randn(o, WIDTH, generator=generator)
        seed = torch.tensor([7 + number]) if dropping and number < 2 else None
        weight = quantize_rows(weight) if kind == "fp8" else weight
        frozen.append(arithmetic.Layer(weight, 0.5 + number, 0.3 if seed is not None else 0.0, seed))
        bias = torch.randn(o, generator=generator) if number != 1 else None
        a, b = (torch.randn(*shape, generator=generator) for shape in ((RANK, WIDTH), (o, RANK)))
        tensors += [bias, a, b]
    return arithmetic.stack_layers(torch.float32, frozen, tensors)


def exact_weight(kind, p):
    return p.weight.dequantized(torch.float64) if kind == "fp8" else p.weight.double()


def assert_exact(got, expected):
    assert (got.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
def test_outputs_against_float64(kinds, dropping, is_given):
    a_RI, layers = group(kinds, dropping)
    x = torch.randn(ROWS, WIDTH)
    into = [torch.full((ROWS, o), torch.nan) for o in OUTPUTS] if is_given else None
    outputs, _ = arithmetic.forward(x, a_RI, layers, 5, into)
    assert into is None or all(y is out for y, out in zip(outputs, into, strict=True))
    bases, h = arithmetic.forward_base(x, a_RI, layers, 5)
    for y, base, kind, p in zip(outputs, bases, kinds, layers, strict=True):
        read = quantize_rows(x).dequantized(torch.float64) if kind == "fp8" else x.double()
        expected = read @ exact_weight(kind, p).t() + (0 if p.bias is None else p.bias.double())
        assert_exact(base, expected)
        h_Nr = p.apply_dropout(x, 5).double() @ a_RI[p.ranks].double().t()
        assert_exact(h[:, p.ranks], h_Nr)
        assert_exact(y, expected + p.scaling * h_Nr @ p.b_Or.double().t())


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
def test_the_gradient_of_the_input_against_float64(kinds, dropping, is_given):
    a_RI, layers = group(kinds, dropping)
    gs = [torch.randn(ROWS, o) for o in OUTPUTS]
    gh = arithmetic.backward_to_ranks(gs, a_RI, layers)
    in_fp8 = [(g, p) for g, p, kind in zip(gs, layers, kinds, strict=True) if kind == "fp8"]
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    if in_fp8:
        rows = quantize_rows(*(g for g, _ in in_fp8), column_scales=[p.weight.scale for _, p in in_fp8])
        expected += rows.dequantized(torch.float64) @ torch.cat([p.weight.values.double() for _, p in in_fp8])
    for g, kind, p in zip(gs, kinds, layers, strict=True):
        if kind == "dense":
            expected += g.double() @ p.weight.double()
        p.apply_dropout((gh[:, p.ranks].double() @ a_RI[p.ranks].double()), 5, add_to=expected)
    into = torch.full((ROWS, WIDTH), torch.nan) if is_given else None
    columns = arithmetic.transpose_fp8(layers) if is_given else None
    got = arithmetic.backward_to_input(gs, gh, a_RI, layers, 5, into, columns)
    assert into is None or got is into
    assert_exact(got, expected)


def in_fp8(arch="llama", dropout=0.0):
    model = tiny_model(arch, torch.float32, "cpu", lora={"lora_dropout": dropout})
    quantize_to_fp8(model.get_base_model().get_decoder().layers)
    patch_model(model, "sdpa")
    return model


def outcome(model):
    torch.manual_seed(0)
    return run_packed(model, random_documents(LENGTHS))


def assert_alike(got, expected, atol=1e-6):
    torch.testing.assert_close(got.loss, expected.loss)
    assert got.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        torch.testing.assert_close(got.grads[name], grad, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("arch", ["llama", "phi3"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_tiles_give_what_the_whole_does(monkeypatch, arch, dropout):
    """Every row is quantised by itself. One that is on the edge of two values may fall to either side."""
    expected = outcome(in_fp8(arch, dropout))
    monkeypatch.setattr(mlp, "_tiles", lambda n, *_: [slice(s, s + 32) for s in range(0, n, 32)])
    assert_alike(outcome(in_fp8(arch, dropout)), expected)

"""Every backend over rows that branch, by its own kernels or by those of a backend that takes such rows."""

from dataclasses import replace

import pytest
import torch
from tiny import DEVICE, error
from written_out import BRANCHED_OPTIONS, FORESTS, written_out_by_path

from unsloth_pack.attention import BACKENDS, AttentionNeed, AttentionOptions, attend, why_unavailable
from unsloth_pack.packed_row.row import PackedRow


def assert_right(lengths, parent, options, name, dtype=torch.float64, size=16, slack=None):
    """Judge output and gradients by every path alone in float64, against their errors in `dtype`."""
    torch.manual_seed(0)
    row = PackedRow.of_lengths(lengths, torch.device(DEVICE), parent)
    tensors = [torch.randn(row.n_tokens, heads, size).to(DEVICE, dtype) for heads in (4, 2, 2, 4)]

    def both(function, dtype):
        *qkv, grad = (x.detach().to(dtype).requires_grad_() for x in tensors)
        out = function(*qkv)
        return [x.detach().double() for x in (out, *torch.autograd.grad(out, qkv, grad.detach()))]

    def alone(*qkv):
        return written_out_by_path(*qkv, lengths, parent, options)

    ours, truth = both(lambda *qkv: attend(*qkv, row, options, name), dtype), both(alone, torch.float64)
    limits = [1e-12] * 4
    if slack is not None:
        limits = [slack * error(p, t) for p, t in zip(both(alone, dtype), truth, strict=True)]
    for what, x, t, limit in zip(("out", "q", "k", "v"), ours, truth, limits, strict=True):
        assert error(x, t) <= limit, (name, what)


def test_a_backend_that_knows_no_branches_leaves_them_to_another(monkeypatch):
    xformers = replace(BACKENDS["xformers"], why_unavailable=lambda need: None, needs_trial=False)
    monkeypatch.setitem(BACKENDS, "xformers", xformers)
    assert_right(*FORESTS["deep"], BRANCHED_OPTIONS["softcap and window"], "xformers")


@pytest.mark.parametrize("options", BRANCHED_OPTIONS.values(), ids=BRANCHED_OPTIONS)
@pytest.mark.parametrize("forest", ["one level", "deep"])
def test_triton_attends_over_a_row_that_branches(forest, options, interpreted):
    assert_right(*FORESTS[forest], options, "triton", torch.float32, slack=2)


# One prefix shorter than a tile and one past several, with branches of many lengths, and a document
ON_A_GPU = (1000, 500, 3, 129, 500, 70, 33, 1, 65, 700), (-1, 0, 0, 0, 0, -1, 5, 5, 5, -1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_backends_attend_over_a_row_that_branches(window, head_dim, dtype):
    options = AttentionOptions(head_dim**-0.5, window)
    need = AttentionNeed(DEVICE, dtype, head_dim, options)
    names = [name for name in BACKENDS if why_unavailable(name, need) is None]
    assert {"triton", "sdpa"} <= {*names}
    for name in names:
        assert_right(*ON_A_GPU, options, name, dtype, head_dim, slack=4 if dtype == torch.float32 else 1.5)

"""Every backend over rows that branch, by its own kernels or with the keys of each branch laid out."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_attention import interpreted  # noqa: F401
from test_branches import FORESTS, OPTIONS, written_out_by_path
from tiny import DEVICE, error

from unsloth_pack.attention import BACKENDS, AttentionNeed, AttentionOptions, attend, flash, why_unavailable
from unsloth_pack.attention.branches import BranchKeys
from unsloth_pack.attention.flash import VarlenKernel
from unsloth_pack.packed_row.row import PackedRow

WITH_WINDOWS = OPTIONS | {"window of its own key": AttentionOptions(0.2, window=1)}


def written_out_to_keys(q_QHD, k_MKD, v_MKD, lengths, key_lengths, options):
    """Causal attention to other keys by its definition: the last query of a segment faces the last key."""
    groups, outs = q_QHD.shape[1] // k_MKD.shape[1], []
    parts = (x.split(sizes) for x, sizes in ((q_QHD, lengths), (k_MKD, key_lengths), (v_MKD, key_lengths)))
    for q, k, v in zip(*parts, strict=True):
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * options.scale
        if options.softcap is not None:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        keys = torch.arange(len(k), device=q.device)
        age = keys[len(k) - len(q) :, None] - keys[None, :]
        hidden = (age < 0) | (age >= (options.window or len(k)))
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)


def plain(
    q, k, v, cu_q, cu_k, longest_q, longest_k, *, softmax_scale, causal, window_size, softcap, dropout_p
):
    """As flash-attn 2 takes its options."""
    lengths, key_lengths = (cu.diff().tolist() for cu in (cu_q, cu_k))
    assert (longest_q, longest_k) == (max(lengths), max(key_lengths))
    assert causal
    window = None if window_size[0] < 0 else window_size[0] + 1
    options = AttentionOptions(softmax_scale, window, softcap or None)
    return written_out_to_keys(q, k, v, lengths, key_lengths, options)


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


@pytest.fixture
def plain_flash(monkeypatch):
    kernel = VarlenKernel("plain", plain)
    monkeypatch.setattr(flash, "varlen_kernel", lambda head_dim, options: kernel)
    monkeypatch.setitem(
        BACKENDS,
        "plain flash",
        replace(BACKENDS["flash"], why_unavailable=lambda need: None, needs_trial=False),
    )


@pytest.mark.parametrize("options", WITH_WINDOWS.values(), ids=WITH_WINDOWS)
@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
def test_a_varlen_kernel_gets_the_keys_of_every_branch(forest, options, plain_flash):
    assert_right(*forest, options, "plain flash")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("forest", ["one level", "deep"])
def test_triton_attends_over_a_row_that_branches(forest, options, interpreted):  # noqa: F811
    assert_right(*FORESTS[forest], options, "triton", torch.float32, slack=2)


def test_a_window_as_long_as_the_longest_path_is_none(interpreted, monkeypatch):  # noqa: F811
    """Every path of this forest is longer than every segment."""
    windows = []
    monkeypatch.setattr(
        "unsloth_pack.attention.triton_varlen.varlen_attention",
        lambda *_, window, **more: windows.append(window),
    )
    row = PackedRow.of_lengths((5, 3, 4, 2), torch.device(DEVICE), (-1, 0, 1, 0))
    for window in (5, 11, 12, 13):
        q = torch.zeros(14, 1, 16, device=DEVICE)
        BACKENDS["triton"].attend(q, q, q, row, AttentionOptions(0.1, window=window))
    assert windows == [5, 11, None, None]


def test_gradients_of_many_copies_add_up_in_float32():
    """In bfloat16 a sum of ones stays at 256."""
    row = PackedRow.of_lengths((1, *[1] * 400), torch.device(DEVICE), (-1, *[0] * 400))
    keys = BranchKeys.from_row(row, None)
    x = torch.randn(row.n_tokens, 1, 4, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    keys.gather(x).sum().backward()
    assert x.grad[:, 0, 0].tolist() == [torch.tensor(401.0).bfloat16().item(), *[1.0] * 400]


@pytest.mark.parametrize("options", [AttentionOptions(0.3), AttentionOptions(0.3, window=6, dropout=0.1)])
def test_xformers_is_told_the_keys_of_every_branch(options, monkeypatch):
    class Mask:
        """That of the bottom right: the last query of a block faces its last key."""

        def __init__(self, lengths, key_lengths, window=None):
            self.lengths, self.key_lengths, self.window = lengths, key_lengths, window

        @classmethod
        def from_seqlens(cls, q_seqlen, kv_seqlen, device):
            return cls(q_seqlen, kv_seqlen)

        def make_local_attention_from_bottomright(self, window):
            return Mask(self.lengths, self.key_lengths, window)

    def memory_efficient_attention(q, k, v, attn_bias, p, scale):
        assert p == options.dropout
        meant = AttentionOptions(scale, attn_bias.window)
        return written_out_to_keys(q[0], k[0], v[0], attn_bias.lengths, attn_bias.key_lengths, meant)[None]

    others = dict.fromkeys(("BlockDiagonalCausalMask", "BlockDiagonalMask"))
    bias = SimpleNamespace(BlockDiagonalCausalFromBottomRightMask=Mask, **others)
    ops = SimpleNamespace(memory_efficient_attention=memory_efficient_attention)
    modules = {"": SimpleNamespace(ops=ops), ".ops": ops, ".ops.fmha": bias, ".ops.fmha.attn_bias": bias}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"xformers{name}", module)
    backend = replace(BACKENDS["xformers"], why_unavailable=lambda need: None, needs_trial=False)
    monkeypatch.setitem(BACKENDS, "plain xformers", backend)
    assert_right(*FORESTS["deep"], options, "plain xformers")


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


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_flash_kernel_takes_the_keys_of_branches(head_dim, monkeypatch):
    options, here = AttentionOptions(head_dim**-0.5, window=300), torch.cuda.get_device_capability()
    kernels = [k for k in flash._kernels() if k.capability <= here and k.serves(head_dim, options)]
    assert kernels
    for kernel in kernels:
        monkeypatch.setattr(flash, "varlen_kernel", lambda *_, kernel=kernel: kernel)
        for tried in (options, replace(options, window=None)):
            assert_right(*ON_A_GPU, tried, "flash", torch.bfloat16, head_dim, slack=1.5)

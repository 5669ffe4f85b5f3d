"""Every backend that runs here against attention written out document by document in float64."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from largest import Largest
from tiny import DEVICE, error, tiny_config, tiny_model
from written_out import written_out

from unsloth_pack import patch_model, supported_architectures
from unsloth_pack.attention import (
    BACKENDS,
    AttentionNeed,
    AttentionOptions,
    attend,
    backends,
    choose_backend,
    flash,
    why_unavailable,
)
from unsloth_pack.attention.flash import VarlenKernel, flash_attn_4, refuse_int32_overflow
from unsloth_pack.errors import BackendUnavailable, InputError
from unsloth_pack.layers.mixers import MIXERS
from unsloth_pack.packed_row.row import PackedRow
from unsloth_pack.patching.parts import mixers_by_layer
from unsloth_pack.run.validate import check_backend

ROWS = {
    "mixed": (1, 2, 31, 32, 33, 127, 128, 129),
    "one document": (300,),
    "many short": tuple(1 + i % 3 for i in range(200)),
    "past the window's block": (700, 5, 600),
    "as long as the window and one longer": (7, 7, 8),
}
OPTIONS = {
    "plain": AttentionOptions(scale=0.2),
    "window": AttentionOptions(scale=0.2, window=7),
    "long window": AttentionOptions(scale=0.2, window=300),
    "softcap": AttentionOptions(scale=0.5, softcap=2.0),
    "softcap and window": AttentionOptions(scale=0.5, softcap=2.0, window=7),
}
BOTH_WAYS = {
    "both ways": AttentionOptions(scale=0.2, causal=False),
    "softcap and both ways": AttentionOptions(scale=0.5, softcap=2.0, causal=False),
}
DTYPES = [torch.float32, torch.bfloat16]


def output_and_gradients(function, tensors, grad):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    out.backward(grad)
    return [x.detach().double().cpu() for x in (out, *(leaf.grad for leaf in leaves))]


def backends_that_can(dtype, head_dim, options):
    need = AttentionNeed(DEVICE, dtype, head_dim, options)
    return [name for name in BACKENDS if why_unavailable(name, need) is None]


def assert_no_less_exact(lengths, options, sizes, dtype, runs):
    """Judge output and gradients by attention written out in float64, against its errors in `dtype`.

    Args:
        sizes: heads and head size of q, k and v.
        runs: by name, a function of q, k, v and the row, and the slack.
    """
    torch.manual_seed(0)
    n = sum(lengths)
    tensors = [torch.randn(n, *size).to(dtype) for size in sizes]
    grad = torch.randn(n, sizes[0][0], sizes[2][1]).to(dtype)
    truth = output_and_gradients(
        lambda *x: written_out(*x, lengths, options), [x.double() for x in tensors], grad.double()
    )
    on_device, grad = [x.to(DEVICE) for x in tensors], grad.to(DEVICE)
    yardstick = output_and_gradients(lambda *x: written_out(*x, lengths, options), on_device, grad)
    row = PackedRow.of_lengths(lengths, torch.device(DEVICE))
    for name, (function, slack) in runs.items():
        got = output_and_gradients(lambda *x, function=function: function(*x, row), on_device, grad)
        for what, g, p, t in zip(["out", "q", "k", "v"], got, yardstick, truth, strict=True):
            assert g.shape == t.shape
            assert error(g, t) <= slack * error(p, t), (name, what)


def by_backend(name, options, slack):
    return lambda *x: attend(*x, options, name), slack


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", (OPTIONS | BOTH_WAYS).values(), ids=OPTIONS | BOTH_WAYS)
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_a_backend_computes_attention_by_its_definition(lengths, options, dtype):
    names = backends_that_can(dtype, 32, options)
    assert "sdpa" in names
    slack = 4 if dtype == torch.float32 else 1.5  # in float32 each rounds at other places
    runs = {name: by_backend(name, options, slack) for name in names}
    assert_no_less_exact(lengths, options, [(4, 32), (2, 32), (2, 32)], dtype, runs)


@pytest.mark.every_architecture
@pytest.mark.parametrize("arch", supported_architectures())
def test_a_config_tells_the_head_sizes_of_its_layers(arch):
    """As `train` asks for them, before it loads a model."""
    spec = supported_architectures()[arch]
    config = tiny_config(spec.model_type)
    decoder = tiny_model(arch, device="cpu").get_base_model().get_decoder()
    attentions = [one for kind, one in mixers_by_layer(decoder, spec) if kind is MIXERS[spec.attention]]
    sizes = set()
    for attention in attentions:
        size = getattr(attention, "qk_head_dim", None) or attention.head_dim
        out = getattr(attention, spec.name("o_proj"))
        sizes.add((size, out.in_features // config.num_attention_heads))
    assert spec.head_sizes(config) == sizes
    check_backend("auto", config, torch.float32, "cpu")


def padding_backend():
    """SDPA as a backend that takes one head size for q, k and v."""

    def attend_same_sizes(q, k, v, *rest):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        return BACKENDS["sdpa"].attend(q, k, v, *rest)

    return replace(BACKENDS["sdpa"], attend=attend_same_sizes, takes_other_v=False)


@pytest.mark.parametrize("sizes", [(24, 16), (16, 24)], ids=str)
def test_values_may_have_another_head_size(sizes, monkeypatch, interpreted):
    """By every backend that can, and by padding with zeros."""
    monkeypatch.setitem(BACKENDS, "padded", padding_backend())
    lengths, options, (size, size_of_v) = (1, 2, 33, 70), OPTIONS["plain"], sizes
    need = AttentionNeed(DEVICE, torch.float32, size, options, size_of_v)
    names = [name for name in BACKENDS if why_unavailable(name, need) is None]
    assert {"sdpa", "padded", "triton"} <= set(names)
    runs = {name: by_backend(name, options, 4) for name in names}
    assert_no_less_exact(lengths, options, [(4, size), (2, size), (2, size_of_v)], torch.float32, runs)


WITH_TRITON = OPTIONS | {"window of all but one": AttentionOptions(scale=0.2, window=128)}


@pytest.mark.parametrize("options", WITH_TRITON.values(), ids=WITH_TRITON)
def test_triton_computes_attention_by_its_definition(options, interpreted):
    """In float32, where it rounds logits once more than plain attention, into units of ln 2."""
    runs = {"triton": by_backend("triton", options, 2)}
    assert_no_less_exact((1, 2, 33, 129), options, [(2, 32), (1, 32), (1, 32)], torch.float32, runs)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "options", "name", "why"),
    [
        ((9, 0), torch.bfloat16, 128, {}, "triton", "fastest of all"),
        ((9, 0), torch.bfloat16, 256, {}, "flash", "triton: .* up to 128 on Hopper .*, through old"),
        ((9, 0), torch.bfloat16, 64, {"dropout": 0.1}, "flash", "triton: it has no attention dropout"),
        (
            (9, 0),
            torch.float32,
            64,
            {},
            "sdpa",
            "flash: it computes in float16 and bfloat16, not torch.float32",
        ),
        ((7, 5), torch.bfloat16, 64, {}, "sdpa", "flash: it needs compute capability 8.0"),
        ((8, 0), torch.bfloat16, 60, {}, "sdpa", "its head size is a multiple of 8 up to 256, not 60"),
        ((8, 0), torch.bfloat16, 256, {"softcap": 50.0}, "flash", "old has the softcap too"),
    ],
)
def test_what_auto_takes_and_why(capability, dtype, head_dim, options, name, why, kernels, monkeypatch):
    pytest.importorskip("triton")
    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()
    kernels[0] = capability
    monkeypatch.setattr(flash, "KERNELS", flash.KERNELS[2:])  # without the one that is made for Hopper
    monkeypatch.setattr(backends, "_try_tiny_step", lambda backend, need: None)
    monkeypatch.setitem(sys.modules, "xformers", None)
    need = AttentionNeed("cuda", dtype, head_dim, AttentionOptions(0.1, **options))
    chosen, reason = choose_backend("auto", need)
    assert chosen == name
    assert re.search(why, reason), reason
    for cached in (why_unavailable, choose_backend):
        cached.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 24, 40, 64, 80, 96, 128, 160, 192, 256])
def test_every_flash_kernel_is_right_with_the_heads_it_serves(head_dim):
    """flash-attn 4 is not taken for the head sizes with which its gradients cross documents."""
    lengths, options = (*ROWS["mixed"], 500, *[7] * 20), AttentionOptions(head_dim**-0.5, window=100)
    here = torch.cuda.get_device_capability()
    kernels = [k for k in flash._kernels() if k.capability <= here and k.serves(head_dim, options)]
    assert kernels
    runs = {kernel.name: (lambda *x, k=kernel: k.call(*x, options), 1.5) for kernel in kernels}
    sizes = [(4, head_dim), (2, head_dim), (2, head_dim)]
    assert_no_less_exact(lengths, options, sizes, torch.bfloat16, runs)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["softcap and window"]], ids=str)
def test_flash_attn_4_is_told_what_the_options_mean(options, monkeypatch):
    """Its fourth argument is not `cu_seqlens`; a left bound of -1 hides every key if a right one is given."""
    lengths = (5, 33, 20)

    def flash_attn_varlen_func(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, **given):
        assert qv is None
        assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist() == [0, 5, 38, 58]
        assert given["max_seqlen_q"] == given["max_seqlen_k"] == 33
        assert given["causal"]
        assert isinstance(given["softcap"], float)  # flash-attn 2 takes no None
        before, after = given["window_size"]
        assert (before, after) == (None, None) or (before >= 0 and after == 0)
        window = None if before is None else before + 1
        meant = AttentionOptions(given["softmax_scale"], window, given["softcap"] or None)
        return written_out(q, k, v, lengths, meant), None

    module = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    torch.manual_seed(0)
    tensors = [torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2)]
    row = PackedRow.of_lengths(lengths, torch.device("cpu"))
    kernel = flash_attn_4()
    out = kernel.call(*tensors, row, options)
    assert torch.equal(out, written_out(*tensors, lengths, options))
    assert "softcap" in kernel.options
    assert "dropout_p" not in kernel.options


@pytest.mark.parametrize("options", [OPTIONS["window"], AttentionOptions(0.3, dropout=0.1)])
def test_xformers_is_told_what_the_options_mean(options, monkeypatch):
    class Mask:
        def __init__(self, lengths, window=None):
            self.lengths, self.window = lengths, window

        @classmethod
        def from_seqlens(cls, lengths, device):
            return cls(lengths)

        def make_local_attention(self, window):
            assert window is not None
            return Mask(self.lengths, window)

    def memory_efficient_attention(q, k, v, attn_bias, p, scale):
        assert q.shape == k.shape == v.shape  # its backward pass takes no grouped heads
        assert p == options.dropout
        meant = AttentionOptions(scale, attn_bias.window)
        return written_out(q[0], k[0], v[0], attn_bias.lengths, meant)[None]

    bias = SimpleNamespace(BlockDiagonalCausalMask=Mask, BlockDiagonalMask=Mask)
    ops = SimpleNamespace(memory_efficient_attention=memory_efficient_attention)
    modules = {"": SimpleNamespace(ops=ops), ".ops": ops, ".ops.fmha": bias, ".ops.fmha.attn_bias": bias}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"xformers{name}", module)
    lengths = (5, 33, 20)
    torch.manual_seed(0)
    tensors = [torch.randn(sum(lengths), heads, 8) for heads in (4, 2, 2)]
    row = PackedRow.of_lengths(lengths, torch.device("cpu"))
    assert torch.equal(
        flash.attend_by_xformers(*tensors, row, options), written_out(*tensors, lengths, options)
    )
    huge = torch.empty(2**17, 128, 256, device="meta")
    with pytest.raises(InputError, match="32-bit index"):
        flash.attend_by_xformers(huge, huge, huge, row, options)


@pytest.mark.parametrize("window", [None, 40])
def test_softcapped_logits_of_a_long_document_exist_by_blocks(window, monkeypatch):
    monkeypatch.setattr("unsloth_pack.attention.sdpa._EAGER_BLOCK", 32)
    lengths, options = (500, 3, 33), AttentionOptions(0.5, window=window, softcap=2.0)
    row = PackedRow.of_lengths(lengths, torch.device("cpu"))
    torch.manual_seed(0)
    tensors = [torch.randn(sum(lengths), heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    grad = torch.randn(sum(lengths), 4, 8, dtype=torch.float64)
    truth = output_and_gradients(lambda *x: written_out(*x, lengths, options), tensors, grad)
    with Largest() as largest:
        got = output_and_gradients(lambda *x: attend(*x, row, options, "sdpa"), tensors, grad)
    for g, t in zip(got, truth, strict=True):
        assert error(g, t) < 1e-12
    of_logits = 4 * 32 * (500 if window is None else 32 + window)
    assert largest.elements <= max(of_logits, tensors[0].numel())


def test_blocks_draw_the_same_dropout_in_the_backward_pass(monkeypatch):
    """The output is linear in v: the gradient has the weights that the forward pass had."""
    monkeypatch.setattr("unsloth_pack.attention.sdpa._EAGER_BLOCK", 32)
    options = AttentionOptions(0.5, softcap=2.0, dropout=0.3)
    row = PackedRow.of_lengths((100, 7), torch.device("cpu"))
    q, k, v, grad = (torch.randn(107, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    v.requires_grad_()
    out = attend(q, k, v, row, options, "sdpa")
    (dv,) = torch.autograd.grad(out, v, grad)
    assert torch.allclose((out * grad).sum(), (v * dv).sum(), rtol=1e-12)


def fast(q, k, v, *cu_seqlens_and_longest, softmax_scale, causal, window_size):
    """As flash-attn 3 takes its options: no softcap, no dropout."""


def slow(q, k, v, *cu_seqlens_and_longest, softmax_scale, causal, window_size, softcap, dropout_p):
    """As flash-attn 2 does."""


@pytest.fixture
def kernels(monkeypatch):
    """Two kernels instead of flash's; caches about kernels are cleared before and after."""

    def missing():
        raise ImportError

    new = VarlenKernel("new", fast, capability=(9, 0), head_dims=(64, 128))
    old = VarlenKernel("old", slow)
    monkeypatch.setattr(flash, "KERNELS", (missing, lambda: new, lambda: old))
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[0])
    caches = (flash.varlen_kernel, flash._kernels)
    for cache in caches:
        cache.cache_clear()
    yield capability
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("head_dim", "options", "capability", "expected"),
    [
        (64, {}, (9, 0), "new"),
        (64, {}, (8, 6), "old"),
        (16, {}, (9, 0), "old"),
        (64, {"softcap": 2.0}, (9, 0), "old"),
    ],
)
def test_the_fastest_flash_kernel_that_serves_a_layer_is_taken(
    kernels, head_dim, options, capability, expected
):
    kernels[0] = capability
    need = AttentionNeed("cuda", torch.bfloat16, head_dim, AttentionOptions(0.1, **options))
    assert flash.kernel_name(need) == expected


@pytest.mark.parametrize("head_dim", [16, 64, 96, 256])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["softcap and window"]], ids=str)
def test_no_gradient_crosses_a_boundary(options, head_dim):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    lengths = (7, 1, 33, 2, 130, 64)
    row = PackedRow.of_lengths(lengths, torch.device(DEVICE))
    torch.manual_seed(0)
    tensors = [
        torch.randn(sum(lengths), heads, head_dim).to(DEVICE, dtype).requires_grad_() for heads in (4, 2, 2)
    ]
    for name in backends_that_can(dtype, head_dim, options):
        outs = attend(*tensors, row, options, name).split(lengths)
        for scored in (0, 1):
            loss = sum(out.float().square().sum() for out in outs[scored::2])
            for gradient in torch.autograd.grad(loss, tensors, retain_graph=True):
                reached = [bool(part.any()) for part in gradient.split(lengths)]
                assert not any(reached[1 - scored :: 2]), name
                assert reached[4 + scored], name


def test_a_backend_that_cannot_run_says_why_and_what_can():
    need = AttentionNeed("cpu", torch.float32, 64, AttentionOptions(scale=1.0))
    with pytest.raises(
        BackendUnavailable, match=r"'flash' cannot run: it needs CUDA.*use 'auto' or one of sdpa"
    ):
        choose_backend("flash", need)
    name, why = choose_backend("auto", need)
    assert name == "sdpa"
    assert "flash: it needs CUDA" in why


def test_an_unknown_backend_is_refused_by_the_name_that_asks(monkeypatch):
    with pytest.raises(
        InputError, match="attn_backend is 'fast'; choose one of auto, triton, flash, xformers"
    ):
        backends.requested_backend("fast")
    monkeypatch.setenv("UNSLOTH_PACK_ATTN", "sdpa")
    assert patch_model(tiny_model("llama"), "auto").report.attn_reason == "asked for by UNSLOTH_PACK_ATTN"
    monkeypatch.setenv("UNSLOTH_PACK_ATTN", "flash")
    with pytest.raises(BackendUnavailable, match=r"UNSLOTH_PACK_ATTN 'flash' cannot run: .*; use 'auto'"):
        patch_model(tiny_model("llama", torch.float32), "sdpa")  # which has no float32 anywhere


@pytest.mark.parametrize(("n_heads", "head_dim", "n_documents"), [(32, 128, 1), (40, 120, 700), (7, 72, 9)])
def test_the_32_bit_limit_counts_what_the_kernel_indexes(n_heads, head_dim, n_documents):
    """dq_accum holds N + 128 tokens a document, heads, and the head size rounded up to 32, in float32."""
    padded_head = -(-head_dim // 32) * 32
    most = -(-(2**31) // (n_heads * padded_head)) - 1 - 128 * n_documents
    for n_tokens in (most, most + 1):
        lengths = (n_tokens - n_documents + 1, *[1] * (n_documents - 1))
        row = PackedRow.of_lengths(lengths, torch.device("cpu"))
        q = torch.empty(n_tokens, n_heads, head_dim, device="meta")
        if n_tokens == most:
            refuse_int32_overflow(q, row)
        else:
            with pytest.raises(InputError, match=f"{n_tokens} tokens, .* use a smaller max_seq_length"):
                refuse_int32_overflow(q, row)

"""Tokens of images that see each other in both directions, as in Gemma 3: the second attention call."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from image_models import IMAGE, SIDE, documents, images_of, made, row_of, run_alone, run_packed
from tiny import DEVICE, error

from unsloth_pack import patch_model
from unsloth_pack.attention import (
    AttentionOptions,
    attend,
    backends,
    flash,
)
from unsloth_pack.cuda_graphs.shapes import ShapeBucket
from unsloth_pack.errors import BackendUnavailable, InputError
from unsloth_pack.kernels.launch import HostCopy
from unsloth_pack.packed_row.images import BlockRows
from unsloth_pack.packed_row.labels import DeferredCheck
from unsloth_pack.packed_row.row import PackedRow

GEMMA = "gemma3"


def random_row(seed):
    """Documents of 1 to 30 tokens; a third of their tokens stand for images, in runs of any length."""
    numbers = np.random.default_rng(seed)
    lengths = tuple(numbers.integers(1, 31, size=numbers.integers(1, 7)).tolist())
    is_image = np.repeat(numbers.random(sum(lengths)) < 0.35, numbers.integers(1, 6))[: sum(lengths)]
    row = PackedRow.of_lengths(lengths, torch.device(DEVICE))
    visual = np.flatnonzero(is_image)
    return PackedRow(
        row.lengths, row.is_padding, row.positions, row.shape, row.device, visual=visual, both_ways=True
    )


def by_document(q_NHD, k_NKD, v_NKD, row, window):
    """Queries, keys and values of every document alone, `[H, L, D]`, and transformers' own mask: causal or
    of one block, and inside the window."""
    is_image = np.isin(np.arange(row.n_tokens), row.visual)
    for start, length in zip(row.starts, row.lengths, strict=True):
        part = slice(start, start + length)
        image = torch.from_numpy(is_image[part]).to(DEVICE)
        begins = image & ~torch.nn.functional.pad(image, (1, 0))[:-1]
        block = torch.where(image, begins.cumsum(0), -1)
        at = torch.arange(length, device=DEVICE)
        sees = (at[None] <= at[:, None]) | ((block[None] == block[:, None]) & image[:, None])
        if window is not None:
            sees &= at[None] > at[:, None] - window
        groups = q_NHD.shape[1] // k_NKD.shape[1]
        k_HLD, v_HLD = (x[part].repeat_interleave(groups, 1).transpose(0, 1) for x in (k_NKD, v_NKD))
        yield q_NHD[part].transpose(0, 1), k_HLD, v_HLD, sees


def as_transformers_means_it(*qkv, row, scale, window):
    outs = []
    for q_HLD, k_HLD, v_HLD, sees in by_document(*qkv, row, window):
        logits = (q_HLD @ k_HLD.mT * scale).masked_fill(~sees, -torch.inf)
        outs.append((logits.softmax(-1) @ v_HLD).transpose(0, 1))
    return torch.cat(outs)


def as_transformers_computes_it(*qkv, row, scale, window):
    """By `sdpa`, its default."""
    outs = [
        torch.nn.functional.scaled_dot_product_attention(
            q_HLD[None], k_HLD[None], v_HLD[None], attn_mask=sees[None, None], scale=scale
        )[0].transpose(0, 1)
        for q_HLD, k_HLD, v_HLD, sees in by_document(*qkv, row, window)
    ]
    return torch.cat(outs)


def drawn(row, head_dim, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(row.n_tokens, heads, head_dim) for heads in (4, 2, 2, 4)]
    *qkv, weights = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return [x.requires_grad_() for x in qkv], weights


@pytest.mark.parametrize("window", [None, 1, 2, 3, 7, 64])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_sees_what_transformers_masks_let_it_see(seed, window):
    row = random_row(seed)
    qkv, weights = drawn(row, 8, seed)
    results = []
    for out in (
        attend(*qkv, row, AttentionOptions(0.3, window), "sdpa"),
        as_transformers_means_it(*qkv, row=row, scale=0.3, window=window),
    ):
        results.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    assert all(error(x, y) < 1e-12 for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_static_blocks_hold_every_row_of_their_form(window):
    """And the rows of narrower shapes. Every run has a query and as many keys or more; what is too many is of
    the padding behind the row."""
    rows = [row for seed in range(20) if len((row := random_row(seed)).blocks)]
    buckets = [ShapeBucket.of(row) for row in rows]
    bucket = max(buckets, key=lambda bucket: bucket.tokens).widened(buckets, 1)
    static = PackedRow.static(bucket.tokens, bucket.segments, bucket.longest, rows[0].device, both_ways=True)
    padding = bucket.blocks.padding(bucket.longest)
    filled = BlockRows.static(static, window, bucket.blocks)
    assert BlockRows.from_row(static, window) is filled
    assert not bucket.holds(PackedRow.of_lengths((9, 4), rows[0].device))  # text has shapes of its own
    for row in [*rows, *rows]:
        assert bucket.holds(row)
        filled.fill(row, window, bucket.tokens - 1, padding)
        queries, keys = (each.cu_seqlens.diff().tolist() for each in (filled.queries, filled.keys))
        n, own = len(row.blocks), BlockRows.from_row(row, window)
        assert queries[:n] == [*own.queries.lengths]
        assert keys[:n] == [*own.keys.lengths]
        assert all(0 < q <= k for q, k in zip(queries[: n + padding], keys, strict=False))
        assert not any(queries[n + padding :] + keys[n + padding :])
        assert max(queries) <= filled.queries.longest
        assert max(keys) <= filled.keys.longest
        for places, its_own in ((filled.query_places, own.query_places), (filled.key_places, own.key_places)):
            assert torch.equal(places[: len(its_own)], its_own)
            assert (places[len(its_own) :] == bucket.tokens - 1).all()
        assert sum(queries) == len(filled.query_places)
        assert sum(keys) == len(filled.key_places)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "triton", "xformers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 3, 300])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_backends_on_a_gpu_are_as_right_as_sdpa(backend, dtype, window, head_dim):
    """Where a backend is causal, or knows no such window, another one takes the second call."""
    ours, plain = [], []
    for seed in range(4):
        row = random_row(seed)
        qkv, weights = drawn(row, head_dim, seed, dtype)
        exact = [x.detach().double().requires_grad_() for x in qkv]
        results = []
        try:
            made_by_backend = attend(*qkv, row, AttentionOptions(0.1, window), backend)
        except BackendUnavailable as why:
            pytest.skip(str(why))
        for out, leaves in (
            (as_transformers_means_it(*exact, row=row, scale=0.1, window=window), exact),
            (as_transformers_computes_it(*qkv, row=row, scale=0.1, window=window), qkv),
            (made_by_backend, qkv),
        ):
            grads = torch.autograd.grad((out * weights.to(out)).sum(), leaves)
            results.append([x.double() for x in (out, *grads)])
        truth, theirs, got = results
        plain.append([error(x, y) for x, y in zip(theirs, truth, strict=True)])
        ours.append([error(x, y) for x, y in zip(got, truth, strict=True)])
    assert (np.mean(ours, axis=0) <= 1.5 * np.mean(plain, axis=0)).all(), (ours, plain)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, before, after, scale):
    """What FlashAttention means: the last query of a segment faces its last key; a bound of None is none."""
    outs, groups = [], q.shape[1] // k.shape[1]
    for number in range(len(cu_seqlens_q) - 1):
        (of_q, of_k) = (slice(*cu[number : number + 2].tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
        k_HLD, v_HLD = (x[of_k].repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
        at = torch.arange(len(q[of_q]), device=q.device) + len(k[of_k]) - len(q[of_q])
        ahead = torch.arange(len(k[of_k]), device=q.device)[None] - at[:, None]
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if before is not None:
            hidden |= ahead < -before
        if after is not None:
            hidden |= ahead > after
        logits = (q[of_q].transpose(0, 1) @ k_HLD.mT * scale).masked_fill(hidden, -torch.inf)
        outs.append((logits.softmax(-1) @ v_HLD).transpose(0, 1))
    return torch.cat(outs)


def bounds(window_size):
    return [None if bound < 0 else bound for bound in window_size]


def flash_2(q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size, softcap, dropout_p):
    assert not causal
    assert max_q == cu_q.diff().max()
    assert max_k == cu_k.diff().max()
    return varlen(q, k, v, cu_q, cu_k, *bounds(window_size), softmax_scale)


def of_torch(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    return flash_2(
        *(q, k, v, cu_q, cu_k, max_q, max_k),
        **dict(softmax_scale=scale, causal=False, window_size=window_size, softcap=0.0, dropout_p=0.0),
    )


def flash_4(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **given):
    assert not given["causal"]
    return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *given["window_size"], given["softmax_scale"]), None


@pytest.mark.parametrize("kernel", [flash_2, of_torch, flash_4], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("window", [None, 1, 7])
def test_flash_is_told_which_keys_a_block_has(kernel, window, monkeypatch):
    if kernel is flash_4:
        module = SimpleNamespace(flash_attn_varlen_func=flash_4)
        monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=module))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
        made_kernel = flash.flash_attn_4()
    else:
        made_kernel = flash.VarlenKernel("stand-in", kernel)
    monkeypatch.setattr(flash, "varlen_kernel", lambda head_dim, options: made_kernel)
    monkeypatch.setattr(backends, "choose_backend_for_other_keys", lambda name, need: "flash")
    row, options = random_row(1), AttentionOptions(0.3, window)
    qkv, _ = drawn(row, 8, 1)
    out = attend(*qkv, row, options, "sdpa")
    assert error(out, as_transformers_means_it(*qkv, row=row, scale=0.3, window=window)) < 1e-12


def test_blocks_end_where_documents_do():
    row = PackedRow.of_lengths((4, 3, 2), torch.device("cpu"))
    visual = np.array([0, 2, 3, 4, 5, 7, 8])  # an image ends a document, and the next one begins with one
    row = PackedRow(
        row.lengths, row.is_padding, row.positions, row.shape, row.device, visual=visual, both_ways=True
    )
    assert row.blocks.tolist() == [[0, 1], [2, 4], [4, 6], [7, 9]]


@pytest.mark.parametrize("window", [1, 3, 4, 5, 12, 100])
def test_any_window_and_images_at_the_ends_of_documents(window):
    """Neighbouring documents that end and begin with an image; many images in one; images that touch."""
    parts = [[2, (1, 1)], [(1, 1), 3], [(1, 1)], [(1, 1), (1, 1), (1, 1)], [1, *[(1, 1), 1] * 5], [1]]
    docs = documents(GEMMA, parts)
    model = made(GEMMA, torch.float64, "all", sliding_window=window)
    truth = run_alone(GEMMA, model, docs)
    patch_model(model)
    got = run_packed(GEMMA, model, docs)
    assert error(got.logits, truth.logits) < 1e-6
    assert got.grads.keys() == truth.grads.keys()
    for name, grad in got.grads.items():
        true = truth.grads[name]  # that of a bias of keys is 0 but for rounding
        assert (grad - true).norm() < 1e-5 * true.norm().clamp(min=1e-6), name


def test_a_placeholder_may_have_no_embedding():
    """transformers looks another token up in its place."""
    beyond, docs = 300, documents(GEMMA)
    model = made(GEMMA, torch.float64)
    model.config.image_token_id = beyond
    row = row_of(GEMMA, model, docs[1:2])
    row["input_ids"] = row["input_ids"].masked_fill(row["input_ids"] == IMAGE, beyond)
    with torch.no_grad():
        plain = model(**row, use_cache=False).logits
        patch_model(model)
        ours = model(**row, packed_seq_lengths=[len(docs[1].ids)]).logits
    assert error(ours, plain) < 1e-6


def test_what_stands_on_a_device_is_refused_behind_the_decoder(monkeypatch):
    model, docs, seen = made(GEMMA), documents(GEMMA), []
    patch_model(model)
    late = classmethod(lambda cls, count, said: [cls(HostCopy(count), said)])
    monkeypatch.setattr(DeferredCheck, "start", late)
    model.get_base_model().lm_head.register_forward_pre_hook(lambda *args: seen.append(True))
    row = {"input_ids": row_of(GEMMA, model, docs)["input_ids"]}
    with pytest.raises(InputError, match="image tokens and comes without pixel_values"):
        model(**row, packed_seq_lengths=[len(doc.ids) for doc in docs])
    assert seen


@pytest.mark.parametrize("is_marked", [True, False], ids=["token_type_ids", "none"])
def test_an_ordinary_batch_means_what_it_means_to_transformers(is_marked):
    """Without token types its images are causal there; such a batch keeps its padding."""
    docs = documents(GEMMA, [[3, (1, 1), 2], [1, (1, 1), 4]])
    ids = torch.zeros(2, 10, dtype=torch.int64)
    for number, doc in enumerate(docs):
        ids[number, : len(doc.ids)] = doc.ids
    mask = (ids != 0).long()
    model = made(GEMMA).eval()
    batch = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    batch = {name: x.to(DEVICE) if name != "use_cache" else x for name, x in batch.items()}
    batch |= {"pixel_values": images_of(GEMMA, model, docs)[0]["pixel_values"]}
    if is_marked:
        batch["token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    with torch.no_grad():
        plain = model(**batch).logits
        patch_model(model)
        ours = model(**batch).logits
    assert error(ours[mask == 1], plain[mask == 1]) < 1e-5


@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
def test_generates_what_plain_generates_with_any_cache(cache):
    """A batch of two prompts, one of them padded."""
    model = made(GEMMA).eval()
    docs = documents(GEMMA, [[3, (1, 1), 2, (1, 1), 4], [2, (1, 1), 1]], seed=5)
    longest = max(len(doc.ids) for doc in docs)
    ids = torch.stack([torch.nn.functional.pad(doc.ids, (longest - len(doc.ids), 0)) for doc in docs])
    given = {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": (ids == IMAGE).int()}
    given = {name: x.to(DEVICE) for name, x in given.items()}
    given |= {"pixel_values": images_of(GEMMA, model, docs)[0]["pixel_values"]}
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, use_cache=cache != "none")
    options |= dict(cache_implementation="static") if cache == "static" else {}
    plain = model.generate(**given, **options)
    patch_model(model)
    assert torch.equal(model.generate(**given, **options), plain)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("places", [{"apart": range(2, 6)}, {"touching": range(8, 16)}, {}], ids=str)
def test_the_model_without_its_head_joins_no_images_of_two_documents(places, training):
    """There transformers makes the masks, and images that touch see each other."""
    ids = torch.randint(1, 200, (1, 24), generator=torch.Generator().manual_seed(0))
    ids[0, [place for of_kind in places.values() for place in of_kind]] = IMAGE
    positions = torch.cat([torch.arange(12), torch.arange(12)])[None]
    call = {"input_ids": ids, "position_ids": positions, "token_type_ids": (ids == IMAGE).int()}
    n_images = int((ids == IMAGE).sum()) // 4
    if n_images:
        call["pixel_values"] = torch.randn(n_images, 3, SIDE, SIDE)
    call = {name: value.to(DEVICE) for name, value in call.items()}
    plain = made(GEMMA, torch.float32, trained="all").to(DEVICE).train(training).model
    with torch.no_grad():
        expected = plain(**call).last_hidden_state
    model = made(GEMMA, torch.float32, trained="all").to(DEVICE).train(training)
    patch_model(model)
    if "touching" in places:
        with pytest.raises(InputError, match=r"token 8 of row 0 would see token 12 of another document"):
            model.model(**call)
    else:
        with torch.no_grad():
            assert error(model.model(**call).last_hidden_state, expected) < 1e-5


def test_a_batch_with_padding_in_front_is_let_through_with_masks_of_every_layer():
    model = made(GEMMA, torch.float32, trained="all").to(DEVICE).eval()
    patch_model(model)
    ids = torch.randint(1, 200, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for padding in (0, 1):
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, padding)
        types = torch.zeros_like(ids)
        model.model(input_ids=ids, attention_mask=mask, position_ids=positions, token_type_ids=types)

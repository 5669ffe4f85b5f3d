"""Tokens of images that see each other in both directions, as in Gemma 3: the second attention call."""

import numpy as np
import pytest
import torch
from image_models import IMAGE, documents, made, row_of, run_alone, run_packed
from tiny import DEVICE, error

from unsloth_pack import patch_model
from unsloth_pack.attention import (
    AttentionOptions,
    attend,
)
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

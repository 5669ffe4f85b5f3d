"""Rows that branch: segments that continue another segment, as answers continue one prompt.

The truth is every path from a root to a segment, alone in plain transformers in float64.
"""

import pytest
import torch
from test_attention import written_out
from tiny import DEVICE

from unsloth_pack.attention import AttentionOptions, attend
from unsloth_pack.packed_row.row import PackedRow

FORESTS = {  # lengths and parents
    "one level": ((9, 1, 5, 7, 4, 3), (-1, 0, 0, 0, -1, -1)),
    "two prefixes": ((1, 2, 3, 30, 17, 17, 16), (-1, 0, 0, -1, 3, 3, 3)),
    "deep": ((5, 3, 4, 2, 6, 7, 1), (-1, 0, 1, 1, 0, -1, 5)),
    "long": ((300, 290, 40, 7, 280), (-1, 0, 0, -1, 3)),
}
OPTIONS = {
    "plain": AttentionOptions(scale=0.2),
    "window": AttentionOptions(scale=0.2, window=6),
    "softcap and window": AttentionOptions(scale=0.5, softcap=2.0, window=11),
    "softcap": AttentionOptions(scale=0.5, softcap=2.0),
}


def path_of(segment, parent):
    """The segments from the root down to one."""
    return [] if segment < 0 else [*path_of(parent[segment], parent), segment]


def written_out_by_path(q, k, v, lengths, parent, options):
    """Attention of every path from a root by its definition; of each the outputs of the last segment."""
    parts, outs = [x.split(lengths) for x in (q, k, v)], []
    for segment in range(len(lengths)):
        path = path_of(segment, parent)
        qkv = (torch.cat([part[s] for s in path]) for part in parts)
        outs.append(written_out(*qkv, [sum(lengths[s] for s in path)], options)[-lengths[segment] :])
    return torch.cat(outs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
def test_a_branch_attends_to_its_ancestors_and_itself(forest, options):
    lengths, parent = forest
    torch.manual_seed(0)
    row = PackedRow.of_lengths(lengths, torch.device(DEVICE), parent)
    heads = [(4, 16), (2, 16), (2, 16)]
    leaves = [torch.randn(row.n_tokens, *size, dtype=torch.float64, device=DEVICE) for size in heads]
    grad = torch.randn_like(leaves[0])
    results = []
    for attention in (
        lambda *qkv: attend(*qkv, row, options, "sdpa"),
        lambda *qkv: written_out_by_path(*qkv, lengths, parent, options),
    ):
        qkv = [x.clone().requires_grad_() for x in leaves]
        out = attention(*qkv)
        results.append([out, *torch.autograd.grad(out, qkv, grad)])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
def test_positions_and_visible_keys_of_a_forest(forest):
    lengths, parent = forest
    row = PackedRow.of_lengths(lengths, torch.device("cpu"), parent)
    segments = [s for s, length in enumerate(lengths) for _ in range(length)]
    for i, query in enumerate(segments):
        path = path_of(query, parent)
        within = i - row.starts[query]
        assert row.positions[i] == sum(lengths[s] for s in path[:-1]) + within
        for j, key in enumerate(segments):
            assert (j <= i < row.subtree_end[key]) == (key in path and j <= i)
        is_first = within == 0
        assert (i in row.unscored_places) == (is_first and parent[query] < 0)
        if is_first and parent[query] >= 0:
            assert row.predictors[i - 1] == row.starts[parent[query]] + lengths[parent[query]] - 1
        elif not is_first:
            assert row.predictors[i - 1] == i - 1

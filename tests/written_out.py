"""Attention by its definition, also over rows that branch."""

import torch

from unsloth_pack.attention import AttentionOptions

FORESTS = {  # lengths and parents
    "one level": ((9, 1, 5, 7, 4, 3), (-1, 0, 0, 0, -1, -1)),
    "two prefixes": ((1, 2, 3, 30, 17, 17, 16), (-1, 0, 0, -1, 3, 3, 3)),
    "deep": ((5, 3, 4, 2, 6, 7, 1), (-1, 0, 1, 1, 0, -1, 5)),
    "long": ((300, 290, 40, 7, 280), (-1, 0, 0, -1, 3)),
}
BRANCHED_OPTIONS = {
    "plain": AttentionOptions(scale=0.2),
    "window": AttentionOptions(scale=0.2, window=6),
    "softcap and window": AttentionOptions(scale=0.5, softcap=2.0, window=11),
    "softcap": AttentionOptions(scale=0.5, softcap=2.0),
}


def written_out(q_NHD, k_NKD, v_NKD, lengths, options):
    """Attention by its definition."""
    groups = q_NHD.shape[1] // k_NKD.shape[1]
    outs = []
    for q, k, v in zip(*(x.split(lengths) for x in (q_NHD, k_NKD, v_NKD)), strict=True):
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * options.scale
        if options.softcap is not None:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        age = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
        hidden = ((age < 0) & options.causal) | (age >= (options.window or len(q)))
        weights = logits.masked_fill(hidden.to(logits.device), -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)


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

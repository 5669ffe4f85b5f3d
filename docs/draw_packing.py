"""Draw the pictures of packing.md from real plans over real documents.

    python docs/draw_packing.py --dataset alpaca_en_demo.json

strategies.png   the same documents in rows of 1,024, placed by each strategy of `plan_packs`
boundaries.png   one of those rows: which token attends to which, and where labels are masked
ranks.png        rows dealt out to four ranks in turn, and by `PackedSampler`: the estimated cost of updates
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from draw_readme import CAPACITY, draw_rows
from transformers import AutoTokenizer

from unsloth_pack.data import load_rows
from unsloth_pack.data.tokenize import documents_of
from unsloth_pack.demo import MODEL_DIR
from unsloth_pack.packing import PackedSampler, plan_packs
from unsloth_pack.packing.planner import STRATEGIES

HERE = Path(__file__).parent
RANKS, ROWS_PER_RANK = 4, 4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, help="alpaca rows, as json")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    encoded = documents_of(load_rows(args.dataset), tokenizer, max_length=CAPACITY).rows
    lengths = [len(ids) for ids in encoded["input_ids"]]
    draw_strategies(lengths[40:76])
    draw_boundaries([length for length in lengths if length < 90][:4])
    draw_ranks(lengths)


def draw_strategies(lengths):
    figure, axes = plt.subplots(2, 2, figsize=(10, 5), layout="constrained")
    for axis, strategy in zip(axes.flat, STRATEGIES, strict=True):
        plan = plan_packs(lengths, CAPACITY, strategy)
        rows = [[(i, lengths[i]) for i in documents] for documents in plan.bins]
        draw_rows(axis, rows, CAPACITY, f"{strategy}, {plan.n_bins} rows")
    figure.savefig(HERE / "strategies.png", dpi=110)


def draw_boundaries(lengths):
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    causal = np.tril(np.ones((len(document),) * 2, bool))
    seen = causal & (document[:, None] == document[None, :])
    leaked = causal & ~seen
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    left.imshow(np.where(seen, 1.0, np.where(leaked, 0.25, 0.0)), cmap="Blues", interpolation="nearest")
    left.set_title("dark: attended; light: what one causal mask would leak", fontsize=9, loc="left")
    left.set_xlabel("key token", fontsize=8)
    left.set_ylabel("query token", fontsize=8)
    right.plot(position, linewidth=1, label="position id")
    starts = np.flatnonzero(position == 0)
    right.plot(starts, position[starts], "o", label="label masked: the first token of a document")
    right.set_xlabel("token of the row", fontsize=8)
    right.legend(fontsize=8)
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "boundaries.png", dpi=110)


def draw_ranks(lengths):
    """The slowest rank of every update against the mean, in units of the mean."""
    plan = plan_packs(lengths, CAPACITY)
    sampler = PackedSampler(
        [[lengths[i] for i in documents] for documents in plan.bins], RANKS, rows_per_rank=ROWS_PER_RANK
    )
    order = sampler.global_order()[: plan.n_bins // sampler.window * sampler.window]
    in_turn = sampler.cost[order].reshape(-1, ROWS_PER_RANK, RANKS).sum(axis=1)
    whole = sampler.assignment()[:, : order.size // RANKS]
    balanced = sampler.cost[whole].reshape(RANKS, -1, ROWS_PER_RANK).sum(axis=2).T
    figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
    for costs, name in ((in_turn, "dealt out in turn"), (balanced, "PackedSampler")):
        waiting = 1 - costs.mean() / costs.max(axis=1).mean()
        axis.plot(
            costs.max(axis=1) / costs.mean(axis=1), label=f"{name}: ranks wait {waiting:.1%} of the time"
        )
    axis.set_xlabel("update", fontsize=8)
    axis.set_ylabel("slowest rank / mean", fontsize=8)
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "ranks.png", dpi=110)


if __name__ == "__main__":
    main()

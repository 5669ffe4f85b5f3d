"""Draw the README's picture from real rows and committed results.

    python docs/draw_readme.py --dataset alpaca_en_demo.json

Left: eight documents of the data set as a padded batch and as packed rows. Right: tokens per second of the
committed comparison. A bar is the median of the rounds, and a line on it reaches from the slowest to the
fastest of them. A peer without a bar was not run, or did not finish that case.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from unsloth_pack.data import load_rows
from unsloth_pack.data.tokenize import documents_of
from unsloth_pack.demo import MODEL_DIR
from unsloth_pack.packing import plan_packs

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))
from comparison import NEWEST, Comparison  # noqa: E402

CAPACITY = 1024
CASES = {  # from the bottom up
    "8b": "Llama-3.1-8B shape, rows of 8,192",
    "3b": "Llama-3.2-3B shape, rows of 8,192",
    "1.7b-2x4k": "Qwen3-1.7B shape, two rows of 4,096",
    "pr-16k": "Qwen2.5-0.5B shape, rows of 16,384",
    "pr": "Qwen2.5-0.5B shape, rows of 2,048",
}
NAMES = {"ours": "unsloth_pack", "trl": "TRL, FlashAttention 2", "trl+liger": "TRL with Liger kernels"}
COLOURS = {"ours": "#2a6f97", "trl": "#a9b4c2", "trl+liger": "#8d99ae", "unsloth": "#d5bdaf"}


def document_lengths(dataset, n):
    from transformers import AutoTokenizer

    rows = load_rows(dataset).select(range(40, 40 + n))
    encoded = documents_of(rows, AutoTokenizer.from_pretrained(MODEL_DIR), max_length=CAPACITY).rows
    return [len(ids) for ids in encoded["input_ids"]]


def draw_rows(axis, rows, width, title):
    """Each row a bar of documents; what is left of it is padding."""
    palette = plt.get_cmap("tab20").colors
    for y, row in enumerate(rows):
        axis.barh(-y, width, height=0.8, color="#eeeeee", edgecolor="#bbbbbb", linewidth=0.5)
        left = 0
        for document, length in row:
            axis.barh(-y, length, left=left, height=0.8, color=palette[document % 20], edgecolor="white")
            left += length
    used = sum(length for row in rows for _, length in row)
    axis.set_title(f"{title}: {used / (width * len(rows)):.0%} full", fontsize=10, loc="left")
    axis.set_axis_off()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, help="alpaca rows, as json")
    args = parser.parse_args()

    lengths = document_lengths(args.dataset, 8)
    plan = plan_packs(lengths, CAPACITY, "bfd")
    packed = [[(i, lengths[i]) for i in row] for row in plan.bins]
    figure = plt.figure(figsize=(10, 3.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=[1.1, 1], height_ratios=[8, len(packed)])
    padded = [[(i, length)] for i, length in enumerate(lengths)]
    draw_rows(figure.add_subplot(grid[0, 0]), padded, max(lengths), "one document a row")
    draw_rows(figure.add_subplot(grid[1, 0]), packed, CAPACITY, f"packed rows of {CAPACITY:,}")

    comparison = Comparison()
    pairs = comparison.pairs()
    names = NAMES | {"unsloth": f"Unsloth {comparison.version('unsloth')}"}
    axis = figure.add_subplot(grid[:, 1])
    place = 0
    for case, title in CASES.items():
        speeds = {pair.peer: pair.theirs["tok_s"] for pair in pairs if pair.case == case}
        speeds["ours"] = next(pair.ours["tok_s"] for pair in pairs if pair.case == case)
        for peer, speed in sorted(speeds.items(), key=lambda item: item[1]):
            axis.barh(place, speed / 1000, color=COLOURS[peer])
            slowest, fastest = comparison.reach(case, peer)
            if slowest < fastest:
                axis.plot([slowest / 1000, fastest / 1000], [place, place], color="black", linewidth=1)
            end = max(speed, fastest) / 1000
            axis.text(end, place, f" {speed / 1000:.0f}k  {names[peer]}", va="center", fontsize=8)
            place += 1
        axis.text(0, place - 0.35, title, fontsize=9, va="bottom", weight="bold")
        place += 1
    axis.set_xlim(0, 1.5 * max(pair.ours["tok_s"] for pair in pairs) / 1000)
    axis.set_ylim(-0.6, place - 0.3)
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_xlabel("thousand tokens per second, LoRA, one H200", fontsize=8)
    figure.savefig(HERE / "packed.png", dpi=110, metadata={"Source": NEWEST.name})


if __name__ == "__main__":
    main()

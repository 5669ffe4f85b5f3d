"""`loss.png` and `lengths.png`, drawn without a display."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unsloth_pack.files.whole_folders import write_file


def plot_loss(log_history: Sequence[dict[str, Any]], path: Path) -> None:
    """The training loss over the updates, and the evaluation loss where there is one.

    Args:
        log_history: the trainer's, with `step` and `loss` or `eval_loss` in some entries.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="update", ylabel="loss (nats a token)", title="Loss")
    for name, style in (("loss", {"linewidth": 1.2}), ("eval_loss", {"marker": "o", "markersize": 4})):
        points = [(entry["step"], entry[name]) for entry in log_history if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label={"loss": "training"}.get(name, "evaluation"), **style)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    _save(figure, path)


def plot_lengths(lengths: np.ndarray, max_length: int, path: Path) -> None:
    """A histogram of document lengths, in tokens, with the length at which rows are cut."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(
        xlabel="tokens",
        ylabel="documents",
        title=f"Lengths of {len(lengths)} documents, median {np.median(lengths):.0f}",
    )
    axes.hist(lengths, bins=min(60, int(np.ptp(lengths)) + 1))
    if (lengths >= max_length).any():
        axes.axvline(max_length, color="tab:red", linestyle="--", label=f"max_seq_length {max_length}")
        axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    with write_file(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=130)

"""`loss.png` and `lengths.png`, drawn without a display."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.files.whole_folders import write_file
from unsloth_pack.report import rendering

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_loss(log_history: Sequence[dict[str, Any]], path: Path) -> None:
    """The training loss over the updates, and the evaluation loss where there is one.

    Args:
        log_history: the trainer's, with `step` and `loss` or `eval_loss` in some entries.
    """
    _save(lambda: _draw_loss(log_history), path)


def plot_lengths(lengths: np.ndarray, max_length: int, path: Path) -> None:
    """A histogram of document lengths, in tokens, with the length at which rows are cut."""
    _save(lambda: _draw_lengths(lengths, max_length), path)


def _draw_loss(log_history: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="update", ylabel="loss (nats a token)", title="Loss")
    for name, style in (("loss", {"linewidth": 1.2}), ("eval_loss", {"marker": "o", "markersize": 4})):
        points = [(entry["step"], entry[name]) for entry in log_history if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label={"loss": "training"}.get(name, "evaluation"), **style)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    return figure


def _draw_lengths(lengths: np.ndarray, max_length: int) -> Figure:
    from matplotlib.figure import Figure

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
    return figure


def _save(draw: Callable[[], Figure], path: Path) -> None:
    rendered = rendering.render(draw, path.suffix.removeprefix(".") or "png", dpi=130)
    with write_file(path) as file:
        file.write(rendered)

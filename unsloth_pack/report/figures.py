"""Figures of a run as SVG that stands inside a page: text stays text, and nothing in it names an address."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.report import rendering
from unsloth_pack.report.row_figure import PackedRowSeen, draw_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_NAMESPACE = re.compile(r'\s+xmlns(:\w+)?="[^"]*"')
_ID = re.compile(r'(\bid="|href="#|url\(#)')
_CURVES = (
    ("loss", "loss (nats a token)", 1.0),
    ("learning_rate", "learning rate", 1.0),
    ("tokens_per_second", "tokens a second", 1.0),
    ("memory_bytes", "peak memory so far (GiB)", 2.0**30),
)


def curves(log: Sequence[dict[str, Any]]) -> str:
    """Loss, learning rate, tokens a second and memory over the updates.

    Args:
        log: the lines of kind `log` in a metrics file.
    """
    return _svg(lambda: _draw_curves(log), "curves")


def _draw_curves(log: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    lines = with_speed(log)
    for place, (name, label, unit) in enumerate(_CURVES):
        axes = figure.add_subplot(2, 2, place + 1, xlabel="update", ylabel=label)
        _plot(axes, lines, name, unit, "training" if name == "loss" else None)
        if name == "loss" and _plot(axes, lines, "eval_loss", unit, "evaluation", marker="o", markersize=3):
            axes.legend()
        axes.grid(alpha=0.3)
    return figure


def with_speed(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log lines, with `tokens_per_second` since the line before. A resumed run's clock begins anew."""
    made, before = [], {"num_tokens": 0, "seconds": 0.0}
    for line in log:
        speed = {}
        if line.get("num_tokens") is not None and "loss" in line:
            seconds, tokens = (line[name] - before[name] for name in ("seconds", "num_tokens"))
            if seconds > 0 and tokens > 0:
                speed = {"tokens_per_second": tokens / seconds}
            before = line
        made.append(line | speed)
    return made


def lengths_histogram(lengths: np.ndarray, max_length: int) -> str:
    """How long the documents are.

    Args:
        lengths: `[documents]` tokens.
        max_length: at which documents are cut.
    """
    return _svg(lambda: _draw_lengths(lengths, max_length), "lengths")


def _draw_lengths(lengths: np.ndarray, max_length: int) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.8), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens", ylabel="documents")
    axes.hist(lengths, bins=min(60, int(np.ptp(lengths)) + 1))
    if (lengths >= max_length).any():
        axes.axvline(max_length, color="tab:red", linestyle="--", label=f"cut at {max_length:,}")
        axes.legend()
    axes.grid(alpha=0.3)
    return figure


def packed_row(row: PackedRowSeen) -> str:
    """Documents side by side, see `draw_row`."""
    return _svg(lambda: draw_row(row), "row")


def _plot(
    axes: Any, log: Sequence[dict[str, Any]], name: str, unit: float, label: str | None, **style: Any
) -> bool:
    points = [(line["step"], line[name] / unit) for line in log if line.get(name) is not None]
    if points:
        alone = {"marker": "o"} if len(points) == 1 else {}
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2, **alone | style)
    return bool(points)


def _svg(draw: Callable[[], Figure], name: str) -> str:
    """The figure as an `<svg>` element. `name` keeps its ids apart from those of other figures."""
    text = rendering.render(draw, "svg", salt=name, metadata=_NO_METADATA).decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = _NAMESPACE.sub("", text).replace("xlink:href", "href")
    return _ID.sub(rf"\1{name}-", text)

"""Renders every figure of a run, without a display. matplotlib is imported with the first."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(draw: Callable[[], Figure], file_format: str, *, salt: str = "", **options: Any) -> bytes:
    """The file of a figure.

    Args:
        draw: makes the figure.
        file_format: as matplotlib names it.
        salt: of the ids in an SVG, which differ between the figures of one page.
        options: of `Figure.savefig`.
    """
    import matplotlib

    rendered = io.BytesIO()
    figure = draw()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(rendered, format=file_format, **options)
    return rendered.getvalue()

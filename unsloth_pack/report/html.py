"""Figures of a run, and `report.html`: a run on one page that loads nothing and needs no network.

matplotlib is imported with the first figure, and draws without a display.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.errors import printable
from unsloth_pack.patching.report import PatchReport
from unsloth_pack.report.terminal import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_IMAGES = 16  # that fit side by side
_MARGIN = 0.08  # of the place of an image, on each side
_CURVES = (
    ("loss", "loss (nats a token)", 1.0),
    ("learning_rate", "learning rate", 1.0),
    ("tokens_per_second", "tokens a second", 1.0),
    ("memory_bytes", "peak memory so far (GiB)", 2.0**30),
)
_PARTS = (  # where lines have them: the use of the device, and parts of a loss
    ("tflops", "model TFLOP/s a device", 1.0),
    ("mfu", "MFU, the share of the peak", 1.0),
    ("kl_loss", "KL from the teacher (nats a token)", 1.0),
    ("sft_loss", "cross-entropy (nats a token)", 1.0),
    ("rewards/margins", "reward of the better answer over the worse", 1.0),
    ("rewards/accuracies", "pairs with a higher reward of the better answer", 1.0),
    ("kl", "KL from the reference (nats an answer)", 1.0),
)
_WORDS = {  # of a summary and its ledger, in place of the names of their fields
    "steps": "updates",
    "peak_memory_bytes": "peak memory",
    "first_loss": "loss at first (nats a token)",
    "last_loss": "loss at last (nats a token)",
    "tflops": "model TFLOP/s a device",
    "mfu": "MFU",
    "hfu": "HFU",
    "longest": "tokens of the longest row",
    "p99": "tokens of a row, 99th percentile",
}
_MOST_LENGTHS = 12  # of documents in a row that are listed, and that are drawn in one strip
_MOST_STRIPS = 4
# The browser asks nobody for anything, whatever stands in the page
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 66rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd;
  vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; width: 18rem; }
table.answers { table-layout: fixed; } table.answers th { width: auto; }
p.note { color: #666; }
"""

Log = Sequence[Mapping[str, Any]]  # lines of kind `log` in a metrics file, or the trainer's history


@dataclass(frozen=True, eq=False)
class ImageSeen:
    """An image of a packed row."""

    first: int  # token in the row
    tokens: int
    pixels: np.ndarray  # `[height, width, 3]` bytes


@dataclass(frozen=True)
class PackedRowSeen:
    """One packed row, to be drawn."""

    lengths: Sequence[int]  # of its documents, in tokens
    is_counted: np.ndarray  # `[tokens]` whether a token's label counts in the loss
    capacity: int  # tokens that the row has room for
    images: Sequence[ImageSeen] = ()  # in the order of their tokens


def row_of_batch(batch: Mapping[str, Any], processor: Any, images: Sequence[Any]) -> PackedRowSeen:
    """Read a batch of `VisionDataCollator` for a Qwen-VL, to draw it with its images, which are Pillow's."""
    is_image = batch["input_ids"][0].numpy() == processor.image_token_id
    grids = np.asarray(batch.get("image_grid_thw", ()), np.int64).reshape(-1, 3)
    tokens = [int(grid.prod()) // processor.image_processor.merge_size**2 for grid in grids]
    pixels = [np.asarray(image.convert("RGB")) for image in images]
    is_counted = batch["labels"][0].numpy() != IGNORE_INDEX
    lengths = batch["packed_seq_lengths"]
    return PackedRowSeen(lengths, is_counted, sum(lengths), placed(is_image, tokens, pixels))


def placed(is_image: np.ndarray, tokens: Sequence[int], pixels: Sequence[np.ndarray]) -> list[ImageSeen]:
    """List the images of a row, whose tokens stand where `is_image`."""
    places = np.flatnonzero(is_image)
    firsts = places[np.cumsum([0, *tokens])[:-1]].tolist()
    return [ImageSeen(*each) for each in zip(firsts, tokens, pixels, strict=True)]


def draw_row(row: PackedRowSeen) -> Figure:
    """Draw documents side by side, dark where a token counts in the loss, with a line at every boundary.

    Many documents stand in up to four strips, one below the other. Images stand above the row, each tied to
    its tokens, up to the sixteenth.
    """
    images = row.images[:_MOST_IMAGES]
    n_strips = 1 if images else min(_MOST_STRIPS, -(-len(row.lengths) // _MOST_LENGTHS))
    figure = _figure(10, 2.8 if images else 0.8 + 0.8 * n_strips)
    for strip, limits in enumerate(pairwise(np.linspace(0, row.capacity, n_strips + 1))):
        height = 2 if images else 1
        axes = figure.add_subplot(n_strips, 1, strip + 1, yticks=[], xlim=limits, ylim=(0, height))
        _draw_documents(axes, row, *limits, 1 / height)
    axes.set_xlabel("token")
    width = 1 / max(1, len(images))
    for number, image in enumerate(images):
        left = number * width
        inset = axes.inset_axes((left + width * _MARGIN, 0.62, width * (1 - 2 * _MARGIN), 0.36))
        inset.imshow(image.pixels, interpolation="nearest")
        inset.set(xticks=[], yticks=[])
        axes.axvspan(image.first, image.first + image.tokens, ymin=0.5, ymax=0.52, color="black", linewidth=0)
        middle = image.first + image.tokens / 2
        axes.plot([middle, (left + width / 2) * row.capacity], [1.04, 1.22], color="0.4", linewidth=0.8)
    return figure


def _draw_documents(axes: Axes, row: PackedRowSeen, low: float, high: float, top: float) -> None:
    """Draw the documents between two tokens of a row; `top` is the share of the height that they take."""
    ends = np.cumsum(row.lengths)
    for number, (start, end) in enumerate(pairwise([0, *ends])):
        if start >= high or end <= low:
            continue
        axes.axvspan(start, end, ymax=top, color=f"C{number % 10}", alpha=0.3, linewidth=0)
        edges = np.flatnonzero(np.diff(np.pad(row.is_counted[start:end].astype(np.int8), 1)))
        for first, last in edges.reshape(-1, 2):  # of each run of tokens that count
            axes.axvspan(start + first, start + last, ymax=top, color=f"C{number % 10}", linewidth=0)
        if end <= high:
            width = min(1, 20 * _MOST_STRIPS / len(ends))  # thinner where they would cover documents
            axes.axvline(end, ymax=top, color="black", linewidth=width, gid=f"boundary-{number}")
    axes.axvspan(ends[-1], row.capacity, ymax=top, color="0.85", linewidth=0)


def draw_curves(log: Log) -> Figure:
    """Draw loss, learning rate, tokens a second and memory over the updates; and `_PARTS`."""
    parts = [part for part in _PARTS if any(part[0] in line for line in log)]
    counters = sorted({name for line in log for name in line if name.startswith("rollouts/")})
    parts += [(name, f"{name}, mean", 1.0) for name in counters]
    n_rows = 2 + (len(parts) + 1) // 2
    figure = _figure(10, 2.8 * n_rows)
    for place, (name, label, unit) in enumerate((*_CURVES, *parts)):
        axes = figure.add_subplot(n_rows, 2, place + 1, xlabel="update", ylabel=label)
        if name == "loss" or place >= len(_CURVES):
            _draw_losses(axes, log, name)
        else:
            _plot(axes, with_speed(log), name, unit, None)
    return figure


def with_speed(log: Log) -> list[dict[str, Any]]:
    """Add the `tokens_per_second` since the line before to lines with a loss; a resumed clock begins anew."""
    lines: list[dict[str, Any]] = []
    for line in log:
        if "loss" in line and line.get("num_tokens") is not None:
            before = lines[-1] if lines else {"num_tokens": 0, "seconds": 0.0}
            seconds, tokens = (line[name] - before[name] for name in ("seconds", "num_tokens"))
            speed = tokens / seconds if seconds > 0 and tokens > 0 else None
            lines.append({**line, "tokens_per_second": speed})
    return lines


def draw_lengths(lengths: np.ndarray, max_length: int, width: float, height: float) -> Figure:
    """Draw a histogram of document lengths, in tokens, with the length at which documents are cut."""
    figure = _figure(width, height)
    title = f"{len(lengths):,} documents, median {np.median(lengths):.0f} tokens"
    axes = figure.add_subplot(xlabel="tokens", ylabel="documents", title=title)
    axes.hist(lengths, bins=min(60, int(np.ptp(lengths)) + 1))
    if (lengths >= max_length).any():
        axes.axvline(max_length, color="tab:red", linestyle="--", label=f"cut at {max_length:,}")
        axes.legend()
    axes.grid(alpha=0.3)
    return figure


def _draw_losses(axes: Axes, log: Log, name: str = "loss") -> None:
    _plot(axes, log, name, 1.0, "training")
    _plot(axes, log, f"eval_{name}", 1.0, "evaluation", marker="o", markersize=3)
    channels = (f"{name}/", f"eval_{name}/")  # means of each data set of a mixture
    for channel in sorted({key for line in log for key in line if key.startswith(channels)}):
        _plot(axes, log, channel, 1.0, channel, linestyle="--")
    if axes.lines:
        axes.legend()


def _plot(axes: Axes, log: Log, name: str, unit: float, label: str | None, **style: Any) -> None:
    points = [(line["step"], line[name] / unit) for line in log if line.get(name) is not None]
    if points:
        alone = {"marker": "o"} if len(points) == 1 else {}
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2, **alone | style)
    axes.grid(alpha=0.3)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def render(figure: Figure, file_format: str, *, salt: str = "", **options: Any) -> bytes:
    """Render a figure as a file of matplotlib's format; `salt` is of the ids in an SVG."""
    import matplotlib

    rendered = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(rendered, format=file_format, **options)
    return rendered.getvalue()


# Files with one figure


def plot_loss(log_history: Log, path: Path) -> None:
    """Draw the training loss over the updates, and the evaluation loss where there is one."""
    figure = _figure(7, 4)
    _draw_losses(figure.add_subplot(xlabel="update", ylabel="loss (nats a token)"), log_history)
    _save(figure, path)


def plot_lengths(lengths: np.ndarray, max_length: int, path: Path) -> None:
    """Draw a histogram of document lengths, see `draw_lengths`."""
    _save(draw_lengths(lengths, max_length, 7, 4), path)


def plot_row(row: PackedRowSeen, path: Path) -> None:
    """Draw a packed row, see `draw_row`."""
    _save(draw_row(row), path)


def _save(figure: Figure, path: Path) -> None:
    rendered = render(figure, path.suffix.removeprefix(".") or "png", dpi=130)
    with write_file(path) as file:
        file.write(rendered)


# The page


def page_of(
    lines: Sequence[Mapping[str, Any]],
    patch: PatchReport,
    lengths: np.ndarray | None,
    row: PackedRowSeen | None,
    max_length: int,
) -> str:
    """Return the page of a run as HTML.

    Args:
        lines: of its metrics file.
        lengths: `[documents]` tokens of the training documents; None where the data streams.
        row: one to draw; None where rows are not packed, or stream.
        max_length: at which documents are cut.
    """
    by_kind: dict[str, list[Any]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    (config,), summary = by_kind["config"], by_kind["summary"][-1]
    model, drawn_lengths = _text(config["options"].get("model_name", "")), ""
    if lengths is not None:
        drawn_lengths = _svg("lengths", draw_lengths(lengths, max_length, 10, 2.8))
    sections = {
        "Over the run": _svg("curves", draw_curves(by_kind.get("log", []))),
        "Held-out rows": _answers(by_kind["demo"][-1]) if "demo" in by_kind else "",
        "Lengths of documents": drawn_lengths,
        "A packed row": _row(row) if row is not None else "",
        "Where the tokens went": _table(in_words(summary["ledger"])),
        "Summary": _table(in_words({k: v for k, v in summary.items() if k not in ("kind", "ledger")})),
        "Patch": _table(
            {
                "architecture": f"{patch.model_type}, {patch.n_layers} layers",
                "attention": f"{patch.attn_backend}: {patch.attn_reason}",
                **{f"fused: {kind}": what for kind, what in patch.fused.items()},
                **{f"not fused: {kind}": why for kind, why in patch.not_fused.items()},
            }
        ),
        "Versions": _table(config["versions"]),
        "Configuration": _table(config["options"] | {"processes": config.get("processes")}),
    }
    body = "\n".join(f"<h2>{title}</h2>\n{content}" for title, content in sections.items() if content)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{model}: training report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{model}: {summary['steps']:,} updates in {summary['seconds']:,.1f} s</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


def _svg(name: str, figure: Figure) -> str:
    """Return a figure as an `<svg>` element: text stays text, and nothing in it names an address.

    `name` keeps its ids apart from those of other figures.
    """
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    text = render(figure, "svg", salt=name, metadata=metadata).decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", text)
    return f"<figure>{text}</figure>"


def _answers(demo: Mapping[str, Any]) -> str:
    before, after = (demo[f"exact_match_{name}"] for name in ("before", "after"))
    columns = ("prompt", "before", "after", "expected")
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = ["".join(_cell(example[column]) for column in columns) for example in demo["examples"]]
    body = "".join(f"<tr>{row}</tr>" for row in (head, *rows))
    scores = f"Answered to the letter: {before:.1%} before training, {after:.1%} after it."
    return f'{_note(scores)}<table class="answers">{body}</table>'


def _row(row: PackedRowSeen) -> str:
    lengths = ", ".join(map(str, row.lengths))
    if len(row.lengths) > _MOST_LENGTHS:
        lengths = f"{min(row.lengths):,} to {max(row.lengths):,}"
    legend = (
        f"{len(row.lengths)} documents of {lengths} tokens. Lines are their "
        "boundaries, which no token sees across. Dark tokens count in the loss: "
        f"{int(row.is_counted.sum()):,} of {len(row.is_counted):,}."
    )
    if row.images:
        legend += f" Images have {sum(image.tokens for image in row.images):,} of the tokens."
    return _svg("row", draw_row(row)) + _note(legend)


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def in_words(values: Mapping[str, Any]) -> dict[str, object]:
    """Name figures by words, with their units, one by one; leave out those that are 0 or unknown."""
    figures: dict[str, object] = {}
    for name, value in values.items():
        label = _WORDS.get(name, name.replace("_", " "))
        if isinstance(value, Mapping):
            figures |= {f"{label}: {key}": figure for key, figure in in_words(value).items()}
        elif name.startswith("peak_memory") and not isinstance(value, str):
            sizes = value if isinstance(value, list) else [value]
            figures[label] = ", ".join(f"{size / 2**30:,.2f} GiB" for size in sizes)
        elif value:
            figures[label] = _as_text(name, value)
    return figures


def _as_text(name: str, value: object) -> object:
    if isinstance(value, float):
        return f"{value:.1%}" if name in ("mfu", "hfu") else f"{value:,.6g}"
    return shortened(value) if isinstance(value, int) else value


def _table(values: Mapping[str, object]) -> str:
    rows = [f"<tr><th>{_text(name)}</th>{_cell(value)}</tr>" for name, value in values.items()]
    return f"<table>{''.join(rows)}</table>"


def _cell(value: object) -> str:
    return f"<td>{_text(value if isinstance(value, str) else json.dumps(value))}</td>"


def _text(value: object) -> str:
    return escape(printable(str(value)))

"""`report.html`: a run on one page that loads nothing and needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.errors import first_line, printable
from unsloth_pack.patching.report import PatchReport
from unsloth_pack.report import terminal

# A packed row as a figure: its documents, their boundaries, the tokens that count, and its images.

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_IMAGES = 16  # that fit side by side
_MARGIN = 0.08  # of the place of an image, on each side


@dataclass(frozen=True, eq=False)
class ImageSeen:
    """An image of a packed row.

    Args:
        first: its first token in the row.
        tokens: that it takes.
        pixels: `[height, width, 3]` bytes.
    """

    first: int
    tokens: int
    pixels: np.ndarray


@dataclass(frozen=True)
class PackedRowSeen:
    """One packed row, to be drawn.

    Args:
        lengths: of its documents, in tokens.
        is_counted: `[tokens]` whether a token's label counts in the loss.
        capacity: tokens that the row has room for.
        images: in the order of their tokens.
    """

    lengths: Sequence[int]
    is_counted: np.ndarray
    capacity: int
    images: Sequence[ImageSeen] = ()


def row_of_batch(batch: Mapping[str, Any], processor: Any, images: Sequence[Any]) -> PackedRowSeen:
    """A batch of `VisionDataCollator` for a model of the Qwen-VL family, to be drawn.

    Args:
        processor: that the collator has.
        images: of the batch, of Pillow, in the order of their tokens.
    """
    is_image = batch["input_ids"][0].numpy() == processor.image_token_id
    grids = np.asarray(batch.get("image_grid_thw", ()), np.int64).reshape(-1, 3)
    tokens = [int(grid.prod()) // processor.image_processor.merge_size**2 for grid in grids]
    pixels = [np.asarray(image.convert("RGB")) for image in images]
    is_counted = batch["labels"][0].numpy() != IGNORE_INDEX
    lengths = batch["packed_seq_lengths"]
    return PackedRowSeen(lengths, is_counted, sum(lengths), placed(is_image, tokens, pixels))


def placed(is_image: np.ndarray, tokens: Sequence[int], pixels: Sequence[np.ndarray]) -> list[ImageSeen]:
    """The images of a row.

    Args:
        is_image: `[tokens]` where images stand.
        tokens: of each image.
    """
    places = np.flatnonzero(is_image)
    firsts = places[np.cumsum([0, *tokens])[:-1]].tolist()
    return [ImageSeen(*each) for each in zip(firsts, tokens, pixels, strict=True)]


def draw_row(row: PackedRowSeen) -> Figure:
    """Documents side by side, dark where a token counts in the loss, with a line at every boundary.

    Images stand above, each tied to its tokens, up to the sixteenth.
    """
    import matplotlib
    from matplotlib.figure import Figure

    images = row.images[:_MOST_IMAGES]
    figure = Figure(figsize=(10, 2.8 if images else 1.6), layout="constrained")
    axes = figure.add_subplot(xlabel="token", yticks=[], xlim=(0, row.capacity), ylim=(0, 2 if images else 1))
    ends = np.cumsum(row.lengths)
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    whole = 0.5 if images else 1.0  # of the height
    for number, (end, length) in enumerate(zip(ends, row.lengths, strict=True)):
        colour = colours[number % len(colours)]
        axes.axvspan(end - length, end, ymax=whole, color=colour, alpha=0.3, linewidth=0)
        for first, last in _runs(row.is_counted[end - length : end]):
            axes.axvspan(end - length + first, end - length + last, ymax=whole, color=colour, linewidth=0)
        axes.axvline(end, ymax=whole, color="black", linewidth=1, gid=f"boundary-{number}")
    axes.axvspan(ends[-1], row.capacity, ymax=whole, color="0.85", linewidth=0)
    for number, image in enumerate(images):
        _draw_image(axes, image, number / len(images), 1 / len(images), row.capacity)
    return figure


def _draw_image(axes: Any, image: ImageSeen, left: float, width: float, capacity: int) -> None:
    """An image above the row, in the place from `left` on, in shares of the width."""
    inset = axes.inset_axes((left + width * _MARGIN, 0.62, width * (1 - 2 * _MARGIN), 0.36))
    inset.imshow(image.pixels, interpolation="nearest")
    inset.set(xticks=[], yticks=[])
    axes.axvspan(image.first, image.first + image.tokens, ymin=0.5, ymax=0.52, color="black", linewidth=0)
    middle = image.first + image.tokens / 2
    axes.plot([middle, (left + width / 2) * capacity], [1.04, 1.22], color="0.4", linewidth=0.8)


def _runs(marks: np.ndarray) -> list[tuple[int, int]]:
    """The first place of each run of true marks, and the first behind it."""
    edges = np.diff(np.concatenate([[0], marks.astype(np.int8), [0]]))
    return list(zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist(), strict=True))


# Figures of a run as SVG that stands inside a page: text stays text, and nothing in it names an address.


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
        if name == "loss":
            _draw_losses(axes, lines)
        else:
            _plot(axes, lines, name, unit, None)
            axes.grid(alpha=0.3)
    return figure


def _draw_losses(axes: Any, log: Sequence[dict[str, Any]]) -> None:
    _plot(axes, log, "loss", 1.0, "training")
    _plot(axes, log, "eval_loss", 1.0, "evaluation", marker="o", markersize=3)
    if axes.lines:
        axes.legend()
    axes.grid(alpha=0.3)


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
    return _svg(lambda: _draw_lengths(lengths, max_length, (10, 2.8)), "lengths")


def _draw_lengths(lengths: np.ndarray, max_length: int, size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    title = f"{len(lengths):,} documents, median {np.median(lengths):.0f} tokens"
    axes = figure.add_subplot(xlabel="tokens", ylabel="documents", title=title)
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
) -> None:
    points = [(line["step"], line[name] / unit) for line in log if line.get(name) is not None]
    if points:
        alone = {"marker": "o"} if len(points) == 1 else {}
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2, **alone | style)


def _svg(draw: Callable[[], Figure], name: str) -> str:
    """The figure as an `<svg>` element. `name` keeps its ids apart from those of other figures."""
    text = terminal.render(draw, "svg", salt=name, metadata=_NO_METADATA).decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = _NAMESPACE.sub("", text).replace("xlink:href", "href")
    return _ID.sub(rf"\1{name}-", text)


NAME = "report.html"
_MARK = '<meta name="generator" content="unsloth_pack">'
_HEAD = 1024  # bytes, in which the mark stands
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
th { font-weight: 600; width: 18rem; } td.number { font-variant-numeric: tabular-nums; }
table.answers { table-layout: fixed; } table.answers th { width: auto; }
p.note { color: #666; }
"""


@dataclass(frozen=True)
class RunSeen:
    """What the page shows of a run beside its metrics file.

    Args:
        patch: what was fused.
        lengths: `[documents]` tokens of the training documents; None where the data streams.
        row: a packed row; None where rows are not packed, or stream.
        max_length: at which documents are cut.
    """

    patch: PatchReport
    lengths: np.ndarray | None
    row: PackedRowSeen | None
    max_length: int


def write_page(folder: Path, lines: Sequence[Mapping[str, Any]], seen: RunSeen) -> str | None:
    """Write the page of a run, whole or not at all.

    Args:
        folder: of the run.
        lines: of its metrics file.

    Returns:
        Why there is no page: a file of its name is somebody else's. None if it was written.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / NAME
    if not path.is_symlink() and path.exists() and not _is_ours(path):
        return f"{path} is a file of somebody else"
    text = page_of(lines, seen)
    with write_file(path) as file:
        file.write(text.encode("utf-8", "replace"))
    return None


def page_of(lines: Sequence[Mapping[str, Any]], seen: RunSeen) -> str:
    """The page as HTML."""
    by_kind: dict[str, list[Any]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    (config,), summary = by_kind["config"], by_kind["summary"][-1]
    model = config["options"].get("model_name", "")
    body = [
        f"<h1>{_text(model)}: {summary['steps']:,} updates in {summary['seconds']:,.1f} s</h1>",
        _section("Over the run", _drawn(lambda: curves(by_kind.get("log", [])))),
        *_held_out(by_kind.get("demo", [])),
        _section("Lengths of documents", _lengths(seen)),
        _section("A packed row", _row(seen)),
        _section("Where the tokens went", _table(summary["ledger"])),
        _section("Summary", _table({k: v for k, v in summary.items() if k not in ("kind", "ledger")})),
        _section("Patch", _table(_of_patch(seen.patch))),
        _section("Versions", _table(config["versions"])),
        _section("Configuration", _table(config["options"] | {"processes": config.get("processes")})),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'{_MARK}\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(model)}: training report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _is_ours(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return _MARK.encode() in file.read(_HEAD)
    return False


def _lengths(seen: RunSeen) -> str:
    lengths = seen.lengths
    if lengths is None:
        return _note("The data streams, so the lengths of all documents are not known.")
    return _drawn(lambda: lengths_histogram(lengths, seen.max_length))


def _held_out(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The answers of a demo's model; nothing for other runs."""
    if not lines:
        return []
    scores = {name: lines[-1][f"exact_match_{name}"] for name in ("before", "after")}
    told = f"Answered to the letter: {scores['before']:.1%} before training, {scores['after']:.1%} after it."
    columns = ("prompt", "before", "after", "expected")
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = ["".join(_cell(example[column]) for column in columns) for example in lines[-1]["examples"]]
    body = "".join(f"<tr>{row}</tr>" for row in (head, *rows))
    return [_section("Held-out rows", f'{_note(told)}<table class="answers">{body}</table>')]


def _row(seen: RunSeen) -> str:
    row = seen.row
    if row is None:
        return _note("Rows stream, or are not packed.")
    counted = int(row.is_counted.sum())
    told = (
        f"{len(row.lengths)} documents of {', '.join(map(str, row.lengths))} tokens. Lines are their "
        "boundaries, which no token sees across. Dark tokens count in the loss: "
        f"{counted:,} of {len(row.is_counted):,}."
    )
    if row.images:
        told += f" Images have {sum(image.tokens for image in row.images):,} of the tokens."
    return _drawn(lambda: packed_row(row)) + _note(told)


def _drawn(draw: Callable[[], str]) -> str:
    try:
        return f"<figure>{draw()}</figure>"
    except Exception as error:  # a page without a figure tells more than none
        return _note(f"This figure could not be drawn: {type(error).__name__}: {first_line(error)}")


def _of_patch(patch: PatchReport) -> dict[str, str]:
    return {
        "architecture": f"{patch.model_type}, {patch.n_layers} layers",
        "attention": f"{patch.attn_backend}: {patch.attn_reason}",
        **{f"fused: {kind}": what for kind, what in patch.fused.items()},
        **{f"not fused: {kind}": why for kind, why in patch.not_fused.items()},
    }


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}"


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"<tr><th>{_text(name)}</th>{_cell(value)}</tr>" for name, value in values.items()]
    return f"<table>{''.join(rows)}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
        return f'<td class="number">{shown}</td>'
    return f"<td>{_text(value if isinstance(value, str) else json.dumps(value))}</td>"


def _text(value: Any) -> str:
    return escape(printable(str(value)))


# `loss.png` and `lengths.png`, drawn without a display.


def plot_loss(log_history: Sequence[dict[str, Any]], path: Path) -> None:
    """The training loss over the updates, and the evaluation loss where there is one.

    Args:
        log_history: the trainer's, with `step` and `loss` or `eval_loss` in some entries.
    """
    _save(lambda: _draw_loss(log_history), path)


def plot_lengths(lengths: np.ndarray, max_length: int, path: Path) -> None:
    """A histogram of document lengths, in tokens, with the length at which rows are cut."""
    _save(lambda: _draw_lengths(lengths, max_length, (7, 4)), path)


def _draw_loss(log: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    _draw_losses(figure.add_subplot(xlabel="update", ylabel="loss (nats a token)"), log)
    return figure


def _save(draw: Callable[[], Figure], path: Path) -> None:
    rendered = terminal.render(draw, path.suffix.removeprefix(".") or "png", dpi=130)
    with write_file(path) as file:
        file.write(rendered)

"""`unsloth-pack stats`: how long the documents are, and what packing would do to them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator
from rich.console import Console
from rich.table import Table

from unsloth_pack.config import Parser
from unsloth_pack.config.values import Count, FilePath
from unsloth_pack.report.terminal import LastingConsole, document_lengths, lines_of_parts
from unsloth_pack.run.data_flags import add_data_flags, add_image_flags, check_sources, read_documents
from unsloth_pack.run.machine import check_picture

if TYPE_CHECKING:
    from unsloth_pack.data.mixture import Mixture
    from unsloth_pack.packing import LengthReport, PackForecast
    from unsloth_pack.run.images import ImageCounts

_UNCUT = 2**40  # tokens, more than any document has
_DEFAULT_CAPS = (1024, 2048, 4096)


def run(arguments: Sequence[str]) -> int:
    """Print the report of a data set; with `--json` as JSON, with `--png` also a histogram."""
    flags = build_parser().parse(arguments)
    png = Path(flags["png"]) if "png" in flags else None
    if png is not None:
        check_picture("png", png)
    check_sources(flags)

    from unsloth_pack.cli import quieten
    from unsloth_pack.packing import length_report, vision_tokens

    quieten(show_bars=not flags.get("json"))
    mixture, prepared, _ = read_documents(flags, flags.get("model_name", "demo"), _UNCUT)
    images = None if prepared is None else prepared.counts(mixture.train)
    patch, merge = flags.get("vision_patch", 16), flags.get("vision_merge", 2)
    of_images = (vision_tokens(height, width, patch, merge) for height, width in flags.get("image_sizes", []))
    lengths = document_lengths(mixture.train.rows) + sum(of_images)
    caps = [*flags.get("pack_lengths", ()), *filter(None, [flags.get("max_seq_length")])]
    report = length_report(
        lengths,
        caps or _DEFAULT_CAPS,
        flags.get("world_size", 1),
        flags.get("per_device_train_batch", 1),
        flags.get("target_effective", 32),
        flags.get("binsize", 512),
    )
    if png is not None:
        from unsloth_pack.report.html import plot_lengths

        png.parent.mkdir(parents=True, exist_ok=True)
        plot_lengths(lengths, max(forecast.capacity for forecast in report.forecasts), png)
    if flags.get("json"):
        values = asdict(report) | {"data_sets": [*map(asdict, mixture.parts)]}
        LastingConsole().show_json(values | ({"images": asdict(images)} if images else {}))
    else:
        _print(LastingConsole(), report, mixture, images)
    return 0


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    parser = Parser(
        prog="unsloth-pack stats", description="Document lengths, and a forecast of packing them."
    )
    add_data_flags(parser)
    parser.add_option("seed", "of what a mixture of data sets draws (default: 3407, as for training)")
    tokenizer = "whose tokenizer is used: demo, a folder, or a hub name (default: demo)"
    parser.add_option("model_name", tokenizer)
    parser.add_option("num_proc", "processes that read and tokenise the data (default: one for each core)")
    parser.add_option("max_seq_length", "a row length to forecast, as for training (default: none)")

    def add(name: str, kind: object, unit: str, help: str) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, type=kind, metavar=unit, help=help)

    lengths = Annotated[tuple[Count, ...], BeforeValidator(lambda text: text.split(","))]
    sizes = Annotated[tuple[tuple[Count, Count], ...], BeforeValidator(_sizes)]
    default = "default: --max_seq_length, else 1024,2048,4096"
    as_if = "forecast as if every document held such images"
    add("binsize", Count, "TOKENS", "width of a bar of the histogram (default: 512)")
    add("pack_lengths", lengths, "TOKENS,...", f"row lengths to forecast ({default})")
    add("world_size", Count, "RANKS", "processes that share the rows (default: 1)")
    add("per_device_train_batch", Count, "ROWS", "rows of a micro-batch (default: 1)")
    add("target_effective", Count, "DOCUMENTS", "documents that an update should see (default: 32)")
    add("image_sizes", sizes, "HxW,...", f"heights and widths in pixels: {as_if} (default: none)")
    add("vision_patch", Count, "PIXELS", "side of a vision patch (default: 16)")
    add("vision_merge", Count, "PATCHES", "side of the square of patches that is one token (default: 2)")
    add_image_flags(parser, may_shrink=False)
    parser.add_switch("--json", "print JSON")
    add("png", FilePath, "FILE", "also draw the histogram into this file (default: none)")
    return parser


def _sizes(text: str) -> list[list[str]]:
    sizes = [size.split("x") for size in text.lower().split(",")]
    if any(len(size) != 2 for size in sizes):
        raise ValueError("heights and widths in pixels, such as 1024x768,512x512")
    return sizes


def _print(
    console: Console, report: "LengthReport", mixture: "Mixture", images: "ImageCounts | None"
) -> None:
    lines = [f"{name}: {line}" for name, line in lines_of_parts(mixture.parts)]
    lines.append(
        f"{report.count:,} documents, {report.tokens:,} tokens: mean {report.mean:.0f}, "
        f"median {report.median:.0f}, p95 {report.p95:.0f}, p99 {report.p99:.0f}, "
        f"min {report.min}, max {report.max}"
    )
    if images:
        share = images.vision_tokens / report.tokens
        line = f"{images.images:,} images, {images.vision_tokens:,} vision tokens ({share:.1%} of all)"
        line += "" if images.resized is None else f", {images.resized:,} images resized"
        line += f"; {images.rows_broken:,} rows with a broken image left out" if images.rows_broken else ""
        lines.append(line)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    histogram = Table("tokens", "documents", "", title="lengths", title_justify="left")
    most = max(n for _, _, n in report.histogram)
    for low, high, n in report.histogram:
        histogram.add_row(f"{low:,} to {high - 1:,}", f"{n:,}", "█" * -(-40 * n // most))
    console.print(histogram)
    rows: list[tuple[str, Callable[[PackForecast], str]]] = [
        ("rows", lambda f: f"{f.packs:,}"),
        ("documents a row", lambda f: f"{f.documents_per_pack:.1f}"),
        ("full", lambda f: f"{f.fill:.2%}"),
        ("documents cut", lambda f: f"{f.overlong:,}"),
        ("tokens cut", lambda f: f"{f.tokens_cut:,}"),
        ("steps an epoch", lambda f: f"{f.steps_per_epoch:,}"),
        ("gradient accumulation", lambda f: f"{f.accumulation}"),
        ("updates an epoch", lambda f: f"{f.optimizer_steps:,}"),
        ("documents an update", lambda f: f"{f.effective_batch:.1f}"),
    ]
    forecasts = Table("rows of", *(f"{f.capacity:,}" for f in report.forecasts), title="packed")
    for title, show in rows:
        forecasts.add_row(title, *map(show, report.forecasts))
    for batch in report.forecasts[0].padding:
        shares = (f"{forecast.padding[batch]:.1%}" for forecast in report.forecasts)
        forecasts.add_row(f"padding in batches of {batch}", *shares)
    console.print(forecasts)

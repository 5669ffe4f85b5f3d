"""`unsloth-pack stats`: how long the documents are, and what packing would do to them."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from unsloth_pack.config import Parser
from unsloth_pack.config.options import TrainingOptions
from unsloth_pack.config.values import Count, FilePath, Seed
from unsloth_pack.errors import InputError
from unsloth_pack.run.data_flags import (
    add_data_flags,
    add_image_flags,
    check_sources,
    data_options,
    image_options,
)
from unsloth_pack.run.machine import check_picture

if TYPE_CHECKING:
    from rich.console import Console

    from unsloth_pack.data.mixture import Mixture
    from unsloth_pack.packing import LengthReport
    from unsloth_pack.run.images import ImageCounts

_UNCUT = 2**40  # tokens, more than any document has
_DEFAULT_CAPS = (1024, 2048, 4096)


def run(arguments: Sequence[str]) -> int:
    """Print the report of a data set under a tokenizer; with `--json` as JSON, with `--png` also a histogram.

    Raises:
        InputError: a bad argument, data that cannot be read, or a tokenizer that cannot be loaded.
    """
    given = _parser().parse(arguments)
    png = Path(given["png"]) if "png" in given else None
    if png is not None:
        check_picture("png", png)
    check_sources(given)

    from unsloth_pack.cli.quiet import quieten
    from unsloth_pack.packing import length_report
    from unsloth_pack.report.terminal import LastingConsole, row_lengths

    as_json = given.get("json", False)
    quieten(show_bars=not as_json)
    mixture, images = _mixture(given)
    lengths = row_lengths(mixture.train.rows) + _image_tokens(given)
    caps = [*given.get("pack_lengths", ()), *(given[n] for n in ["max_seq_length"] if n in given)]
    report = length_report(
        lengths,
        caps or _DEFAULT_CAPS,
        given.get("world_size", 1),
        given.get("per_device_train_batch", 1),
        given.get("target_effective", 32),
        given.get("binsize", 512),
    )
    if png is not None:
        from unsloth_pack.report.html import plot_lengths

        png.parent.mkdir(parents=True, exist_ok=True)
        plot_lengths(lengths, max(forecast.capacity for forecast in report.forecasts), png)
    if as_json:
        found = {"data_sets": [*map(asdict, mixture.parts)]}
        LastingConsole().show_json(
            {**asdict(report), **found, **({"images": asdict(images)} if images else {})}
        )
    else:
        _print(LastingConsole(), report, mixture, images)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="unsloth-pack stats", description="Document lengths, and a forecast of packing them."
    )
    add = parser.add_argument
    add_data_flags(parser)
    add(
        "--seed",
        type=Seed,
        help="of what a mixture of data sets draws (default: 3407, as for training)",
    )
    add(
        "--model_name",
        type=FilePath,
        help="whose tokenizer is used: demo, a folder, or a hub name (default: demo)",
    )
    parser.add_option("num_proc", "processes that read and tokenise the data (default: one for each core)")
    add("--binsize", type=Count, metavar="TOKENS", help="width of a bar of the histogram (default: 512)")
    add(
        *("--pack_lengths", "--pack-lengths"),
        type=Annotated[tuple[Count, ...], BeforeValidator(lambda text: text.split(","))],
        metavar="TOKENS,...",
        help="row lengths to forecast (default: --max_seq_length, else 1024,2048,4096)",
    )
    add(
        "--max_seq_length",
        type=Count,
        metavar="TOKENS",
        help="a row length to forecast, as for training (default: none)",
    )
    add(
        "--world_size",
        "--world-size",
        type=Count,
        metavar="RANKS",
        help="processes that share the rows (default: 1)",
    )
    add(
        *("--per_device_train_batch", "--per-device-train-batch"),
        type=Count,
        metavar="ROWS",
        help="rows of a micro-batch (default: 1)",
    )
    add(
        *("--target_effective", "--target-effective"),
        type=Count,
        metavar="DOCUMENTS",
        help="documents that an update should see (default: 32)",
    )
    add(
        *("--image_sizes", "--image-sizes"),
        type=Annotated[tuple[tuple[Count, Count], ...], BeforeValidator(_sizes)],
        metavar="HxW,...",
        help="heights and widths in pixels: forecast as if every document held such images (default: none)",
    )
    add("--vision_patch", type=Count, metavar="PIXELS", help="side of a vision patch (default: 16)")
    add(
        "--vision_merge",
        type=Count,
        metavar="PATCHES",
        help="side of the square of patches that is one token (default: 2)",
    )
    add_image_flags(parser, may_shrink=False)
    parser.add_switch("--json", "print JSON")
    add("--png", type=FilePath, metavar="FILE", help="also draw the histogram into this file (default: none)")
    return parser


def _sizes(text: str) -> list[list[str]]:
    sizes = [size.split("x") for size in text.lower().split(",")]
    if any(len(size) != 2 for size in sizes):
        raise ValueError("heights and widths in pixels, such as 1024x768,512x512")
    return sizes


def _image_tokens(given: dict[str, Any]) -> int:
    """The vision tokens that every document is taken to hold."""
    from unsloth_pack.packing import vision_tokens

    sizes = given.get("image_sizes", ())
    if not sizes and (flag := next((f for f in ("vision_patch", "vision_merge") if f in given), None)):
        raise InputError(f"{flag} is {given[flag]} without images; give --image_sizes too")
    patch, merge = given.get("vision_patch", 16), given.get("vision_merge", 2)
    return sum(vision_tokens(height, width, patch, merge) for height, width in sizes)


def _mixture(given: dict[str, Any]) -> "tuple[Mixture, ImageCounts | None]":
    from unsloth_pack.run.documents import load_tokenizer, load_training_data, mixed_documents
    from unsloth_pack.run.images import prepared_images
    from unsloth_pack.run.prepare import refuse_unused_folder

    data, model_name = data_options(given), given.get("model_name", "demo")
    rows = load_training_data(data)
    tokenizer = load_tokenizer(model_name)
    if getattr(tokenizer, "eos_token_id", None) is None:
        raise InputError(f"the tokenizer of {model_name} has no end-of-sequence token; name another model")
    seed = given.get("seed", TrainingOptions().seed)
    how: dict[str, Any] = {"how": data.mixture, "seed": seed, "most": data.sample_limit}
    settings = image_options(given)
    images = prepared_images(model_name, tokenizer, settings, [each.rows for each in rows])
    mixture = mixed_documents(rows, tokenizer, _UNCUT, num_proc=data.num_proc, images=images, **how)
    if images is None:
        return mixture, None
    refuse_unused_folder(settings, mixture.train.has_files)
    return mixture, images.counts(mixture.train)


def _print(
    console: "Console", report: "LengthReport", mixture: "Mixture", images: "ImageCounts | None"
) -> None:
    from rich.table import Table

    from unsloth_pack.report.terminal import lines_of_parts

    for name, line in lines_of_parts(mixture.parts):
        console.print(f"{name}: {line}", highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"{report.count:,} documents, {report.tokens:,} tokens: mean {report.mean:.0f}, "
        f"median {report.median:.0f}, p95 {report.p95:.0f}, p99 {report.p99:.0f}, "
        f"min {report.min}, max {report.max}",
        highlight=False,
    )
    if images:
        more = "" if images.resized is None else f", {images.resized:,} images resized"
        more += f"; {images.rows_broken:,} rows with a broken image left out" if images.rows_broken else ""
        console.print(
            f"{images.images:,} images, {images.vision_tokens:,} vision tokens "
            f"({images.vision_tokens / report.tokens:.1%} of all){more}",
            highlight=False,
            soft_wrap=True,
        )
    histogram = Table("tokens", "documents", "", title="lengths", title_justify="left")
    most = max(n for _, _, n in report.histogram)
    for low, high, n in report.histogram:
        histogram.add_row(f"{low:,} to {high - 1:,}", f"{n:,}", "█" * -(-40 * n // most))
    console.print(histogram)
    rows: list[tuple[str, Callable[[Any], str]]] = [
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

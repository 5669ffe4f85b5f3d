"""The grid as a table: a line an architecture, backend and dtype; then failures, and why rows are missing."""

import platform
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

import peft
import torch
import transformers
from tiny import DEVICE, MIXED_LENGTHS

from .judge import FACTOR, QUANTITIES, holds

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_HEADINGS = ("architecture", "backend", "dtype", "measured", "captured", "failed", "refused", *QUANTITIES)


def about(images=False):
    """What the numbers depend on."""
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or "cpu",
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)},
        "python": platform.python_version(),
        "document_lengths": None if images else MIXED_LENGTHS,
    }


def default_path(images=False):
    """benchmarks/results/grid-h200-2026-11-22.json on an "NVIDIA H200", grid-images-h200-... with images."""
    device = torch.cuda.get_device_name().split()[-1].lower() if DEVICE == "cuda" else "cpu"
    return _RESULTS / f"grid-{'images-' if images else ''}{device}-{date.today().isoformat()}.json"


def table(result, rows):
    """Markdown: groups with the worst multiples of each, failures, and the reasons of what is missing."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["arch"], row["backend"], row["dtype"]].append(row)
    return "\n".join(
        [
            f"# Correctness grid, {result['device']}, {result['date']}",
            "",
            *_summary(result, rows),
            "",
            *_lines(_HEADINGS, [[*key, *_cells(group)] for key, group in groups.items()]),
            *_failures(rows),
            *_reasons("Refused", "refused", rows),
            *_reasons("Captured steps that run uncaptured", "uncaptured", rows),
            *_reasons("Branches that share no prefix", "unshared", rows),
            *_reasons("LoRA layers that run through PEFT's forward", "unfused", rows),
            *_not_finite(rows),
            "",
        ]
    )


def _summary(result, rows):
    counts = Counter(_kind(row) for row in rows)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    if lengths := result["document_lengths"]:
        yield f"{versions}; documents of {', '.join(map(str, lengths))} tokens."
    else:
        yield f"{versions}; documents with 0, 1, 2 and 3 images."
    yield ""
    if not result["complete"]:
        yield f"**Partial**: {len(rows)} of {result['n_rows']} rows."
    for name, values in result["only"].items():
        yield f"Only {name} {', '.join(values)}."
    yield (
        f"{len(rows)} rows: {counts['measured']} measured, "
        f"{sum(not holds(row) for row in rows)} failed, {counts['refused']} refused, "
        f"{counts['uncaptured']} not captured."
    )
    yield (
        "The last columns are the worst errors, as multiples of those of untouched transformers and PEFT in "
        f"the same dtype; {FACTOR} is allowed."
    )
    yield ""
    lucky = [row["first_draw"] for row in rows if "first_draw" in row and holds(row)]
    if lucky:
        yield (
            f"{len(lucky)} rows were above with the first documents, by up to {max(lucky):.2f}, and are not "
            "over 4, 16 or 64 draws of documents."
        )
    for key, plain in (("of_alone", "each document alone"), ("of_same_row", "the same row")):
        above = sum(row[key] > FACTOR for row in rows if row.get(key) is not None)
        yield f"By plain's errors with {plain} only, {above} would be above."


def _kind(row):
    return next((kind for kind in ("refused", "uncaptured") if kind in row), "measured")


def _cells(group):
    kinds = Counter(_kind(row) for row in group)
    measured = [row for row in group if _kind(row) == "measured"]
    yield kinds["measured"]
    yield sum(row["captured"] for row in measured)
    yield sum(not holds(row) for row in group)
    yield kinds["refused"]
    for quantity in QUANTITIES:
        values = [row[quantity] for row in measured if row.get(quantity) is not None]
        yield f"{max(values):.2f}" if values else ""


def _lines(headings, lines):
    """A Markdown table with columns of one width, to be read as it is."""
    cells = [[str(cell) for cell in line] for line in (headings, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for line in cells:
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"


def _failures(rows):
    failed = [row for row in rows if not holds(row)]
    if failed:
        yield from ("", "## Failed", "")
    for row in failed:
        keys = ("arch", "window", "variant", "dtype", "backend", "checkpointing")
        captured = " captured" if row["captured"] else ""
        more = f" (and {len(row['failed']) - 3} more)" if len(row["failed"]) > 3 else ""
        yield f"- {' '.join(row[key] for key in keys)}{captured}: {'; '.join(row['failed'][:3])}{more}"


def _reasons(title, key, rows):
    reasons = Counter(row[key] for row in rows if key in row)
    if reasons:
        yield from ("", f"## {title}", "")
    for reason, n in reasons.most_common():
        yield f"- {n} rows: {reason}"


def _not_finite(rows):
    where = Counter((row["arch"], row["variant"], row["dtype"]) for row in rows if "not_finite" in row)
    if where:
        yield from ("", "## Not finite in plain transformers and PEFT either, and not judged there", "")
    for names, n in where.items():
        yield f"- {n} rows: {' '.join(names)}"

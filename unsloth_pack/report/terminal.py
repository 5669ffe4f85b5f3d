"""Where a command prints."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from unsloth_pack.data.cache import scan
from unsloth_pack.packing.dataset import list_lengths
from unsloth_pack.packing.planner import padded_slots


class LastingConsole(Console):
    """A console that outlives its reader: if the pipe closes (`| head`), the command goes on to its end."""

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        with suppress(SystemExit):
            super().on_broken_pipe()  # points stdout at nothing, and raises SystemExit

    def show_json(self, value: Any) -> None:
        self.out(json.dumps(value, indent=1), highlight=False)


class RunConsole(LastingConsole):
    """The console of a run, which goes on if its output ends: the reader of a pipe, or its terminal."""

    def _check_buffer(self) -> None:
        """Write; rich knows a pipe without a reader, and a terminal that is gone raises another OSError."""
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Print nothing more, and say so on stderr."""
        super().on_broken_pipe()
        with suppress(OSError):  # stderr may be the same pipe
            print("unsloth-pack: nobody reads the output any more; the run goes on", file=sys.stderr)


# The fill of the rows of a training set.

if TYPE_CHECKING:
    import datasets
    from matplotlib.figure import Figure

    from unsloth_pack.data.mixture import Part


@dataclass(frozen=True)
class RowFill:
    """Rows as the model will see them.

    Args:
        rows, documents, tokens: in one pass over the data.
        slots: tokens that the rows have room for: packed rows times their capacity; for padded rows, the
            lengths that their batches are padded to, in one random order.
        slots_computed: slots that the model computes; packed rows end with their last document.
    """

    rows: int
    documents: int
    tokens: int
    slots: int
    slots_computed: int

    @property
    def documents_per_row(self) -> float:
        return self.documents / self.rows

    @property
    def fill(self) -> float:
        """The share of slots that hold a token, 0 to 1."""
        return self.tokens / self.slots

    @property
    def padding(self) -> int:
        """Slots that are computed and hold no token."""
        return self.slots_computed - self.tokens


def row_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """`[rows]` int64: the tokens of every row."""
    return list_lengths(dataset, "input_ids")


def document_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """`[documents]` int64: the tokens of every document, packed or not."""
    import pyarrow.compute as pc

    if "seq_lengths" not in dataset.column_names:
        return row_lengths(dataset)
    batches = scan(dataset, ["seq_lengths"], batch_size=10_000)
    lengths = [pc.list_flatten(table["seq_lengths"]).to_numpy() for table in batches]
    return np.concatenate(lengths).astype(np.int64)


def fill_of_packed(dataset: datasets.Dataset, capacity: int) -> RowFill:
    """The fill of packed rows (`input_ids` and `seq_lengths`) that may hold `capacity` tokens."""
    tokens = int(row_lengths(dataset).sum())
    documents = int(list_lengths(dataset, "seq_lengths").sum())
    return RowFill(len(dataset), documents, tokens, len(dataset) * capacity, tokens)


def fill_of_joined(dataset: datasets.Dataset) -> RowFill:
    """The fill of rows that are joined into one without padding."""
    tokens = int(row_lengths(dataset).sum())
    return RowFill(len(dataset), len(dataset), tokens, tokens, tokens)


def fill_of_padded(dataset: datasets.Dataset, batch_size: int, seed: int) -> RowFill:
    """The fill of rows padded to the longest of their batch, in one random order."""
    lengths = row_lengths(dataset)
    order = np.random.default_rng(seed).permutation(lengths)
    slots = padded_slots(order, batch_size)
    return RowFill(len(lengths), len(lengths), int(lengths.sum()), slots, slots)


# One line for each data set of a run.


def lines_of_parts(parts: Sequence[Part], how: str = "") -> list[tuple[str, str]]:
    """A line for each data set of a mixture, and one for the columns of each that are not used.

    Args:
        how: the data sets are mixed, for those that stream.
    """
    are_weighted = len(parts) > 1 or any(part.weight != 1 for part in parts)
    mixture = [("mixture", f"{part.name}: {_share(part, parts, how)}") for part in parts if are_weighted]
    unused = [
        ("not used", f"{part.name}: {columns_line(part.unused_columns)}")
        for part in parts
        if part.unused_columns
    ]
    return mixture + unused


def columns_line(columns: Sequence[str]) -> str:
    return f"{'columns' if len(columns) > 1 else 'column'} {', '.join(columns)}"


def _share(part: Part, parts: Sequence[Part], how: str) -> str:
    if part.documents is None and how == "concatenate":
        return f"read {part.weight:g} times in a pass"
    if part.documents is None:
        return f"weight {part.weight:g}, {part.weight / sum(each.weight for each in parts):.1%} of the rows"
    total = sum(each.trained_tokens for each in parts)
    held_out = f", {part.held_out:,} held out" if part.held_out else ""
    return (
        f"weight {part.weight:g}, {part.trained_documents:,} from {part.documents:,} documents{held_out}, "
        f"{part.trained_tokens:,} tokens ({part.trained_tokens / total:.1%})"
    )


# Renders every figure of a run, without a display. matplotlib is imported with the first.


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


# Peak memory: of the GPU where there is one, else of the process.


def peak_memory() -> tuple[int, str]:
    """Bytes, and what they are the peak of."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated(), "GPU memory allocated"
    if sys.platform == "linux":  # getrusage includes what the parent held when it forked
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        if high_water := re.search(r"VmHWM:\s*(\d+) kB", status):
            return int(high_water[1]) * 1024, "process memory"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process memory"


def gib(n_bytes: int) -> str:
    """Bytes for a reader."""
    return f"{n_bytes / 2**30:.2f} GiB"

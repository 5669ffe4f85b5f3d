"""Consoles of the commands, the fill of rows, and the tables that a run and `pack` print."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unsloth_pack.data.cache import scan
from unsloth_pack.errors import printable
from unsloth_pack.packing.dataset import list_lengths
from unsloth_pack.packing.planner import padded_slots

if TYPE_CHECKING:
    import datasets

    from unsloth_pack.data.mixture import Part
    from unsloth_pack.data.token_counts import TokenLedger
    from unsloth_pack.packing import PackManifest

Line = tuple[str, str]  # of a table: what, and the text


class LastingConsole(Console):
    """A console that outlives its reader: if the pipe closes (`| head`), the command goes on to its end."""

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        with suppress(SystemExit):
            super().on_broken_pipe()  # points stdout at nothing, and raises SystemExit

    def show_json(self, value: object) -> None:
        self.out(json.dumps(value, indent=1), highlight=False)


# The fill of the rows of a training set


@dataclass(frozen=True)
class RowFill:
    """Rows as the model will see them, in one pass over the data."""

    rows: int
    documents: int
    tokens: int
    slots: int  # the capacity of packed rows, else what batches in one random order are padded to
    slots_computed: int  # by the model; packed rows end with their last document

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


def document_lengths(dataset: datasets.Dataset) -> np.ndarray:
    """`[documents]` int64: the tokens of every document, packed or not."""
    import pyarrow.compute as pc

    if "seq_lengths" not in dataset.column_names:
        return list_lengths(dataset, "input_ids")
    batches = scan(dataset, ["seq_lengths"], batch_size=10_000)
    lengths = [pc.list_flatten(table["seq_lengths"]).to_numpy() for table in batches]
    return np.concatenate(lengths).astype(np.int64)


def fill_of_packed(dataset: datasets.Dataset, capacity: int) -> RowFill:
    """Compute the fill of packed rows (`input_ids` and `seq_lengths`) that may hold `capacity` tokens."""
    tokens = int(list_lengths(dataset, "input_ids").sum())
    documents = int(list_lengths(dataset, "seq_lengths").sum())
    return RowFill(len(dataset), documents, tokens, len(dataset) * capacity, tokens)


def fill_of_padded(dataset: datasets.Dataset, batch_size: int, seed: int) -> RowFill:
    """Compute the fill of rows padded to the longest of their batch, in one random order."""
    lengths = list_lengths(dataset, "input_ids")
    slots = padded_slots(np.random.default_rng(seed).permutation(lengths), batch_size)
    return RowFill(len(lengths), len(lengths), int(lengths.sum()), slots, slots)


# A run: how it went


@dataclass(frozen=True)
class RowsOfStream:
    """What a run has trained on, where the data streams."""

    fill: RowFill
    waiting: int  # documents that were read and not trained on
    read: tuple[tuple[str, int, int], ...] = ()  # of each data set of a mixture: name, rows and tokens


@dataclass(frozen=True)
class RunSummary:
    """How a run went. Speeds count no padding."""

    steps: int
    seconds: float  # of training, evaluation included
    epochs: float  # passes over the data; of a stream, those that were read to the end
    tokens_trained: int  # in all passes, without padding
    tokens_counted: int  # those of them that the loss was a mean of, as the trainer counted them
    tokens_padded: int  # computed for nothing
    documents_per_second: float
    tokens_per_second: float
    peak_memory_bytes: int  # on the rank that took the most
    peak_memory_of: str
    peak_memory_by_rank: list[int]
    first_loss: float  # as logged, in nats a token
    last_loss: float
    updates_left_out: int  # as they were not finite
    broken_images: int  # each time that one was met
    output_dir: str
    tflops: float  # a device, of model FLOPs
    mfu: float | None = None  # shares of the chip's peak, 0 to 1; None if it is not known
    hfu: float | None = None
    stream: RowsOfStream | None = None


def print_packs(
    console: Console,
    packs: PackManifest,
    folder: str,
    parts: Sequence[Part] = (),
    image_folder: str | None = None,
    is_for_adapter: bool = False,
) -> None:
    """Print what was packed, and how to train on it: from an adapter, with a folder of images."""
    begins_with = "--init_adapter" if is_for_adapter else "--model_name"
    command = ["unsloth-pack", begins_with, packs.model_name, "--dataset", folder]
    command += ["--image_folder", image_folder] if image_folder is not None else []
    command += ["--objective", packs.objective] if packs.objective != "sft" else []
    if packs.teacher is not None:
        command[1:3] = ["--objective", "distill", "--teacher", "stored", "--model_name", "STUDENT"]
    fill = RowFill(packs.rows, packs.documents, packs.tokens, packs.rows * packs.capacity, packs.tokens)
    size = sum(shard.bytes for shard in packs.shards)
    lines = [
        *ledger_lines(packs.ledger, lines_of_parts(parts)),
        ("rows", f"of {packs.capacity:,} tokens by {packs.strategy}: {fill_line(fill)}"),
        ("shards", f"{len(packs.shards)}, {size / 2**20:,.1f} MiB"),
        ("fingerprint", packs.data_fingerprint),
        ("output", folder),
        ("train with", shlex.join(command)),
    ]
    print_lines(console, "packed", lines)


def print_summary(console: Console, summary: RunSummary, ledger: TokenLedger) -> None:
    """Print speed, memory, loss and where the tokens went, at the end."""
    speed = f"{summary.documents_per_second:,.1f} samples/s, {summary.tokens_per_second:,.0f} real tokens/s"
    speed += f", {summary.tflops:,.3g} TFLOP/s"
    shares = {"MFU": summary.mfu, "HFU": summary.hfu}
    speed += "".join(f", {name} {share:.1%}" for name, share in shares.items() if share is not None)
    passes = "" if summary.stream else f" in {summary.epochs:.4g} epochs"
    tokens = f"{shortened(summary.tokens_trained)} trained{passes}"
    padding = f"; {shortened(summary.tokens_padded)} of padding" if summary.tokens_padded else ""
    lines = [
        ("updates", f"{summary.steps:,} in {summary.seconds:.1f} s"),
        ("speed", speed),
        *ledger_lines(ledger, _read_lines(summary)),
        ("tokens", f"{tokens}: {shortened(summary.tokens_counted)} counted in the loss{padding}"),
        ("peak memory", f"{summary.peak_memory_bytes / 2**30:.2f} GiB of {summary.peak_memory_of}"),
        ("loss", f"{summary.first_loss:.4f} at first, {summary.last_loss:.4f} at last"),
        ("output", summary.output_dir),
    ]
    if summary.updates_left_out:
        lines.append(("note", f"{summary.updates_left_out} updates were left out: they were not finite"))
    if summary.broken_images:
        note = f"{summary.broken_images:,} times an image could not be decoded"
        lines.append(("note", f"{note}: nothing was learned from its document"))
    print_lines(console, "done", lines)


def _read_lines(summary: RunSummary) -> list[Line]:
    """Say what was read of a stream."""
    if summary.stream is None:
        return []
    waiting = summary.stream.waiting
    left = f"; {waiting:,} documents were read and not trained on" if waiting else ""
    return [
        ("rows", f"{fill_line(summary.stream.fill)}{left}"),
        ("passes", f"{summary.epochs:,.0f} over the data were read to the end"),
        *(
            ("read", f"{name}: {rows:,} rows, {tokens:,} tokens")
            for name, rows, tokens in summary.stream.read
        ),
    ]


def print_generations(
    console: Console, before: float, after: float, count: int, examples: Sequence[Mapping[str, str]]
) -> None:
    """Print the share of `count` held-out rows answered to the letter, and a few answers side by side."""
    title = f"exact match on {count} held-out rows: {before:.1%} before, {after:.1%} after"
    table = Table(title=title, show_lines=True)
    columns = ("prompt", "before", "after", "expected")
    for heading in columns:
        table.add_column(heading, ratio=1, overflow="fold")
    for example in examples:
        table.add_row(*(Text(example[heading]) for heading in columns))
    console.print(table)


def print_lines(console: Console, title: str, lines: Iterable[Line]) -> None:
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(Text(name), Text(printable(value)))  # `Text`, since a path may look like rich's markup
    console.print(table)


def shortened(number: int) -> str:
    """Write a number of tokens or weights: all digits below a million, else millions, billions (M, B, T)."""
    unit = next((n for n in (12, 9, 6) if number >= 10**n), 0)
    return f"{number / 10**unit:,.1f} {'MBT'[unit // 3 - 2]}" if unit else f"{number:,}"


def lines_of_parts(parts: Sequence[Part]) -> list[Line]:
    """Say the share of each data set of a mixture, and which of its columns are not used."""
    are_weighted = len(parts) > 1 or any(part.weight != 1 for part in parts)
    mixture = [("mixture", f"{part.name}: {_share(part, parts)}") for part in parts if are_weighted]
    unused = [(part.name, ", ".join(part.unused_columns)) for part in parts if part.unused_columns]
    return mixture + [("not used", f"{name}: {columns}") for name, columns in unused]


def _share(part: Part, parts: Sequence[Part]) -> str:
    if part.documents is None:  # it streams
        return f"weight {part.weight:g}"
    total = sum(each.trained_tokens for each in parts)
    held_out = f", {part.held_out:,} held out" if part.held_out else ""
    return (
        f"weight {part.weight:g}, {part.trained_documents:,} from {part.documents:,} documents{held_out}, "
        f"{shortened(part.trained_tokens)} tokens ({part.trained_tokens / total:.1%})"
    )


def ledger_lines(ledger: TokenLedger, between: Iterable[Line]) -> list[Line]:
    return [("data", ledger_line(ledger)), *_image_lines(ledger), *between, ("loss on", loss_line(ledger))]


def ledger_line(ledger: TokenLedger) -> str:
    """Say what was read, and what was done to some of it."""
    changes = {
        "truncated": (ledger.tokens_truncated, "", ledger.rows_truncated),
        "dropped": (ledger.tokens_dropped, "fully masked ", ledger.rows_fully_masked),
        "split": (ledger.tokens_split, "", ledger.rows_split),
        "held out": (ledger.tokens_held_out, "", ledger.rows_held_out),
        "not drawn": (ledger.tokens_not_drawn, "", ledger.rows_not_drawn),
        "repeated": (ledger.tokens_repeated, "", ledger.rows_repeated),
    }
    told = [f"{ledger.rows_read:,} rows, {shortened(ledger.tokens_read)} tokens"]
    told += [f"{what} {n:,} tokens of {rows:,} {of}rows" for what, (n, of, rows) in changes.items() if rows]
    return "; ".join(told)


def _image_lines(ledger: TokenLedger) -> list[Line]:
    """Say what a ledger holds of images; nothing where there are none."""
    if not (ledger.images or ledger.rows_broken or ledger.rows_left_out):
        return []
    share = ledger.vision_tokens / max(1, ledger.tokens_read)
    line = f"{ledger.images:,}, {ledger.vision_tokens:,} vision tokens ({share:.1%})"
    if ledger.rows_shrunk:
        line += f"; shrunk in {ledger.rows_shrunk:,} rows by {ledger.tokens_shrunk:,} tokens"
    if ledger.rows_broken:
        line += f"; {ledger.rows_broken:,} rows with a broken image left out"
    if ledger.rows_left_out:
        line += f"; {ledger.rows_left_out:,} rows left out whose cut would go through an image"
    return [("images", line)]


def loss_line(ledger: TokenLedger) -> str:
    parts = {
        "masked by the template": ledger.tokens_masked_by_template,
        "at boundaries": ledger.tokens_masked_at_boundaries,
    }
    without = ", ".join(f"{shortened(n)} {what}" for what, n in parts.items() if n)
    return f"{shortened(ledger.tokens_counted)} tokens" + (f"; without loss {without}" if without else "")


def fill_line(fill: RowFill) -> str:
    padding = f", {shortened(fill.padding)} tokens of padding" if fill.padding else ""
    return f"{fill.rows:,} rows, {fill.documents_per_row:.1f} documents a row, {fill.fill:.1%} full{padding}"

"""The tables that a run prints: the banner at its start, the demo's generations, the closing figures."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unsloth_pack.data.mixture import Part
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.errors import printable
from unsloth_pack.packing import PackManifest
from unsloth_pack.patching.report import PatchReport
from unsloth_pack.report.terminal import RowFill, gib, lines_of_parts


@dataclass(frozen=True)
class RunFacts:
    """What the banner shows beside the data and the patch.

    Args:
        packs: the manifest, if the rows were packed on disk.
        rows_per_step: of a micro-batch on one device.
        rows_per_update: rows of all devices and accumulation steps together.
        optimizer: its name and learning rate, and whether it takes all weights at once.
        spread: how uneven the ranks' work is, if there are several.
        waiting: if the data streams, the documents and the tokens that wait at most to be packed.
        mixture: how several data sets become one.
        parts: the data sets; empty for packs.
        evaluation: the ledger of what is evaluated on, if anything.
    """

    model_name: str
    dtype: str
    device: str
    trained_parameters: int
    all_parameters: int
    packs: PackManifest | None
    rows_per_step: int
    rows_per_update: int
    steps: int
    optimizer: str
    output_dir: str
    spread: str | None = None
    waiting: tuple[int, int | None] | None = None
    mixture: str = ""
    parts: tuple[Part, ...] = ()
    evaluation: TokenLedger | None = None


@dataclass(frozen=True)
class RowsOfStream:
    """What a run has trained on, where the data streams.

    Args:
        fill: of the rows.
        waiting: documents that were read and not trained on.
        read: of each data set of a mixture, its name, and the rows and tokens that were read; empty for one.
    """

    fill: RowFill
    waiting: int
    read: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class RunSummary:
    """How a run went.

    Args:
        seconds: of training, evaluation included.
        epochs: passes over the data; of a stream, those that were read to the end.
        tokens_trained: in all passes, without padding.
        tokens_counted: those of them that the loss was a mean of, as the trainer counted them.
        tokens_padded: padding, computed for nothing.
        documents_per_second, tokens_per_second: trained on, without padding.
        peak_memory_bytes, peak_memory_of: how much, of what, on the rank that took the most.
        peak_memory_by_rank: bytes.
        first_loss, last_loss: as logged, in nats a token.
        updates_left_out: updates that were not finite, and so not applied.
        broken_images: images that could not be decoded, each time that one was met.
        stream: what was trained on, where the data streams.
    """

    steps: int
    seconds: float
    epochs: float
    tokens_trained: int
    tokens_counted: int
    tokens_padded: int
    documents_per_second: float
    tokens_per_second: float
    peak_memory_bytes: int
    peak_memory_of: str
    peak_memory_by_rank: list[int]
    first_loss: float
    last_loss: float
    updates_left_out: int
    broken_images: int
    output_dir: str
    stream: RowsOfStream | None = None


def print_banner(
    console: Console, facts: RunFacts, patch: PatchReport, ledger: TokenLedger, fill: RowFill | None
) -> None:
    """Model, patch, data and plan, before the first step.

    Args:
        ledger: of the data; if it streams, of its first rows.
        fill: None if the data streams.
    """
    share = facts.trained_parameters / facts.all_parameters
    rows = [
        (
            "model",
            f"{facts.model_name} ({patch.model_type}, {patch.n_layers} layers), "
            f"{facts.dtype} on {facts.device}",
        ),
        ("trained", f"{facts.trained_parameters:,} of {facts.all_parameters:,} parameters ({share:.2%})"),
        ("attention", f"{patch.attn_backend}: {patch.attn_reason}"),
        *((f"fused {kind}", what) for kind, what in patch.fused.items()),
        *((f"not fused {kind}", why) for kind, why in patch.not_fused.items()),
        *(_stream_lines(facts, ledger) if fill is None else _data_lines(facts, ledger, fill)),
        *_evaluation_lines(facts, ledger),
        ("plan", f"{facts.steps:,} updates, {facts.optimizer}"),
        *([("ranks", facts.spread)] if facts.spread else []),
        ("output", facts.output_dir),
    ]
    if ledger.prompts_rerendered:
        changed = f"{ledger.prompts_rerendered:,} rows change the tokens of their prompt"
        note = f"{changed}: there the loss starts at the first token that differs"
        rows.append(("note", note))
    _print_facts(console, "unsloth-pack", rows)


def _data_lines(facts: RunFacts, ledger: TokenLedger, fill: RowFill) -> list[tuple[str, str]]:
    return [
        ("data", _ledger_line(ledger)),
        *_image_lines(ledger),
        *lines_of_parts(facts.parts),
        ("loss on", _loss_line(ledger)),
        ("rows", _fill_line(fill)),
        *_packing_lines(facts, is_packed=fill.documents > fill.rows),
        ("update", _update_line(facts.rows_per_update, fill)),
    ]


def _stream_lines(facts: RunFacts, ledger: TokenLedger) -> list[tuple[str, str]]:
    assert facts.waiting is not None
    documents, tokens = facts.waiting
    return [
        ("data", "a stream, counted as it is read; the summary at the end says what was cut and dropped"),
        *lines_of_parts(facts.parts, facts.mixture),
        ("first rows", _ledger_line(ledger)),
        ("loss on", f"in the first rows: {_loss_line(ledger)}"),
        ("rows", f"packed as documents come, of which at most {documents:,} wait, or {tokens:,} tokens"),
        *_packing_lines(facts, is_packed=True),
        ("update", f"{facts.rows_per_update} rows"),
    ]


def _evaluation_lines(facts: RunFacts, ledger: TokenLedger) -> list[tuple[str, str]]:
    if facts.evaluation is None:
        return []
    held_out = ", held out of the data" if ledger.rows_held_out else ""
    line = f"{facts.evaluation.rows_read:,} rows, {facts.evaluation.tokens_read:,} tokens{held_out}"
    return [("evaluation", line)]


def print_packs(
    console: Console,
    packs: PackManifest,
    folder: str,
    parts: Sequence[Part] = (),
    image_folder: str | None = None,
    is_for_adapter: bool = False,
) -> None:
    """What was packed, and how to train on it.

    Args:
        image_folder: where the paths of its images begin; None where training needs none.
        is_for_adapter: the model is an adapter, with which training goes on.
    """
    begins_with = "--init_adapter" if is_for_adapter else "--model_name"
    command = ["unsloth-pack", begins_with, packs.model_name, "--dataset", folder]
    command += ["--image_folder", image_folder] if image_folder is not None else []
    fill = RowFill(packs.rows, packs.documents, packs.tokens, packs.rows * packs.capacity, packs.tokens)
    size = sum(shard.bytes for shard in packs.shards)
    rows = [
        ("data", _ledger_line(packs.ledger)),
        *_image_lines(packs.ledger),
        *lines_of_parts(parts),
        ("loss on", _loss_line(packs.ledger)),
        ("rows", f"of {packs.capacity:,} tokens by {packs.strategy}: {_fill_line(fill)}"),
        ("shards", f"{len(packs.shards)}, {size / 2**20:,.1f} MiB"),
        ("fingerprint", packs.data_fingerprint),
        ("output", folder),
        ("train with", shlex.join(command)),
    ]
    _print_facts(console, "packed", rows)


def print_summary(console: Console, summary: RunSummary, ledger: TokenLedger) -> None:
    """Speed, memory, loss and where the tokens went, at the end."""
    unscored = summary.tokens_trained - summary.tokens_counted
    passes = "" if summary.stream else f" in {summary.epochs:.4g} epochs"
    rows = [
        ("updates", f"{summary.steps:,} in {summary.seconds:.1f} s"),
        (
            "speed",
            f"{summary.documents_per_second:,.1f} samples/s, {summary.tokens_per_second:,.0f} real tokens/s",
        ),
        ("data", _ledger_line(ledger)),
        *_image_lines(ledger),
        ("loss on", _loss_line(ledger)),
        (
            "tokens",
            f"{summary.tokens_trained:,} trained{passes}: {summary.tokens_counted:,} "
            f"counted in the loss, {unscored:,} without loss; and {summary.tokens_padded:,} of padding",
        ),
        ("peak memory", f"{gib(summary.peak_memory_bytes)} of {summary.peak_memory_of}"),
        ("loss", f"{summary.first_loss:.4f} at first, {summary.last_loss:.4f} at last"),
        ("output", summary.output_dir),
    ]
    if summary.stream:
        waiting = f"{summary.stream.waiting:,} documents were read and not trained on"
        rows.insert(4, ("rows", f"{_fill_line(summary.stream.fill)}; {waiting}"))
        for name, n_rows, n_tokens in reversed(summary.stream.read):
            rows.insert(5, ("read", f"{name}: {n_rows:,} rows, {n_tokens:,} tokens"))
        rows.insert(5, ("passes", f"{summary.epochs:,.0f} over the data were read to the end"))
    if summary.updates_left_out:
        rows.append(("note", f"{summary.updates_left_out} updates were left out: they were not finite"))
    if summary.broken_images:
        times = "once" if summary.broken_images == 1 else f"{summary.broken_images:,} times"
        note = f"an image could not be decoded, {times}: nothing was learned from its document"
        rows.append(("note", note))
    if summary.last_loss != summary.last_loss:
        rows.append(("note", "the loss is not a number: the training diverged; lower --learning_rate"))
    _print_facts(console, "done", rows)


def print_generations(
    console: Console, before: float, after: float, count: int, examples: Sequence[Mapping[str, str]]
) -> None:
    """Exact match before and after training, and a few answers side by side.

    Args:
        before, after: the share of the held-out rows, 0 to 1, that were answered to the letter.
        count: of held-out rows.
        examples: prompt, answer before, answer after and the expected one.
    """
    table = Table(
        title=f"exact match on {count} held-out rows: {before:.1%} before, {after:.1%} after", show_lines=True
    )
    columns = ("prompt", "before", "after", "expected")
    for heading in columns:
        table.add_column(heading, ratio=1, overflow="fold")
    for example in examples:
        table.add_row(*(Text(example[heading]) for heading in columns))
    console.print(table)


def _print_facts(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(printable(value)))  # `Text`, since a path may look like rich's markup
    console.print(table)


def _packing_lines(facts: RunFacts, is_packed: bool) -> list[tuple[str, str]]:
    lines = []
    if facts.packs:
        made = (
            f"rows of {facts.packs.capacity:,} by {facts.packs.strategy}, {facts.packs.data_fingerprint[:12]}"
        )
        lines.append(("packs", f"on disk, {made}; always trained on as packed"))
    if is_packed and facts.rows_per_step > 1:
        lines.append(("micro-batch", f"{facts.rows_per_step} packed rows, flattened into one"))
    return lines


def _ledger_line(ledger: TokenLedger) -> str:
    return (
        f"{ledger.rows_read:,} rows, {ledger.tokens_read:,} tokens; "
        f"truncated {ledger.tokens_truncated:,} tokens of {ledger.rows_truncated:,} rows; "
        f"dropped {ledger.tokens_dropped:,} tokens of {ledger.rows_fully_masked:,} fully masked rows; "
        f"split {ledger.tokens_split:,} tokens of {ledger.rows_split:,} rows"
        f"{_choice_of_rows(ledger)}"
    )


def _image_lines(ledger: TokenLedger) -> list[tuple[str, str]]:
    """What a ledger says of images; nothing where there are none."""
    if not (ledger.images or ledger.rows_broken or ledger.rows_left_out):
        return []
    tokens = max(1, ledger.tokens_read)
    line = f"{ledger.images:,}, {ledger.vision_tokens:,} vision tokens ({ledger.vision_tokens / tokens:.1%})"
    if ledger.rows_shrunk:
        line += f"; shrunk in {ledger.rows_shrunk:,} rows by {ledger.tokens_shrunk:,} tokens"
    if ledger.rows_broken:
        line += f"; {ledger.rows_broken:,} rows with a broken image left out"
    if ledger.rows_left_out:
        line += f"; {ledger.rows_left_out:,} rows left out whose cut would go through an image"
    return [("images", line)]


def _choice_of_rows(ledger: TokenLedger) -> str:
    """What a mixture, a limit or an evaluation has changed about the rows that are trained on."""
    counts = {
        "held out": (ledger.tokens_held_out, ledger.rows_held_out),
        "not drawn": (ledger.tokens_not_drawn, ledger.rows_not_drawn),
        "repeated": (ledger.tokens_repeated, ledger.rows_repeated),
    }
    return "".join(
        f"; {what} {tokens:,} tokens of {rows:,} rows" for what, (tokens, rows) in counts.items() if rows
    )


def _loss_line(ledger: TokenLedger) -> str:
    return (
        f"{ledger.tokens_counted:,} tokens; without loss {ledger.tokens_masked_by_template:,} masked by the "
        f"template, {ledger.tokens_masked_at_boundaries:,} at boundaries"
    )


def _update_line(rows_per_update: int, fill: RowFill) -> str:
    """An epoch ends with a shorter update, so no update holds more than one pass over the data."""
    rows = min(rows_per_update, fill.rows)
    line = f"{rows} rows, {rows * fill.documents_per_row:.1f} documents"
    if fill.documents > fill.rows:
        line += f" ({min(rows_per_update, fill.documents)} without packing)"
    return line


def _fill_line(fill: RowFill) -> str:
    return (
        f"{fill.rows:,} rows, {fill.documents_per_row:.1f} documents a row, {fill.fill:.1%} full, "
        f"{fill.padding:,} tokens of padding"
    )

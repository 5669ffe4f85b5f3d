"""What `train` shows of a run and writes into its metrics file: its rows, the banner, scores, the summary."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from peft import PeftModel
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig

from unsloth_pack.checkpoints.atomic import write_file
from unsloth_pack.checkpoints.names import CARD, METRICS
from unsloth_pack.config import TrainOptions, flat
from unsloth_pack.data import load_rows
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.data.mixture import Part
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.demo.evaluate import ExactMatch, exact_match
from unsloth_pack.errors import first_line
from unsloth_pack.lora.quantised import count_weights
from unsloth_pack.modules import base_of
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.patching.report import PatchReport
from unsloth_pack.patching.trainer_hooks import why_not_flat
from unsloth_pack.report.callbacks import MetricsFile, ProgressCallback, line_of, peak_memory
from unsloth_pack.report.html import ImageSeen, PackedRowSeen, page_of, placed, plot_lengths, plot_row
from unsloth_pack.report.metrics import read_lines
from unsloth_pack.report.terminal import (
    Line,
    RowFill,
    RowsOfStream,
    RunSummary,
    document_lengths,
    fill_line,
    fill_of_packed,
    fill_of_padded,
    ledger_line,
    ledger_lines,
    lines_of_parts,
    loss_line,
    print_generations,
    print_lines,
    print_summary,
    shortened,
)
from unsloth_pack.report.trackers import Add, begin_trackers
from unsloth_pack.run.card import write_cards
from unsloth_pack.run.data import PreparedRows, TrainingData
from unsloth_pack.run.images import ImagePreparation
from unsloth_pack.run.machine import device_name, is_main_process
from unsloth_pack.training.nonfinite import NonFinite
from unsloth_pack.training.streaming import RowStream, StreamTotals, totals
from unsloth_pack.training.trainer import RunTrainer

_EXAMPLES = 3  # generations shown side by side
_ROWS_LOOKED_AT = 64  # for one to draw
_THUMBNAIL = (96, 96)  # pixels, at most, of an image that is drawn
_MOST_PARTS = 4  # lines on data sets in the banner
_LONGEST_PROMPT = 120  # characters of a prompt that is shown


def score_demo(
    demo: str | None, model: Any, tokenizer: PreTrainedTokenizerBase, images: ImagePreparation | None
) -> ExactMatch | None:
    """Score the answers to a demo's held-out rows; None without a demo, and in all but one process."""
    if demo is None or not is_main_process():
        return None
    rows = load_rows(demo, "test").to_list()
    return exact_match(model, tokenizer if images is None else images.processor, rows)


def show_scores(before: ExactMatch, after: ExactMatch, console: Console, metrics: MetricsFile) -> None:
    """Print and write down the scores before and after the training, with a few answers."""
    pairs = zip(before.generations, after.generations, strict=True)
    examples = [
        {"prompt": new.prompt, "before": old.answer, "after": new.answer, "expected": new.expected}
        for old, new in pairs
        if len(new.prompt) <= _LONGEST_PROMPT
    ][:_EXAMPLES]
    metrics.write("demo", exact_match_before=before.score, exact_match_after=after.score, examples=examples)
    print_generations(console, before.score, after.score, len(after.generations), examples)


@dataclass
class RunReport:
    """Shows a run on the terminal, and writes it into the metrics file and the report page."""

    console: Console
    metrics: MetricsFile
    trainer: RunTrainer
    data: TrainingData
    options: TrainOptions
    dtype: torch.dtype
    memory: str | None = None  # what the run is expected to take of a GPU's

    def __post_init__(self) -> None:
        packs, rows = self.data.train.packs, self.data.train.rows
        self._capacity = packs.capacity if packs else self.options.model.max_seq_length
        self._stream = rows if isinstance(rows, RowStream) else None
        self._lengths = None if isinstance(rows, RowStream) else document_lengths(rows)
        self._fill = self._fill_of_rows()
        self._trackers: list[Add] = []  # once training begins
        self.trainer.nonfinite_updates.report = self._report_nonfinite
        self.trainer.add_callback(ProgressCallback(self.console, self._begin))

    def _begin(self, updates: int) -> None:
        self._trackers = begin_trackers(self.trainer, flat(self.options)) if self.metrics.enabled else []
        self._print_banner(updates)

    def _report_nonfinite(self, update: NonFinite) -> None:
        self.metrics.write("nonfinite", **asdict(update))
        self.console.print(str(update), soft_wrap=True, markup=False)

    def _fill_of_rows(self) -> RowFill | None:
        """How full the training rows are; None where they stream."""
        rows, config = self.data.train.rows, self.trainer.args
        assert isinstance(config, SFTConfig)
        if isinstance(rows, RowStream):
            return None
        if self.options.data.sample_packing:
            packed: Any = self.trainer.train_dataset
            return fill_of_packed(packed, self._capacity)
        batch_size = 1 if config.padding_free else config.per_device_train_batch_size  # 1: nothing is padded
        return fill_of_padded(rows, batch_size, config.seed)

    def write_data(self) -> None:
        """Write the data of a new run into the metrics file, and plot the lengths of its documents."""
        if not self.metrics.enabled:
            return
        fill, sampler, data = self._fill, self.trainer.packed_sampler, self.data
        more: dict[str, Any] = {"mixture": self.options.data.mixture} if data.train.parts else {}
        more |= {"fill": asdict(fill) | {"tokens_padded": fill.padding}} if fill else {}
        more |= {"spread": asdict(sampler.spread())} if sampler and sampler.world_size > 1 else {}
        self.metrics.write("data", use="train", **_described(data.train), **more)
        if data.evaluation:
            self.metrics.write("data", use="eval", **_described(data.evaluation))
        if self._lengths is not None:
            path = self.metrics.path.parent / "lengths.png"
            plot_lengths(self._lengths, self.options.model.max_seq_length, path)

    def _print_banner(self, updates: int) -> None:
        """Print model, patch, data and plan before the first step: a screen, or all with `--verbose`."""
        trainer, config, data = self.trainer, self.trainer.args, self.data
        model: Any = trainer.model
        patch, sampler, ledger = patch_of(model), trainer.packed_sampler, data.train.ledger
        assert patch is not None
        trained, everything = count_weights(model)
        report, dtype = patch.report, str(self.dtype).removeprefix("torch.")
        counts = shortened(trained), shortened(everything)
        shape = f"{report.model_type}, {report.n_layers} layers"
        lines = [
            ("model", f"{self.options.model.model_name} ({shape}), {dtype} on {device_name()}"),
            ("trained", f"{counts[0]} of {counts[1]} parameters ({trained / everything:.2%})"),
            *_patch_lines(report, self.options.output.verbose),
            *self._data_lines(),
        ]
        if data.evaluation is not None:
            of_eval = data.evaluation.ledger
            held_out = ", held out of the data" if ledger.rows_held_out else ""
            read = f"{of_eval.rows_read:,} rows, {shortened(of_eval.tokens_read)} tokens{held_out}"
            lines.append(("evaluation", read))
        if self.memory is not None:
            lines.append(("memory", self.memory))
        lines.append(("plan", f"{updates:,} updates, {self._describe_optimizer()}"))
        if sampler is not None and config.world_size > 1:
            lines.append(("ranks", str(sampler.spread())))
        lines.append(("output", str(config.output_dir)))
        if ledger.prompts_rerendered:
            changed = f"{ledger.prompts_rerendered:,} rows change the tokens of their prompt"
            lines.append(("note", f"{changed}: there the loss starts at the first token that differs"))
        print_lines(self.console, "unsloth-pack", lines)

    def _data_lines(self) -> list[Line]:
        """Say what the rows hold, and how many an update has."""
        config, train, fill = self.trainer.args, self.data.train, self._fill
        per_step = config.per_device_train_batch_size
        per_update = per_step * config.gradient_accumulation_steps * config.world_size
        packing = []
        if packs := train.packs:
            rows = f"rows of {packs.capacity:,} by {packs.strategy}, {packs.data_fingerprint[:12]}"
            packing.append(("packs", f"on disk, {rows}; always trained on as packed"))
        is_packed = fill is None or fill.documents > fill.rows
        if is_packed and per_step > 1 and self.options.output.verbose:
            packing.append(("micro-batch", f"{per_step} packed rows, flattened into one"))
        if fill is not None:
            n_rows = min(per_update, fill.rows)  # an epoch ends with a shorter update
            update = f"{n_rows} row{'s' * (n_rows > 1)}, {n_rows * fill.documents_per_row:.1f} documents"
            update += f" ({min(per_update, fill.documents)} without packing)" if is_packed else ""
            lines = [*ledger_lines(train.ledger, self._part_lines()), ("rows", fill_line(fill))]
            return [*lines, *packing, ("update", update)]
        assert self._stream is not None
        packer = self._stream.packer
        documents, tokens = packer.buffer_size, packer.buffer_tokens
        counted = train.ledger.tokens_counted  # 0 for prompts, of which targets will be made
        return [
            ("data", "a stream, counted as it is read; the summary at the end says what was cut and dropped"),
            *self._part_lines(),
            ("first rows", ledger_line(train.ledger)),
            *([("loss on", f"in the first rows: {loss_line(train.ledger)}")] if counted else []),
            ("rows", f"packed as documents come, of which at most {documents:,} wait, or {tokens:,} tokens"),
            *packing,
            ("update", f"{per_update} row{'s' * (per_update > 1)}"),
        ]

    def _part_lines(self) -> list[Line]:
        lines = lines_of_parts(self.data.train.parts)
        hidden = 0 if self.options.output.verbose else len(lines) - _MOST_PARTS
        more = ("more", f"{hidden} lines like these; --verbose shows them")
        return [*lines[:_MOST_PARTS], more] if hidden > 0 else lines

    def _describe_optimizer(self) -> str:
        training, config = self.options.training, self.trainer.args
        why_not = why_not_flat(config, self.trainer.model)
        takes = "all weights at once" if why_not is None else f"one weight after another: {why_not}"
        if training.optimizer_in_backward:
            takes = "each weight in the backward pass, where its gradient is freed"
        said = f"{training.optim}, learning rate {config.learning_rate:g}"
        said += f", {takes}" if self.options.output.verbose else ""
        return f"{said}; float32 masters on the host" if training.masters_on_host else said

    def summarise(self) -> tuple[RunSummary, TokenLedger]:
        """The figures and the ledger of the run in all of its processes. Every process has to call this."""
        train, stream = self.data.train, self.trainer.row_stream
        counts = None if stream is None else totals(stream, self.trainer.rows_trained)
        summary = summarise(self.trainer, self._fill, counts, train.parts)
        return summary, counts.ledger if counts else train.ledger

    def finish(self, summary: RunSummary, ledger: TokenLedger) -> None:
        """Write the card, the report page and the summary, and print it."""
        figures = {**asdict(summary), "ledger": asdict(ledger)}
        if self.metrics.enabled:
            self._write_files(figures)
        self.metrics.write("summary", **figures)  # ends the run: what comes later is lost if it is killed
        print_summary(self.console, summary, ledger)

    def _write_files(self, figures: Mapping[str, Any]) -> None:
        """Write card and page, and add to trackers; if page or trackers fail a line says so, no more."""
        folder, model = self.metrics.path.parent, cast(PeftModel, self.trainer.model)
        lines, patch = [*read_lines(folder), line_of("summary", **figures)], patch_of(model)
        assert patch is not None
        write_cards(self.options, lines, takes_images=hasattr(base_of(model).config, "vision_config"))
        row = None
        with self._or_say("report.html was not written"):
            row = self._row_to_draw()
            text = page_of(lines, patch.report, self._lengths, row, self.options.model.max_seq_length)
            with write_file(folder / "report.html") as file:
                file.write(text.encode("utf-8", "replace"))
        if self._trackers:
            with self._or_say("a tracker got no results"):
                self._add_to_trackers(figures, row)

    def _add_to_trackers(self, figures: Mapping[str, Any], row: PackedRowSeen | None) -> None:
        fill = {"fill": self._fill.fill} if self._fill else {}
        named = {**figures, **fill, **{f"ledger/{name}": n for name, n in figures["ledger"].items()}}
        numbers = {f"run/{name}": float(n) for name, n in named.items() if isinstance(n, int | float)}
        paths = [self.metrics.path.with_name(name) for name in ("report.html", METRICS, CARD)]
        with TemporaryDirectory() as aside:
            picture = Path(aside, "packed_row.png")
            if row is not None:
                plot_row(row, picture)
            for add in self._trackers:
                add(numbers, [path for path in paths if path.is_file()], [picture] if row else [])

    @contextmanager
    def _or_say(self, what: str) -> Iterator[None]:
        """Print a line about an error inside this context: it may not end a run that is saved."""
        try:
            yield
        except Exception as error:
            why_not = f"{type(error).__name__}: {first_line(error)}"
            self.console.print(f"{what}: {why_not}", soft_wrap=True, markup=False)

    def _row_to_draw(self) -> PackedRowSeen | None:
        """Among the first rows the one with the most documents; None where rows stream or are not packed."""
        if self._stream is not None or not self.options.data.sample_packing:
            return None
        rows: Any = self.trainer.train_dataset
        first = rows.select(range(min(_ROWS_LOOKED_AT, len(rows))))
        row = max(first, key=lambda row: len(row["seq_lengths"]))
        is_counted = np.asarray(row["labels"]) != IGNORE_INDEX
        is_counted[np.cumsum([0, *row["seq_lengths"][:-1]])] = False  # no token comes before it
        images = _images_to_draw(row, self.data.images) if self.data.images else []
        return PackedRowSeen(row["seq_lengths"], is_counted, self._capacity, images)


def _patch_lines(report: PatchReport, verbose: bool) -> list[Line]:
    if verbose:
        return [
            ("attention", f"{report.attn_backend}: {report.attn_reason}"),
            *((f"fused {kind}", what) for kind, what in report.fused.items()),
            *((f"not fused {kind}", why) for kind, why in report.not_fused.items()),
        ]
    why = f"{', '.join(report.not_fused)}; --verbose and report.html say why"
    return [("attention", report.attn_backend), *([("not fused", why)] if report.not_fused else [])]


def _described(rows: PreparedRows) -> dict[str, Any]:
    values: dict[str, Any] = {"ledger": asdict(rows.ledger), "fingerprint": rows.fingerprint}
    return values | ({"data_sets": list(map(asdict, rows.parts))} if rows.parts else {})


def _images_to_draw(row: Mapping[str, Any], images: ImagePreparation) -> list[ImageSeen]:
    from unsloth_pack.images.prepared import source_from_record
    from unsloth_pack.images.reading import UnreadableImage, read_pixels
    from unsloth_pack.training.image_rows import COLUMN

    pixels = []
    for image in row[COLUMN]:
        try:
            picture = read_pixels(source_from_record(image, images.folder))
            picture.thumbnail(_THUMBNAIL)
            pixels.append(np.asarray(picture))
        except UnreadableImage:  # it was left out of the training too
            pixels.append(np.full((1, 1, 3), 192, np.uint8))
    is_image = np.asarray(row["input_ids"]) == images.token_ids.placeholder
    return placed(is_image, [image["tokens"] for image in row[COLUMN]], pixels)


def summarise(
    trainer: RunTrainer, fill: RowFill | None, stream: StreamTotals | None, parts: Sequence[Part]
) -> RunSummary:
    """The figures of a run in all of its processes, each of which has to call this.

    Either `fill`, of the rows, is not None, or `stream`, what was read of one.
    """
    trained, rows = trainer.trained, fill or stream
    assert rows is not None
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    n_bytes, what = peak_memory()
    by_rank = gather_object([n_bytes])
    return RunSummary(
        steps=trainer.state.global_step,
        seconds=trained.seconds,
        epochs=stream.turns if stream else trainer.state.epoch or 0.0,
        tokens_trained=trained.tokens,
        tokens_counted=trained.counted,
        tokens_padded=trained.slots - trained.tokens,
        documents_per_second=trained.tokens * rows.documents / rows.tokens / trained.seconds,
        tokens_per_second=trained.tokens / trained.seconds,
        peak_memory_bytes=max(by_rank),
        peak_memory_of=what,
        peak_memory_by_rank=by_rank,
        first_loss=losses[0],
        last_loss=losses[-1],
        updates_left_out=trainer.nonfinite_updates.left_out,
        broken_images=trainer.counts.broken_images,
        output_dir=str(trainer.args.output_dir),
        **trainer.counts.chips.utilisation(trained.model_flops, trained.hardware_flops, trained.seconds),
        stream=_rows_of_stream(stream, trainer, parts) if stream else None,
    )


def _rows_of_stream(stream: StreamTotals, trainer: RunTrainer, parts: Sequence[Part]) -> RowsOfStream:
    rows = trainer.row_stream
    assert rows is not None
    slots = stream.rows * rows.packer.capacity
    fill = RowFill(stream.rows, stream.documents, stream.tokens, slots, stream.tokens)
    read = zip(parts, stream.read_of_parts, strict=False)  # none of them if there is one data set
    return RowsOfStream(fill, stream.waiting, tuple((part.name, *counts) for part, counts in read))

"""What `train` shows of a run and writes into its metrics file: its rows, the banner, scores, the summary."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from rich.console import Console

from unsloth_pack.data import load_rows
from unsloth_pack.data.encoding import IGNORE_INDEX
from unsloth_pack.data.mixture import Part
from unsloth_pack.demo.evaluate import ExactMatch, exact_match
from unsloth_pack.errors import first_line
from unsloth_pack.patching.patch import patch_of
from unsloth_pack.patching.trainer_hooks import why_not_flat
from unsloth_pack.report.html import plot_lengths
from unsloth_pack.report.metrics import MetricsFile, peak_memory
from unsloth_pack.report.terminal import (
    RowFill,
    RowsOfStream,
    RunFacts,
    RunSummary,
    document_lengths,
    fill_of_joined,
    fill_of_packed,
    fill_of_padded,
    print_banner,
    print_generations,
)
from unsloth_pack.run.machine import is_main_process
from unsloth_pack.training.streaming import RowStream, StreamTotals, totals

if TYPE_CHECKING:
    from trl import SFTConfig

    from unsloth_pack.config import TrainOptions
    from unsloth_pack.report.html import ImageSeen, PackedRowSeen
    from unsloth_pack.run.prepare import Prepared
    from unsloth_pack.training.trainer import RunTrainer

_EXAMPLES = 3  # generations shown side by side
_ROWS_LOOKED_AT = 64  # for one to draw
_THUMBNAIL = (96, 96)  # pixels, at most, of an image that is drawn
_LONGEST_PROMPT = 120  # characters of a prompt that is shown


def describe_rows(
    trainer: "RunTrainer", prepared: "Prepared", metrics: MetricsFile, is_new: bool
) -> RowFill | None:
    """How full the training rows are; None where they stream. A new run plots that, and writes it down."""
    rows = prepared.train.rows
    fill = None if isinstance(rows, RowStream) else _fill(trainer, prepared, rows)
    if not (metrics.enabled and is_new):
        return fill
    train, evaluation = prepared.train, prepared.evaluation
    slots = {"fill": asdict(fill) | {"tokens_padded": fill.padding}} if fill else {}
    sampler = trainer.packed_sampler
    spread = {"spread": asdict(sampler.spread())} if sampler and sampler.world_size > 1 else {}
    data: dict[str, Any] = {"ledger": asdict(train.ledger), "fingerprint": train.fingerprint}
    if train.parts:
        data |= {"mixture": prepared.options.data.mixture, "data_sets": list(map(asdict, train.parts))}
    metrics.write("data", use="train", **data, **slots, **spread)
    if evaluation:
        data = {"ledger": asdict(evaluation.ledger), "fingerprint": evaluation.fingerprint}
        if evaluation.parts:
            data |= {"data_sets": list(map(asdict, evaluation.parts))}
        metrics.write("data", use="eval", **data)
    if not isinstance(rows, RowStream):
        lengths = document_lengths(rows)
        plot_lengths(lengths, prepared.options.model.max_seq_length, metrics.path.parent / "lengths.png")
    return fill


def _fill(trainer: "RunTrainer", prepared: "Prepared", rows: Dataset) -> RowFill:
    options, train = prepared.options, prepared.train
    if options.data.sample_packing:
        capacity = train.packs.capacity if train.packs else options.model.max_seq_length
        trained_on: Any = trainer.train_dataset
        return fill_of_packed(trained_on, capacity)
    if options.data.padding_free:
        return fill_of_joined(rows)
    return fill_of_padded(rows, prepared.config.per_device_train_batch_size, options.training.seed)


def announce(
    console: Console, trainer: "RunTrainer", prepared: "Prepared", fill: RowFill | None, updates: int
) -> None:
    """Print the banner of a run that will have so many updates."""
    options, config = prepared.options, prepared.config
    model: Any = trainer.model
    patch = patch_of(model)
    assert patch is not None
    if isinstance(model, PeftModel):
        trained, everything = model.get_nb_trainable_parameters()
    else:
        trained, everything = (model.num_parameters(only_trainable=only) for only in (True, False))
    rows_per_step, sampler = config.per_device_train_batch_size, trainer.packed_sampler
    facts = RunFacts(
        model_name=options.model.model_name,
        dtype=str(prepared.dtype).removeprefix("torch."),
        device=_device_name(config.device, config.world_size),
        trained_parameters=trained,
        all_parameters=everything,
        packs=prepared.train.packs,
        rows_per_step=rows_per_step,
        rows_per_update=rows_per_step * config.gradient_accumulation_steps * config.world_size,
        steps=updates,
        optimizer=_describe_optimizer(options, config, model),
        output_dir=str(config.output_dir),
        spread=str(sampler.spread()) if sampler is not None and config.world_size > 1 else None,
        waiting=rows.waiting_at_most if isinstance(rows := prepared.train.rows, RowStream) else None,
        mixture=options.data.mixture,
        parts=prepared.train.parts,
        evaluation=prepared.evaluation.ledger if prepared.evaluation else None,
    )
    print_banner(console, facts, patch.report, prepared.train.ledger, fill)


def _describe_optimizer(options: "TrainOptions", config: "SFTConfig", model: Any) -> str:
    why_not = why_not_flat(config, model)
    takes = "all weights at once" if why_not is None else f"one weight after another: {why_not}"
    if options.training.optimizer_in_backward:
        takes = "each weight in the backward pass, where its gradient is freed"
    said = f"{options.training.optim}, learning rate {config.learning_rate:g}, {takes}"
    return f"{said}; float32 masters on the host" if options.training.masters_on_host else said


def _device_name(device: torch.device, count: int) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    if count == 1 and device.type == "cuda" and torch.cuda.device_count() > 1:
        n_gpus = torch.cuda.device_count()
        return f"{name}, one of {n_gpus} (torchrun --nproc_per_node {n_gpus} cli.py trains on all)"
    return name if count == 1 else f"{count} x {name}"


class DemoScores:
    """How well the model of a demo answers held-out rows, before training and after it.

    Other runs have no such rows. The main process alone has them, and none has if the weights are sharded.
    """

    def __init__(self, model: Any, prepared: "Prepared"):
        self._model, self._prepared = model, prepared
        training = prepared.options.training
        has_rows = prepared.options.is_demo and is_main_process()
        has_rows = has_rows and training.fsdp is None and training.deepspeed is None
        name = prepared.options.model.model_name
        self._rows: list[dict[str, Any]] = load_rows(name, "test").to_list() if has_rows else []
        self._before = self._score()

    def _score(self) -> ExactMatch | None:
        if not self._rows:
            return None
        if (images := self._prepared.images) is not None:
            from unsloth_pack.demo import evaluate_pictures

            return evaluate_pictures.exact_match(self._model, images.processor, self._rows)
        return exact_match(self._model, self._prepared.tokenizer, self._rows)

    def show(self, console: Console, metrics: MetricsFile) -> None:
        """Score the trained model, and print and write down both scores, with a few answers."""
        before, after = self._before, self._score()
        if not (before and after):
            return
        short = [i for i, made in enumerate(after.generations) if len(made.prompt) <= _LONGEST_PROMPT]
        examples = [
            {
                "prompt": after.generations[i].prompt,
                "before": before.generations[i].answer,
                "after": after.generations[i].answer,
                "expected": after.generations[i].expected,
            }
            for i in short[:_EXAMPLES]
        ]
        metrics.write(
            "demo", exact_match_before=before.score, exact_match_after=after.score, examples=examples
        )
        print_generations(console, before.score, after.score, len(after.generations), examples)


def write_report(
    console: Console,
    trainer: "RunTrainer",
    prepared: "Prepared",
    metrics: MetricsFile,
    summary: Mapping[str, Any],
) -> None:
    """Write `report.html`. Whatever goes wrong is told in a line, and the run ends well.

    Args:
        summary: the figures that end the run, which the metrics file does not hold yet.
    """
    if not metrics.enabled:
        return
    try:
        from unsloth_pack.report.html import RunSeen, write_page
        from unsloth_pack.report.metrics import line_of, read_lines

        folder, options = metrics.path.parent, prepared.options
        patch = patch_of(cast(Any, trainer.model))
        assert patch is not None
        rows = prepared.train.rows
        lengths = None if isinstance(rows, RowStream) else document_lengths(rows)
        capacity = prepared.train.packs.capacity if prepared.train.packs else options.model.max_seq_length
        row = _row_to_draw(trainer, prepared, capacity) if options.data.sample_packing else None
        seen = RunSeen(patch.report, lengths, row, options.model.max_seq_length)
        why_not = write_page(folder, [*read_lines(folder), line_of("summary", **summary)], seen)
    except Exception as error:
        why_not = f"{type(error).__name__}: {first_line(error)}"
    if why_not is not None:
        console.print(f"report.html was not written: {why_not}", soft_wrap=True, markup=False)


def _row_to_draw(trainer: "RunTrainer", prepared: "Prepared", capacity: int) -> "PackedRowSeen | None":
    """Among the first rows the one with the most documents; None where rows stream."""
    from unsloth_pack.report.html import PackedRowSeen

    if trainer.row_stream is not None:
        return None
    rows: Any = trainer.train_dataset
    first = rows.select(range(min(_ROWS_LOOKED_AT, len(rows))))
    row = max(first, key=lambda row: len(row["seq_lengths"]))
    is_counted = np.asarray(row["labels"]) != IGNORE_INDEX
    is_counted[np.cumsum([0, *row["seq_lengths"][:-1]])] = False  # no token comes before it
    return PackedRowSeen(row["seq_lengths"], is_counted, capacity, _images_to_draw(row, prepared))


def _images_to_draw(row: Mapping[str, Any], prepared: "Prepared") -> "list[ImageSeen]":
    from unsloth_pack.images.prepared import source_from_record
    from unsloth_pack.images.reading import UnreadableImage, read_pixels
    from unsloth_pack.report.html import placed
    from unsloth_pack.training.image_rows import COLUMN

    if prepared.images is None:
        return []
    pixels = []
    for image in row[COLUMN]:
        try:
            picture = read_pixels(source_from_record(image, prepared.images.folder))
            picture.thumbnail(_THUMBNAIL)
            pixels.append(np.asarray(picture))
        except UnreadableImage:  # it was left out of the training too
            pixels.append(np.full((1, 1, 3), 192, np.uint8))
    is_image = np.asarray(row["input_ids"]) == prepared.images.token_ids.placeholder
    return placed(is_image, [image["tokens"] for image in row[COLUMN]], pixels)


def stream_totals(trainer: "RunTrainer") -> StreamTotals | None:
    """What was read and trained on, if the data streams. Every process has to call this."""
    stream = trainer.row_stream
    return None if stream is None else totals(stream, trainer.rows_trained)


def summarise(
    trainer: "RunTrainer", fill: RowFill | None, stream: StreamTotals | None, parts: Sequence[Part]
) -> RunSummary:
    """How the run went, in all of its processes. Every process has to call this.

    Args:
        fill: of the rows, or None where they stream.
        stream: what was read of it.
        parts: the data sets.
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
        updates_left_out=trainer.finite_updates.left_out,
        broken_images=trainer.counts.broken_images,
        output_dir=str(trainer.args.output_dir),
        stream=_about_rows(stream, trainer, [part.name for part in parts]) if stream else None,
    )


def _about_rows(stream: StreamTotals, trainer: "RunTrainer", names: list[str]) -> RowsOfStream:
    rows = trainer.row_stream
    assert rows is not None
    slots = stream.rows * rows.capacity
    fill = RowFill(stream.rows, stream.documents, stream.tokens, slots, stream.tokens)
    read = zip(names, stream.read_of_parts, strict=False)  # none of them if there is one data set
    return RowsOfStream(fill, stream.waiting, tuple((name, *counts) for name, counts in read))

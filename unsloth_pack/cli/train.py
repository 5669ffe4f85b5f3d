"""`unsloth-pack train`: check everything, load, train, save, report."""

import atexit
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.cli import SUBCOMMANDS
from unsloth_pack.cli.mishaps import check_finite, explained, kept, report_nonfinite, way_on
from unsloth_pack.errors import RunStopped
from unsloth_pack.recipe import checks
from unsloth_pack.recipe.machine import count_processes, is_main_process, versions
from unsloth_pack.recipe.options import TrainOptions, read_options

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from unsloth_pack.data.ledger import TokenLedger
    from unsloth_pack.demo.evaluate import ExactMatch
    from unsloth_pack.recipe.prepare import Prepared
    from unsloth_pack.report.fill import RowFill
    from unsloth_pack.report.metrics import MetricsFile
    from unsloth_pack.report.tables import RunSummary
    from unsloth_pack.training.trl import RunTrainer

_EXAMPLES = 3  # generations shown side by side
_LONGEST_PROMPT = 120  # characters of a prompt that is shown


def run(arguments: Sequence[str]) -> int:
    """Train as the arguments say.

    Returns:
        0, or 130 or 143 where SIGINT or SIGTERM ended the run with a checkpoint to resume from.

    Raises:
        InputError: something is missing, contradictory or cannot work here; nothing has been written then.
    """
    others = ", ".join(name for name in SUBCOMMANDS if name != "train")
    options = read_options(arguments, f"Other subcommands: {others}. Each has its own --help.")
    checks.check_options(options)

    from unsloth_pack.cli.quiet import quieten
    from unsloth_pack.recipe.prepare import prepare
    from unsloth_pack.report.console import RunConsole

    quieten(show_bars=is_main_process())
    prepared = prepare(options)
    checks.check_same_data(options, "train", prepared.ledger, prepared.fingerprint)
    if prepared.eval_ledger:
        checks.check_same_data(options, "eval", prepared.eval_ledger, prepared.eval_fingerprint)
    _begin_together()
    return _train(prepared, RunConsole(quiet=not is_main_process()))


def _train(prepared: "Prepared", console: "Console") -> int:
    from unsloth_pack.checks import probe
    from unsloth_pack.patching.patch import patch_of
    from unsloth_pack.report.callbacks import MetricsCallback, ProgressCallback, StopOnSignal
    from unsloth_pack.training.checkpoints import last_checkpoint
    from unsloth_pack.training.sharded_weights import loaded_whole
    from unsloth_pack.training.trl import make_trainer

    options = prepared.options
    with loaded_whole(prepared.config):
        model = _load_model(options)
        patch = patch_of(model)
        assert patch is not None
        if options.no_probe:
            patch.skip_probe()
        elif prepared.config.padding_free:
            probe(model, describe="trl")  # a leak ends the run here, before anything is written
    heldout = _heldout_rows(options)
    before = _score(model, prepared, heldout)

    folder = options.folder
    checkpoint = last_checkpoint(folder) if options.resume else None
    metrics = _open_metrics(options, folder, checkpoint)
    stop = StopOnSignal()
    trainer = make_trainer(
        model,
        prepared.tokenizer,
        prepared.config,
        prepared.rows,
        prepared.eval_rows,
        [MetricsCallback(metrics), stop],
    )
    fill = _describe_rows(trainer, prepared, metrics, is_new=checkpoint is None)
    trainer.add_callback(
        ProgressCallback(console, lambda updates: _announce(console, trainer, prepared, fill, updates))
    )
    with stop, explained(trainer, options):
        report_nonfinite(trainer, options, console, metrics)
        trainer.train_from(checkpoint)
        check_finite(trainer)
    if stop.received and trainer.state.global_step < trainer.state.max_steps:
        _end_together()
        return _say_how_to_go_on(console, trainer, metrics, stop.received)

    with kept(folder):
        summary = _summarise(trainer, fill)
        weights = trainer.trained_weights() if trainer.is_sharded else None
        if is_main_process():
            _save_adapter(model, prepared, folder, weights)
        _end_together()
        if is_main_process():
            _save_merged_and_plot(model, prepared, trainer, folder)
        after = _score(model, prepared, heldout)
        if before and after:
            _show_scores(console, before, after, metrics)
        _show_summary(console, summary, prepared.ledger, metrics)
    return 0


def _begin_together() -> None:
    """Wait until no process has anything to refuse: the main one replaces files that the others check.

    Raises:
        RunStopped: another process has ended, with a line of its own.
    """
    from accelerate import PartialState

    try:
        PartialState().wait_for_everyone()
    except RuntimeError as error:
        raise RunStopped("another process has ended before the training began; see its line") from error


def _end_together() -> None:
    """Wait for the main process, which has saved what was trained, and leave the group when this one ends.

    A thread of gloo that lets go of a backward pass's reduction while Python ends would abort the process.
    Merging comes later: it may take longer than the others may wait.
    """
    from accelerate import PartialState

    state = PartialState()
    if state.use_distributed:
        state.wait_for_everyone()
        atexit.register(state.destroy_process_group)


def _load_model(options: TrainOptions) -> Any:
    from unsloth_pack.api import FastLanguageModel

    def chosen(*names: str) -> dict[str, Any]:
        return {name: getattr(options, name) for name in names}

    load = chosen("model_name", "max_seq_length", "dtype", "load_in_4bit", "load_in_8bit", "load_in_fp8")
    load |= chosen("attn_backend")
    model, _ = FastLanguageModel.from_pretrained(**load, random_state=options.random_state)
    adapter = chosen("r", "lora_alpha", "lora_dropout", "bias", "use_rslora", "use_dora", "loftq_config")
    adapter |= chosen("use_gradient_checkpointing", "random_state")
    return FastLanguageModel.get_peft_model(model, **adapter)


def _open_metrics(options: TrainOptions, folder: Path, checkpoint: Path | None) -> "MetricsFile":
    """The metrics file of this run; what an earlier run left goes, or stays up to the checkpoint."""
    from unsloth_pack.files.whole_folders import remove_folder, remove_leftovers
    from unsloth_pack.report.metrics import MetricsFile
    from unsloth_pack.training.checkpoints import ASIDE, step_of

    is_main = is_main_process()
    if is_main:
        remove_leftovers(folder)
        remove_folder(folder / ASIDE)
    if is_main and checkpoint is None and (options.overwrite_output_dir or options.resume):
        for path in checks.run_files(folder):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    metrics = MetricsFile(folder, enabled=is_main)
    if checkpoint is not None:
        metrics.rewind(step_of(checkpoint))
        return metrics
    metrics.write("config", options=asdict(options), versions=versions(), processes=count_processes())
    return metrics


def _describe_rows(
    trainer: "RunTrainer", prepared: "Prepared", metrics: "MetricsFile", is_new: bool
) -> "RowFill":
    """How full the training rows are; plotted, and written down beside the ledger of their tokens."""
    from unsloth_pack.report.fill import document_lengths, fill_of_joined, fill_of_packed, fill_of_padded
    from unsloth_pack.report.plots import plot_lengths

    options = prepared.options
    if options.sample_packing:
        capacity = prepared.packs.capacity if prepared.packs else options.max_seq_length
        fill = fill_of_packed(trainer.train_dataset, capacity)
    elif options.padding_free:
        fill = fill_of_joined(prepared.rows)
    else:
        fill = fill_of_padded(prepared.rows, prepared.config.per_device_train_batch_size, options.seed)
    if metrics.enabled and is_new:
        slots = asdict(fill) | {"tokens_padded": fill.padding}
        sampler = trainer.packed_sampler
        spread = {"spread": asdict(sampler.spread())} if sampler and sampler.world_size > 1 else {}
        data: dict[str, Any] = {"ledger": asdict(prepared.ledger), "fingerprint": prepared.fingerprint}
        metrics.write("data", use="train", **data, fill=slots, **spread)
        if prepared.eval_ledger:
            data = {"ledger": asdict(prepared.eval_ledger), "fingerprint": prepared.eval_fingerprint}
            metrics.write("data", use="eval", **data)
        lengths = document_lengths(prepared.rows)
        plot_lengths(lengths, options.max_seq_length, metrics.path.parent / "lengths.png")
    return fill


def _announce(
    console: "Console", trainer: "RunTrainer", prepared: "Prepared", fill: "RowFill", updates: int
) -> None:
    from unsloth_pack.patching.patch import patch_of
    from unsloth_pack.report.tables import RunFacts, print_banner

    config = prepared.config
    model: Any = trainer.model
    patch = patch_of(model)
    assert patch is not None
    trained, everything = model.get_nb_trainable_parameters()
    sampler = trainer.packed_sampler
    facts = RunFacts(
        model_name=prepared.options.model_name,
        dtype=str(prepared.dtype).removeprefix("torch."),
        device=_device_name(config.device, config.world_size),
        trained_parameters=trained,
        all_parameters=everything,
        packs=prepared.packs,
        rows_per_step=config.per_device_train_batch_size,
        rows_per_update=config.per_device_train_batch_size
        * config.gradient_accumulation_steps
        * config.world_size,
        steps=updates,
        optimizer=f"{prepared.options.optim}, learning rate {config.learning_rate:g}",
        output_dir=str(config.output_dir),
        spread=str(sampler.spread()) if sampler is not None and config.world_size > 1 else None,
    )
    print_banner(console, facts, patch.report, prepared.ledger, fill)


def _device_name(device: Any, count: int) -> str:
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    if count == 1 and device.type == "cuda" and torch.cuda.device_count() > 1:
        n_gpus = torch.cuda.device_count()
        return f"{name}, one of {n_gpus} (torchrun --nproc_per_node {n_gpus} cli.py trains on all)"
    return name if count == 1 else f"{count} x {name}"


def _heldout_rows(options: TrainOptions) -> list[dict[str, str]]:
    """The demo's held-out rows; none in other runs, beside the main process, and with sharded weights."""
    if not (options.is_demo and is_main_process()) or options.fsdp or options.deepspeed:
        return []
    from unsloth_pack.data import load_rows

    return load_rows("demo", "test").to_list()


def _score(model: Any, prepared: "Prepared", rows: list[dict[str, str]]) -> "ExactMatch | None":
    from unsloth_pack.demo.evaluate import exact_match

    return exact_match(model, prepared.tokenizer, rows) if rows else None


def _show_scores(
    console: "Console", before: "ExactMatch", after: "ExactMatch", metrics: "MetricsFile"
) -> None:
    from unsloth_pack.report.tables import print_generations

    short = [i for i, made in enumerate(after.generations) if len(made.prompt) <= _LONGEST_PROMPT][:_EXAMPLES]
    examples = [
        {
            "prompt": after.generations[i].prompt,
            "before": before.generations[i].answer,
            "after": after.generations[i].answer,
            "expected": after.generations[i].expected,
        }
        for i in short
    ]
    metrics.write("demo", exact_match_before=before.score, exact_match_after=after.score, examples=examples)
    print_generations(console, before.score, after.score, len(after.generations), examples)


def _say_how_to_go_on(console: "Console", trainer: "RunTrainer", metrics: "MetricsFile", signal: Any) -> int:
    step = trainer.state.global_step
    metrics.write("stopped", step=step, signal=signal.name)
    console.print(
        f"stopped by {signal.name} after update {step} of {trainer.state.max_steps}; "
        + way_on(Path(str(trainer.args.output_dir))),
        soft_wrap=True,
        markup=False,
    )
    return 128 + int(signal)


def _save_adapter(
    model: Any, prepared: "Prepared", folder: Path, weights: dict[str, "Tensor"] | None
) -> None:
    """Save the adapter; `weights` are what was trained, where the model's own are sharded."""
    model.save_pretrained_merged(folder, prepared.tokenizer, save_method="lora", state_dict=weights)


def _save_merged_and_plot(model: Any, prepared: "Prepared", trainer: "RunTrainer", folder: Path) -> None:
    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.report.plots import plot_loss
    from unsloth_pack.training.sharded_weights import loaded_whole

    options = prepared.options
    if options.save_model:
        if trainer.is_sharded:  # no process holds the model: the adapter, on its base once more
            with loaded_whole(prepared.config):
                model, _ = FastLanguageModel.from_pretrained(
                    str(folder), max_seq_length=1, dtype=options.dtype, device_map={"": "cpu"}
                )
        model.save_pretrained_merged(options.save_path, prepared.tokenizer, save_method=options.save_method)
    plot_loss(trainer.state.log_history, folder / "loss.png")


def _summarise(trainer: "RunTrainer", fill: "RowFill") -> "RunSummary":
    """How the run went, in all of its processes."""
    from accelerate.utils import gather_object

    from unsloth_pack.report.memory import peak_memory
    from unsloth_pack.report.tables import RunSummary

    trained = trainer.trained
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    n_bytes, what = peak_memory()
    by_rank = gather_object([n_bytes])
    return RunSummary(
        steps=trainer.state.global_step,
        seconds=trained.seconds,
        epochs=trainer.state.epoch or 0.0,
        tokens_trained=trained.tokens,
        tokens_counted=trained.counted,
        tokens_padded=trained.slots - trained.tokens,
        documents_per_second=trained.tokens * fill.documents / fill.tokens / trained.seconds,
        tokens_per_second=trained.tokens / trained.seconds,
        peak_memory_bytes=max(by_rank),
        peak_memory_of=what,
        peak_memory_by_rank=by_rank,
        first_loss=losses[0],
        last_loss=losses[-1],
        updates_left_out=trainer.finite_updates.left_out,
        output_dir=str(trainer.args.output_dir),
    )


def _show_summary(
    console: "Console", summary: "RunSummary", ledger: "TokenLedger", metrics: "MetricsFile"
) -> None:
    from unsloth_pack.report.tables import print_summary

    metrics.write("summary", **asdict(summary), ledger=asdict(ledger))
    print_summary(console, summary, ledger)

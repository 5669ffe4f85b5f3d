"""`unsloth-pack train`: check everything, load, train, save, report."""

import atexit
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.cli import SUBCOMMANDS
from unsloth_pack.cli.mishaps import check_finite, check_stream, explained, kept, report_nonfinite, way_on
from unsloth_pack.errors import RunStopped
from unsloth_pack.files.locks import claimed
from unsloth_pack.files.saved_names import CARD
from unsloth_pack.recipe import checks
from unsloth_pack.recipe.command_line import read_options
from unsloth_pack.recipe.flags import flat
from unsloth_pack.recipe.machine import check_launcher, count_processes, is_main_process, versions
from unsloth_pack.recipe.options import TrainOptions

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from unsloth_pack.data.ledger import TokenLedger
    from unsloth_pack.recipe.prepare import Prepared
    from unsloth_pack.report.callbacks import StopOnSignal
    from unsloth_pack.report.metrics import MetricsFile
    from unsloth_pack.report.tables import RunSummary
    from unsloth_pack.training.trl import RunTrainer


def run(arguments: Sequence[str]) -> int:
    """Train as the arguments say.

    Returns:
        0, or 130, 143 or 129 where SIGINT, SIGTERM or SIGHUP ended the run, with a checkpoint to resume
        from.

    Raises:
        InputError: something is missing, contradictory or cannot work here; nothing has been written then.
    """
    others = ", ".join(name for name in SUBCOMMANDS if name != "train")
    options = read_options(arguments, f"Other subcommands: {others}. Each has its own --help.")
    checks.check_options(options)
    check_launcher()
    with claimed(options.folder) if is_main_process() else nullcontext():
        checks.check_folders(options)  # again: another run may have ended there just before
        return _run(options)


def _run(options: TrainOptions) -> int:
    from unsloth_pack.cli.quiet import quieten
    from unsloth_pack.recipe.prepare import prepare
    from unsloth_pack.report.console import RunConsole

    quieten(show_bars=is_main_process())
    prepared = prepare(options)
    checks.check_same_data(options, "train", prepared.train.ledger, prepared.train.fingerprint)
    if prepared.evaluation:
        checks.check_same_data(options, "eval", prepared.evaluation.ledger, prepared.evaluation.fingerprint)
    _begin_together()
    return _train(prepared, RunConsole(quiet=not is_main_process()))


def _train(prepared: "Prepared", console: "Console") -> int:
    """Load, train, save and report; returns the exit code."""
    from unsloth_pack.cli.run_report import DemoScores, announce, describe_rows, stream_totals, summarise
    from unsloth_pack.report.callbacks import ProgressCallback, StopOnSignal
    from unsloth_pack.training.checkpoints import last_checkpoint
    from unsloth_pack.training.row_stream import RowStream

    options = prepared.options
    model = _load_probed(prepared)
    scores = DemoScores(model, prepared)
    checkpoint = last_checkpoint(options.folder) if options.output.resume else None
    metrics = _open_metrics(options, checkpoint)
    rows = prepared.train.rows
    stop = StopOnSignal(lambda: isinstance(rows, RowStream) and rows.error is not None)
    trainer = _trainer(model, prepared, metrics, stop)
    fill = describe_rows(trainer, prepared, metrics, is_new=checkpoint is None)
    show = ProgressCallback(console, lambda updates: announce(console, trainer, prepared, fill, updates))
    trainer.add_callback(show)

    _fit(trainer, options, checkpoint, stop, console, metrics)
    if stop.received and trainer.state.global_step < trainer.state.max_steps:
        _end_together()
        return _say_how_to_go_on(console, trainer, metrics, stop.received)
    with kept(options.folder):
        totals = stream_totals(trainer)
        summary = summarise(trainer, fill, totals)
        _save(model, trainer, prepared)
        scores.show(console, metrics)
        _show_summary(console, summary, totals.ledger if totals else prepared.train.ledger, metrics)
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
    """Wait for the main process to save what was trained; leave the group of processes when this one ends.

    Otherwise gloo's thread may still hold a tensor of the backward pass while Python ends, which aborts the
    process. Merging comes later: it may take longer than the other processes may wait.
    """
    from accelerate import PartialState

    state = PartialState()
    if state.use_distributed:
        state.wait_for_everyone()
        atexit.register(state.destroy_process_group)


def _load_probed(prepared: "Prepared") -> Any:
    """The model with its adapter. If documents leak in it, the run ends here, before anything is written."""
    from unsloth_pack.checks import probe
    from unsloth_pack.patching.patch import patch_of
    from unsloth_pack.training.sharded_weights import loaded_whole

    with loaded_whole(prepared.config):
        model = _load_model(prepared.options)
        patch = patch_of(model)
        assert patch is not None
        if prepared.options.training.no_probe:
            patch.skip_probe()
        elif prepared.config.padding_free:
            probe(model, describe="trl")
    return model


def _load_model(options: TrainOptions) -> Any:
    from unsloth_pack.api import FastLanguageModel

    checkpointing, seed = options.training.use_gradient_checkpointing, options.adapter.random_state
    model, _ = FastLanguageModel.from_pretrained(**flat(options.model), random_state=seed)
    return FastLanguageModel.get_peft_model(
        model, **flat(options.adapter), use_gradient_checkpointing=checkpointing
    )


def _open_metrics(options: TrainOptions, checkpoint: Path | None) -> "MetricsFile":
    """The metrics file of this run; what an earlier run left is removed, or kept up to the checkpoint."""
    from unsloth_pack.files.whole_folders import remove_folder
    from unsloth_pack.report.metrics import MetricsFile
    from unsloth_pack.training.checkpoints import ASIDE, step_of

    folder, output, is_main = options.folder, options.output, is_main_process()
    if is_main:
        remove_folder(folder / ASIDE)
    if is_main and checkpoint is None and (output.overwrite_output_dir or output.resume):
        card = [folder / CARD] if output.overwrite_output_dir and (folder / CARD).is_file() else []
        for path in checks.run_files(folder) + card:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    metrics = MetricsFile(folder, enabled=is_main)
    if checkpoint is not None:
        metrics.rewind(step_of(checkpoint))
        return metrics
    run_as = {"processes": count_processes(), "cwd": str(Path.cwd())}
    metrics.write("config", options=flat(options), versions=versions(), **run_as)
    return metrics


def _trainer(model: Any, prepared: "Prepared", metrics: "MetricsFile", stop: "StopOnSignal") -> "RunTrainer":
    from unsloth_pack.report.callbacks import MetricsCallback
    from unsloth_pack.training.trl import make_trainer

    return make_trainer(
        model,
        prepared.tokenizer,
        prepared.config,
        prepared.train.rows,
        prepared.evaluation.rows if prepared.evaluation else None,
        [MetricsCallback(metrics), stop],
    )


def _fit(
    trainer: "RunTrainer",
    options: TrainOptions,
    checkpoint: Path | None,
    stop: "StopOnSignal",
    console: "Console",
    metrics: "MetricsFile",
) -> None:
    """Train to the end, or until a signal stops the run."""
    with stop, explained(trainer, options):
        report_nonfinite(trainer, options, console, metrics)
        trainer.train_from(checkpoint)
        check_stream(trainer, stop)
        check_finite(trainer)


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


def _save(model: Any, trainer: "RunTrainer", prepared: "Prepared") -> None:
    """Save the adapter, let the other processes go, then save what may take long."""
    folder = prepared.options.folder
    weights = trainer.trained_weights() if trainer.is_sharded else None
    if is_main_process():
        _save_adapter(model, prepared, folder, weights)
    _end_together()
    if is_main_process():
        _save_merged_and_plot(model, prepared, trainer, folder)


def _save_adapter(
    model: Any, prepared: "Prepared", folder: Path, weights: dict[str, "Tensor"] | None
) -> None:
    """Save the adapter; `weights` are what was trained, if the model's own are sharded."""
    model.save_pretrained_merged(folder, prepared.tokenizer, save_method="lora", state_dict=weights)


def _save_merged_and_plot(model: Any, prepared: "Prepared", trainer: "RunTrainer", folder: Path) -> None:
    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.report.plots import plot_loss
    from unsloth_pack.training.sharded_weights import loaded_whole

    options, output = prepared.options, prepared.options.output
    if output.save_model:
        if trainer.is_sharded:  # no process holds the model: load the base again, with the adapter just saved
            with loaded_whole(prepared.config):
                model, _ = FastLanguageModel.from_pretrained(
                    str(folder), max_seq_length=1, dtype=options.model.dtype, device_map={"": "cpu"}
                )
        model.save_pretrained_merged(output.save_path, prepared.tokenizer, save_method=output.save_method)
    plot_loss(trainer.state.log_history, folder / "loss.png")


def _show_summary(
    console: "Console", summary: "RunSummary", ledger: "TokenLedger", metrics: "MetricsFile"
) -> None:
    from unsloth_pack.report.tables import print_summary

    metrics.write("summary", **asdict(summary), ledger=asdict(ledger))
    print_summary(console, summary, ledger)

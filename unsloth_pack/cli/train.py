"""`unsloth-pack train`: check everything, load, train, save, report."""

import atexit
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.checkpoints.atomic import claimed
from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, CARD
from unsloth_pack.checkpoints.vllm_compat import note_on_vllm
from unsloth_pack.cli import SUBCOMMANDS
from unsloth_pack.cli.quiet import quieten
from unsloth_pack.cli.run_errors import (
    check_finite,
    check_learned,
    check_stream,
    explained,
    kept,
    report_nonfinite,
    resume_hint,
)
from unsloth_pack.config import TrainOptions, flat, load, telling_places, train_parser
from unsloth_pack.forked import children_end_with_this_process
from unsloth_pack.run import folder as run_folder
from unsloth_pack.run.folder import save_config
from unsloth_pack.run.hub import upload
from unsloth_pack.run.machine import check_launcher, count_processes, is_main_process, versions, wait_for_all
from unsloth_pack.run.resolve import filled_in
from unsloth_pack.run.validate import check_first, check_here, check_sure

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from unsloth_pack.report.callbacks import StopOnSignal
    from unsloth_pack.report.metrics import MetricsFile
    from unsloth_pack.run.prepare import Prepared
    from unsloth_pack.training.trainer import RunTrainer


def run(arguments: Sequence[str]) -> int:
    """Train as the arguments say.

    Returns:
        0, or 130, 143 or 129 where SIGINT, SIGTERM or SIGHUP ended the run, with a checkpoint to resume
        from.

    Raises:
        InputError: something is missing, contradictory or cannot work here; nothing has been written then.
    """
    others = ", ".join(name for name in SUBCOMMANDS if name != "train")
    epilog = f"Other subcommands: {others}. Each has its own --help. --version prints the version."
    asked = load(arguments, train_parser(epilog=epilog), check_sure)
    with telling_places(asked):
        given = asked.given
        options = filled_in(given, may_lack_adapter=True)  # which is told with the other mistakes
        check_first(options, given)
        check_launcher()
        quieten(show_bars=is_main_process())
        check_here(options, given)
        claim = claimed(options.folder) if is_main_process() else nullcontext()
        with claim, children_end_with_this_process():
            run_folder.check_folders(options)  # again: another run may have ended there just before
            return _run(options)


def _run(options: TrainOptions) -> int:
    from unsloth_pack.report.terminal import RunConsole
    from unsloth_pack.run.prepare import prepare

    prepared = prepare(options)
    run_folder.check_same_data(options, "train", prepared.train.ledger, prepared.train.fingerprint)
    if prepared.evaluation:
        run_folder.check_same_data(
            options, "eval", prepared.evaluation.ledger, prepared.evaluation.fingerprint
        )
    wait_for_all()
    return _train(prepared, RunConsole(quiet=not is_main_process()))


def _train(prepared: "Prepared", console: "Console") -> int:
    """Load, train, save and report; returns the exit code."""
    from unsloth_pack.cli.run_report import (
        DemoScores,
        announce,
        describe_rows,
        stream_totals,
        summarise,
        write_report,
    )
    from unsloth_pack.report.callbacks import ProgressCallback, StopOnSignal
    from unsloth_pack.report.terminal import print_summary
    from unsloth_pack.training.checkpoints import last_checkpoint
    from unsloth_pack.training.streaming import RowStream

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
    check_learned(trainer)
    with kept(options.folder):
        totals = stream_totals(trainer)
        summary = summarise(trainer, fill, totals, prepared.train.parts)
        _save(model, trainer, prepared)
        _say_who_serves_it(console, options)
        scores.show(console, metrics)
        ledger = totals.ledger if totals else prepared.train.ledger
        figures = {**asdict(summary), "ledger": asdict(ledger)}
        write_report(console, trainer, prepared, metrics, figures)
        metrics.write("summary", **figures)  # ends the run: what comes later is lost if it is killed
        print_summary(console, summary, ledger)
        if options.output.push_to_hub is not None and is_main_process():
            upload(options.folder, options.output.push_to_hub)
    return 0


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
    from unsloth_pack.patching.patch import patch_of
    from unsloth_pack.run.model import load_run_model, removed_if_refused
    from unsloth_pack.run.parameters import rates_of
    from unsloth_pack.training.distributed import loaded_whole
    from unsloth_pack.training.optimizers import check_host_memory, check_rates
    from unsloth_pack.verification import probe

    with removed_if_refused(prepared.options), loaded_whole(prepared.config):
        model = load_run_model(prepared.options, prepared.new_tokens, prepared.images is not None)
        check_rates(model, rates_of(prepared.options))
        if prepared.options.training.masters_on_host:
            check_host_memory(model)
        patch = patch_of(model)
        assert patch is not None
        if prepared.options.training.no_probe:
            patch.skip_probe()
        elif prepared.config.padding_free:
            probe(model, describe="trl")
    return model


def _open_metrics(options: TrainOptions, checkpoint: Path | None) -> "MetricsFile":
    """The metrics file of this run; what an earlier run left is removed, or kept up to the checkpoint."""
    from unsloth_pack.checkpoints.atomic import remove_folder
    from unsloth_pack.report.metrics import MetricsFile
    from unsloth_pack.run.model import keep_merged_base
    from unsloth_pack.training.checkpoints import ASIDE, step_of

    folder, output, is_main = options.folder, options.output, is_main_process()
    if is_main:
        remove_folder(folder / ASIDE)
    if is_main and checkpoint is None and (output.overwrite_output_dir or output.resume):
        card = [folder / CARD] if output.overwrite_output_dir and (folder / CARD).is_file() else []
        for path in run_folder.run_files(folder) + card:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    keep_merged_base(options)
    metrics = MetricsFile(folder, enabled=is_main)
    if checkpoint is not None:
        metrics.rewind(step_of(checkpoint))
        return metrics
    run_as = {"processes": count_processes(), "cwd": str(Path.cwd())}
    metrics.write("config", options=flat(options), versions=versions(), **run_as)
    if is_main:
        save_config(options)
    return metrics


def _trainer(model: Any, prepared: "Prepared", metrics: "MetricsFile", stop: "StopOnSignal") -> "RunTrainer":
    from unsloth_pack.report.callbacks import MetricsCallback
    from unsloth_pack.run.parameters import rates_of
    from unsloth_pack.training.checkpoints import EarlyStopping
    from unsloth_pack.training.trainer import make_trainer

    training = prepared.options.training
    callbacks: list[Any] = [MetricsCallback(metrics)]
    if training.early_stopping_patience:
        callbacks.append(EarlyStopping(training.early_stopping_patience))
    return make_trainer(
        model,
        prepared.tokenizer,
        prepared.config,
        prepared.train.rows,
        prepared.evaluation.rows if prepared.evaluation else None,
        [*callbacks, stop],
        rates=rates_of(prepared.options),
        save_delay_steps=prepared.options.output.save_delay_steps or 0,
        optimizer_in_backward=training.optimizer_in_backward,
        masters_on_host=training.masters_on_host,
        image_rows=prepared.images.collator() if prepared.images else None,
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
        + resume_hint(Path(str(trainer.args.output_dir))),
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


def _say_who_serves_it(console: "Console", options: TrainOptions) -> None:
    """Print what vLLM needs for the adapter that was saved, or that it cannot serve it."""
    path = options.folder / ADAPTER_CONFIG
    if path.is_file() and (note := note_on_vllm(json.loads(path.read_text(encoding="utf-8")))):
        console.print(note, soft_wrap=True, markup=False)


def _save_adapter(
    model: Any, prepared: "Prepared", folder: Path, weights: dict[str, "Tensor"] | None
) -> None:
    """Save the adapter, or the model; `weights` are what was trained, if the model's own are sharded."""
    if prepared.options.adapter.tuning == "full":
        from unsloth_pack.checkpoints.saving import save_in_own_dtype

        return save_in_own_dtype(model, folder, prepared.saved_with_model)
    model.save_pretrained_merged(folder, prepared.saved_with_model, save_method="lora", state_dict=weights)


def _save_merged_and_plot(model: Any, prepared: "Prepared", trainer: "RunTrainer", folder: Path) -> None:
    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.report.html import plot_loss
    from unsloth_pack.training.distributed import loaded_whole

    options, output = prepared.options, prepared.options.output
    if output.save_model:
        if trainer.is_sharded:  # no process holds the model: load the base again, with the adapter just saved
            with loaded_whole(prepared.config):
                model, _ = FastLanguageModel.from_pretrained(
                    str(folder), max_seq_length=1, dtype=options.model.dtype, device_map={"": "cpu"}
                )
        beside = prepared.saved_with_model
        model.save_pretrained_merged(output.save_path, beside, save_method=output.save_method)
    plot_loss(trainer.state.log_history, folder / "loss.png")

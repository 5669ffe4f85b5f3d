"""`unsloth-pack train`: check everything, load, train, save, report."""

import atexit
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.checkpoints.atomic import claimed
from unsloth_pack.checkpoints.names import ADAPTER_CONFIG, CARD
from unsloth_pack.checkpoints.vllm_compat import note_on_vllm
from unsloth_pack.cli import SUBCOMMANDS, quieten
from unsloth_pack.cli.estimate import show
from unsloth_pack.cli.run_errors import check_end, check_learned, explained, say_how_to_resume
from unsloth_pack.config import Parser, TrainOptions, flat, load, telling_places, train_parser
from unsloth_pack.config.options import OutputOptions
from unsloth_pack.errors import raise_together
from unsloth_pack.forked import children_end_with_this_process
from unsloth_pack.run import folder as run_folder
from unsloth_pack.run.hub import upload
from unsloth_pack.run.machine import (
    check_launcher,
    count_processes,
    device_type,
    is_main_process,
    versions,
)
from unsloth_pack.run.ranks import check_same_model, check_same_rows, refused_together
from unsloth_pack.run.resolve import paths_of, resolve, with_optimizer
from unsloth_pack.run.validate import validate, validate_model, wrong_folders

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from trl import SFTConfig

    from unsloth_pack.report.callbacks import MetricsFile
    from unsloth_pack.run.data import TrainingData
    from unsloth_pack.training.trainer import RunTrainer


def run(arguments: Sequence[str]) -> int:
    """Train with the options of a command line.

    Returns 0, or 130, 143 or 129 where SIGINT, SIGTERM or SIGHUP ended the run, with a checkpoint to resume.
    """
    loaded = load(arguments, build_parser())
    with telling_places(loaded):
        check_launcher()
        with refused_together():
            options = resolve(loaded)
            validate(options)
            quieten(show_bars=is_main_process())
            options = with_optimizer(options, device_type())
            validate_model(options)
            from unsloth_pack.run.estimate import check_memory, with_rows_that_fit
            from unsloth_pack.training.chips import Gpu

            options = with_rows_that_fit(options, Gpu.here())
            estimate = check_memory(options)
            if options.output.dry_run:
                if is_main_process():
                    show(options, None if estimate is None else estimate.gpu)
                return 0
            config, dtype = _build_config(options)  # which joins the processes
        claim = claimed(options.output.folder) if is_main_process() else nullcontext()
        with claim, children_end_with_this_process():
            raise_together(wrong_folders(options))  # again: another run may have ended there just before
            memory = None if estimate is None else f"about {estimate}"
            return _run(options, config, dtype, memory)


def build_parser() -> Parser:
    """Make the parser of this subcommand."""
    others = ", ".join(name for name in SUBCOMMANDS if name != "train")
    epilog = f"Other subcommands: {others}. Each has its own --help. --version prints the version. "
    return train_parser(epilog=epilog + "--print-completion bash|zsh|tcsh prints what completes them.")


def _build_config(o: TrainOptions) -> "tuple[SFTConfig, torch.dtype]":
    from unsloth_pack.checkpoints.loading import weight_dtype
    from unsloth_pack.run.trainer import build_config

    dtype = weight_dtype(o.model.dtype, o.adapter.tuning == "full")
    return build_config(o.data, o.training, o.output, dtype), dtype


def _run(o: TrainOptions, config: "SFTConfig", dtype: "torch.dtype", memory: str | None) -> int:
    """Load, train, save and report; returns the exit code. `memory` is what is expected of a GPU's."""
    from unsloth_pack.cli.run_report import RunReport, score_demo, show_scores
    from unsloth_pack.report.callbacks import RunConsole, StopOnSignal
    from unsloth_pack.run.data import build_data
    from unsloth_pack.run.documents import load_run_tokenizer
    from unsloth_pack.run.model import build_model
    from unsloth_pack.run.objective import build_objective, check_teacher
    from unsloth_pack.run.trainer import build_trainer
    from unsloth_pack.training.checkpoints import last_checkpoint
    from unsloth_pack.training.streaming import RowStream

    folder, console = o.output.folder, RunConsole(quiet=not is_main_process())
    with refused_together():
        tokenizer = load_run_tokenizer(o.model.model_name, o.adapter)
        if o.training.objective == "distill":
            check_teacher(o.distill, tokenizer.tokenizer)
        data = build_data(
            *(o.model, o.data, o.images, tokenizer, config, o.adapter.init_adapter),
            objective=o.training.objective,
            teacher=o.distill.teacher,
            rollouts=o.rollouts,
        )
    for use, part in (("train", data.train), ("eval", data.evaluation)):
        paths = paths_of(o.data.dataset if use == "train" else o.data.eval_dataset or o.data.dataset)
        if part is not None:
            check_same_rows(", ".join(paths), part.ledger, part.fingerprint)
            if o.output.resume:
                run_folder.check_same_data(folder, use, paths, part.ledger, part.fingerprint)
    check_same_model(o.adapter.init_adapter or o.model.model_name)

    model = build_model(
        *(o.model, o.adapter, o.images, o.training, config, tokenizer.new_tokens),
        has_images=data.images is not None,
        labels=data.labels,
        folder=folder,
        is_resumed=o.output.resume,
    )
    objective = build_objective(o, model, data.is_scored)
    is_sharded = o.training.fsdp is not None or o.training.deepspeed is not None
    demo = o.model.model_name if o.is_demo and not is_sharded else None
    score_before = score_demo(demo, model, tokenizer.tokenizer, data.images)
    checkpoint = last_checkpoint(folder) if o.output.resume else None
    metrics = _open_metrics(o, checkpoint)
    rows = data.train.rows
    stop = StopOnSignal(rows.has_failed) if isinstance(rows, RowStream) else StopOnSignal()
    trainer = build_trainer(
        *(model, tokenizer.tokenizer, config, data, o.training, o.images),
        o.output.save_delay_steps or 0,
        [metrics, stop],
        objective,
    )
    report = RunReport(console, metrics, trainer, data, o, dtype, memory)
    if checkpoint is None:
        report.write_data()
    advice = {"max_seq_length": o.model.max_seq_length, "quantised": o.model.load_in_4bit}
    advice["recomputes_all"] = o.training.use_gradient_checkpointing not in (False, "auto")
    with stop, explained(folder, trainer, **advice):
        trainer.train_from(checkpoint)
        check_end(trainer, stop)
    if stop.received and trainer.state.global_step < trainer.state.max_steps:
        _end_together()
        return say_how_to_resume(console, trainer, metrics, stop.received)
    check_learned(trainer)
    with explained(folder):
        summary, ledger = report.summarise()
        weights, is_main = trainer.trained_weights(), is_main_process()
        if is_main:
            _save_adapter(model, folder, data, o.adapter.tuning == "full", weights)
        _end_together()
        if is_main:
            _save_merged_and_plot(model, trainer, data.saved_with_model, o.output, o.model.dtype)
        path = folder / ADAPTER_CONFIG
        if path.is_file() and (note := note_on_vllm(json.loads(path.read_text(encoding="utf-8")))):
            console.print(note, soft_wrap=True, markup=False)
        if score_before and (score := score_demo(demo, model, tokenizer.tokenizer, data.images)):
            show_scores(score_before, score, console, metrics)
        report.finish(summary, ledger)
        if o.output.push_to_hub is not None and is_main_process():
            upload(folder, o.output.push_to_hub)
    return 0


def _open_metrics(options: TrainOptions, checkpoint: Path | None) -> "MetricsFile":
    """Open the metrics file. Files of an earlier run are removed, or its lines kept up to the checkpoint."""
    from unsloth_pack.checkpoints.atomic import remove_folder
    from unsloth_pack.report.callbacks import MetricsFile
    from unsloth_pack.run.model import keep_merged_base
    from unsloth_pack.training.checkpoints import ASIDE, step_of

    folder, output, is_main = options.output.folder, options.output, is_main_process()
    if is_main:
        remove_folder(folder / ASIDE)
    if is_main and checkpoint is None and (output.overwrite_output_dir or output.resume):
        card = [folder / CARD] if output.overwrite_output_dir and (folder / CARD).is_file() else []
        for path in run_folder.run_files(folder) + card:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    keep_merged_base(folder)
    metrics = MetricsFile(folder, enabled=is_main)
    if checkpoint is not None:
        metrics.rewind(step_of(checkpoint))
        return metrics
    run_as = {"processes": count_processes(), "cwd": str(Path.cwd())}
    metrics.write("config", options=flat(options), versions=versions(), **run_as)
    if is_main:
        run_folder.save_config(options)
    return metrics


def _save_adapter(
    model: Any, folder: Path, data: "TrainingData", is_full: bool, weights: dict[str, "Tensor"] | None
) -> None:
    """Save the adapter, or the model; `weights` are the trained ones, if the model's own are sharded."""
    from unsloth_pack.checkpoints.saving import save_in_own_dtype

    if is_full:
        return save_in_own_dtype(model, folder, data.saved_with_model)
    model.save_pretrained_merged(folder, data.saved_with_model, save_method="lora", state_dict=weights)


def _save_merged_and_plot(
    model: Any, trainer: "RunTrainer", beside: object, output: OutputOptions, dtype: str | None
) -> None:
    from unsloth_pack.api import FastLanguageModel
    from unsloth_pack.report.html import plot_loss
    from unsloth_pack.training.distributed import loaded_whole

    if output.save_model:
        if trainer.is_sharded:  # no process holds the model: load the base again, with the adapter just saved
            with loaded_whole(trainer.args):
                model, _ = FastLanguageModel.from_pretrained(
                    str(output.folder), max_seq_length=1, dtype=dtype, device_map={"": "cpu"}
                )
        model.save_pretrained_merged(output.save_path, beside, save_method=output.save_method)
    plot_loss(trainer.state.log_history, output.folder / "loss.png")


def _end_together() -> None:
    """Wait for the main process to save; leave the group of processes when this one ends.

    Otherwise gloo's thread may still hold a tensor of the backward pass while Python ends, which aborts the
    process. Merging comes later: it may take longer than the other processes may wait.
    """
    from accelerate import PartialState

    state = PartialState()
    if state.use_distributed:
        state.wait_for_everyone()
        atexit.register(state.destroy_process_group)

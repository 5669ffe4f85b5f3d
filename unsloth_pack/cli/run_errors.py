"""What ends a run early, in one line that says how to go on."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_pack.checkpoints.names import holds_model
from unsloth_pack.config import TrainOptions
from unsloth_pack.errors import InputError, RunStopped
from unsloth_pack.run.machine import count_processes

if TYPE_CHECKING:
    from rich.console import Console

    from unsloth_pack.report.callbacks import StopOnSignal
    from unsloth_pack.report.metrics import MetricsFile
    from unsloth_pack.training.nonfinite import NonFinite
    from unsloth_pack.training.trainer import RunTrainer


class Diverged(RunStopped):
    """The weights are not finite, so that no checkpoint of them is worth resuming."""


@contextmanager
def explained(trainer: "RunTrainer", options: TrainOptions) -> Iterator[None]:
    """Inside this context, an error that ends the training says what is on the disk and how to go on.

    Raises:
        RunStopped: the disk or the GPU's memory is full, another process ended, or the training stopped.
        KeyboardInterrupt: a second Ctrl-C, SIGTERM or SIGHUP; with a message.
    """
    import torch

    from unsloth_pack.training.checkpoints import lost_a_process

    folder = options.folder
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = f"out of memory in update {trainer.state.global_step + 1}: {_advice(trainer, options, error)}"
        raise RunStopped(f"{said}; {resume_hint(folder)}") from error
    except Diverged:
        raise
    except (RunStopped, OSError) as error:
        raise RunStopped(f"{error}; {resume_hint(folder)}") from error
    except RuntimeError as error:
        if not lost_a_process(error):
            raise
        raise RunStopped(f"another process of this run has ended; {resume_hint(folder)}") from error
    except KeyboardInterrupt as error:
        raise type(error)(f"interrupted; {resume_hint(folder)}") from None


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """As `explained`, but for saving and showing what was trained.

    Raises:
        RunStopped: the disk is full, or what was trained cannot be saved.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; with a message.
    """
    try:
        yield
    except (InputError, OSError) as error:
        raise RunStopped(f"{error}; {resume_hint(folder)}") from error
    except KeyboardInterrupt as error:
        raise type(error)(f"interrupted; {resume_hint(folder)}") from None


def _advice(trainer: "RunTrainer", options: TrainOptions, error: BaseException) -> str:
    from unsloth_pack.memory.advice import MemoryAdvice

    model: Any = trainer.model
    use = trainer.memory_watch.use_at(error, model, trainer.optimizer)
    if use is None:
        return "not in a step of training; lower --per_device_eval_batch_size, or end what else uses the GPU"
    advice = MemoryAdvice(
        use,
        max_seq_length=options.model.max_seq_length,
        batch_size=trainer.args.per_device_train_batch_size,
        accumulation=trainer.args.gradient_accumulation_steps,
        recomputes_all=options.training.use_gradient_checkpointing not in (False, "auto"),
        quantised=options.model.load_in_4bit,
    )
    return str(advice)


def report_nonfinite(
    trainer: "RunTrainer", options: TrainOptions, console: "Console", metrics: "MetricsFile"
) -> None:
    """Have updates that are not finite treated as the options say, and shown, and written to the metrics."""

    def report(found: "NonFinite") -> None:
        metrics.write("nonfinite", **asdict(found))
        console.print(str(found), soft_wrap=True, markup=False)

    trainer.finite_updates.on_nonfinite = options.training.on_nonfinite
    trainer.finite_updates.report = report


def check_finite(trainer: "RunTrainer") -> None:
    """Raise `RunStopped` if an update that was not finite stopped the training."""
    found = trainer.finite_updates.stopped_by
    if found is None:
        return
    if found.has_diverged:
        raise Diverged(f"{found}; start anew with a lower --learning_rate")
    cause = "correct the data" if found.culprits else "lower --learning_rate, or correct the data,"
    raise RunStopped(
        f"{found}; {cause} and start anew, or go on without this update (--on_nonfinite skip does so always)"
    )


def check_learned(trainer: "RunTrainer") -> None:
    """Refuse to end well a run that learned from no token, as every image that came was broken.

    Raises:
        InputError: so it was.
    """
    if trainer.image_rows is not None and trainer.image_rows.skip_broken and not trainer.trained.counted:
        raise InputError(
            "no token was counted in the loss, since every document had an image that could not be used; "
            "replace the images, or leave out --skip_broken_images to see the first",
            about="skip_broken_images",
        )


def check_stream(trainer: "RunTrainer", stop: "StopOnSignal") -> None:
    """Raise `RunStopped` if a row of the stream, in any process, stopped the training."""
    stream = trainer.row_stream
    if stop.failed and trainer.state.global_step < trainer.state.max_steps:
        error = stream.error if stream is not None else None
        said = "another process of this run has met a row that cannot be trained on; see its line"
        raise RunStopped(str(error or said)) from error


def resume_hint(folder: Path) -> str:
    """How to go on with the run in `folder`, and from where."""
    from unsloth_pack.training.checkpoints import last_checkpoint

    checkpoint, quoted = last_checkpoint(folder), shlex.quote(str(folder))
    if checkpoint is None and holds_model(folder):
        return "the model is saved"
    if checkpoint is None and (folder / "adapter_config.json").exists():  # it is saved after the training
        merge = f"unsloth-pack merge --model_name {quoted} --save_path FOLDER"
        return f"the adapter is saved, merge it with: {merge}"
    kept = f"{checkpoint.name} is whole, go on" if checkpoint else "there is no checkpoint yet, start over"
    processes = count_processes()
    program = f"torchrun --nproc_per_node {processes} cli.py" if processes > 1 else "unsloth-pack"
    return f"{kept} with: {program} --resume --output_dir {quoted}"

"""Errors that end a run early, in one line that says how to resume it."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from rich.console import Console

from unsloth_pack.checkpoints.names import holds_model
from unsloth_pack.errors import InputError, RunStopped
from unsloth_pack.run.machine import count_processes

if TYPE_CHECKING:
    from unsloth_pack.report.callbacks import MetricsFile, StopOnSignal
    from unsloth_pack.training.trainer import RunTrainer


class Diverged(RunStopped):
    """The weights are not finite, so that no checkpoint of them is worth resuming."""


@contextmanager
def explained(folder: Path, trainer: "RunTrainer | None" = None, **options: object) -> Iterator[None]:
    """Inside this context, an error that ends the run says what is on the disk and how to go on.

    Args:
        trainer: while it trains. Bad input is then an error of its own, and its memory is looked at.
        options: of `memory.advice.advise`.

    Raises:
        RunStopped: the disk or the GPU's memory is full, another process ended, or the training stopped.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, while training the second one; with a message.
    """
    import torch

    from unsloth_pack.training.checkpoints import lost_a_process

    known = (RunStopped, OSError) if trainer is not None else (RunStopped, OSError, InputError)
    try:
        yield
    except Diverged:
        raise
    except KeyboardInterrupt as error:
        raise type(error)(f"interrupted; {resume_hint(folder)}") from None
    except Exception as error:
        if trainer is not None and isinstance(error, torch.OutOfMemoryError):
            advice = _advice(trainer, error, options)
            why = f"out of memory in update {trainer.state.global_step + 1}: {advice}"
        elif isinstance(error, known):
            why = str(error)
        elif isinstance(error, RuntimeError) and lost_a_process(error):
            why = "another process of this run has ended"
        else:
            raise
        raise RunStopped(f"{why}; {resume_hint(folder)}") from error


def _advice(trainer: "RunTrainer", error: BaseException, options: dict[str, Any]) -> str:
    from unsloth_pack.memory.advice import advise

    model: Any = trainer.model
    use = trainer.memory_watch.use_at(error, model, trainer.optimizer)
    if use is None:
        return "not in a step of training; lower --per_device_eval_batch_size, or end what else uses the GPU"
    rows, steps = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    return advise(use, batch_size=rows, accumulation=steps, **options)


def check_end(trainer: "RunTrainer", stop: "StopOnSignal") -> None:
    """Raise `RunStopped` if a row of the stream, in any process, or an update that is not finite ended it."""
    if stop.failed and trainer.state.global_step < trainer.state.max_steps:
        error = None if trainer.row_stream is None else trainer.row_stream.error
        said = "another process of this run has met a row that cannot be trained on; see its line"
        raise RunStopped(str(error or said)) from error
    update = trainer.nonfinite_updates.stopped_by
    if update is not None and update.has_diverged:
        raise Diverged(f"{update}; start anew with a lower --learning_rate")
    if update is not None:
        cause = "correct the data" if update.culprits else "lower --learning_rate, or correct the data,"
        go_on = "go on without this update (--on_nonfinite skip does so always)"
        raise RunStopped(f"{update}; {cause} and start anew, or {go_on}")


def check_learned(trainer: "RunTrainer") -> None:
    """Raise InputError for a run that learned from no token, since every image was broken."""
    if trainer.image_rows is not None and trainer.image_rows.skip_broken and not trainer.trained.counted:
        raise InputError(
            "no token was counted in the loss, since every document had an image that could not be used; "
            "replace the images, or leave out --skip_broken_images to see the first"
        )


def say_how_to_resume(
    console: Console, trainer: "RunTrainer", metrics: "MetricsFile", received: Signals
) -> int:
    """Print how to resume a run that a signal stopped; returns the exit code."""
    step, of = trainer.state.global_step, trainer.state.max_steps
    metrics.write("stopped", step=step, signal=received.name)
    hint = resume_hint(Path(str(trainer.args.output_dir)))
    console.print(
        f"stopped by {received.name} after update {step} of {of}; {hint}", soft_wrap=True, markup=False
    )
    return 128 + int(received)


def resume_hint(folder: Path) -> str:
    """How to go on with the run in `folder`, and from where."""
    from unsloth_pack.training.checkpoints import last_checkpoint

    checkpoint, quoted = last_checkpoint(folder), shlex.quote(str(folder))
    if checkpoint is None and holds_model(folder):
        return "the model is saved"
    if checkpoint is None and (folder / "adapter_config.json").exists():  # it is saved after the training
        merge = f"unsloth-pack merge --model_name {quoted} --save_path FOLDER"
        return f"the adapter is saved, merge it with: {merge}"
    begin = f"{checkpoint.name} is whole, go on" if checkpoint else "there is no checkpoint yet, start over"
    processes = count_processes()
    program = f"torchrun --nproc_per_node {processes} cli.py" if processes > 1 else "unsloth-pack"
    return f"{begin} with: {program} --resume --output_dir {quoted}"

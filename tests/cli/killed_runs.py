"""Runs of the command line in warm processes, which can be killed at any moment."""

import os
import signal
import sys
import time

import torch
import warm

from unsloth_pack.cli import main

ROWS_SEEN = "rows_seen.txt"


def start(arguments, folder, fault=None):
    """A run whose output goes to files in `folder`, with a `fault` planted: a function of this module."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {name: folder / name for name in ("stdout", "stderr")}
    return warm.start(_run, arguments, folder, fault, **outputs)


def forked(target, args):
    """A process like those of `start`, for any function that can be imported."""
    warm.warm_up()
    return warm.context.Process(target=_on_one_thread, args=(target, args))


def _on_one_thread(target, args):
    torch.set_num_threads(1)
    target(*args)


def _run(arguments, folder, fault):
    _note_the_rows_of_every_step(folder / ROWS_SEEN)
    if fault is not None:
        fault()
    sys.exit(main(arguments))


def _note_the_rows_of_every_step(path):
    from unsloth_pack.training.trainer import RunTrainer

    step = RunTrainer.training_step
    with path.open("a") as file:
        file.write("start\n")

    def noting(self, model, inputs, *more):
        with path.open("a") as file:
            file.write(f"{self.state.global_step + 1} {inputs['input_ids'].flatten().tolist()}\n")
        return step(self, model, inputs, *more)

    RunTrainer.training_step = noting


def ended(run):
    """The exit code of a run, negative where a signal ended it."""
    run.join()
    return run.exitcode


def kill_after(run, seconds):
    """Whether the run was alive when it was killed."""
    time.sleep(seconds)
    run.kill()
    return ended(run) == -signal.SIGKILL


def kill_while_saving(run, out, step, seconds):
    """Whether the run was alive when it was killed, `seconds` after the save at `step` began."""
    wait_for(out / ".saving" / f"checkpoint-{step}", run)
    return kill_after(run, seconds)


def wait_for(path, run):
    """Return once the path is there, or the run at its end."""
    while not path.exists() and run.is_alive():
        time.sleep(0.0005)


def rows_of_steps(folder):
    """The rows that each update saw, where it was last made."""
    rows = {}
    for run in (folder / ROWS_SEEN).read_text().split("start\n")[1:]:
        seen = [line.split(" ", 1) for line in run.splitlines()]
        rows |= {int(step): [ids for number, ids in seen if number == step] for step, _ in seen}
    return rows


def die_before_the_adapter_is_saved():
    import unsloth_pack.cli.train

    unsloth_pack.cli.train._save_adapter = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def leave_the_output_unread():
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # the old one takes it for a file


def show_ascii_alone():
    sys.stdout.reconfigure(encoding="ascii", errors="strict")


def fill_the_disk_at_the_second_save():
    """No file may grow beyond a few KiB from then on: the metrics do not, a checkpoint does."""
    import resource

    from unsloth_pack.training.checkpoints import WholeCheckpoints

    write, saves = WholeCheckpoints._write_aside, []

    def limited(self, *arguments):
        saves.append(1)
        if len(saves) == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        write(self, *arguments)

    WholeCheckpoints._write_aside = limited

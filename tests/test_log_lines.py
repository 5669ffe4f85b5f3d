"""On a GPU a log line is written once the next update is launched, and says what it said before."""

import json
import math
from unittest.mock import patch

import late_metrics_runs as runs
import pytest
import torch
from device_reads import counted_reads
from model_folder import byte_tokenizer
from transformers import TrainerCallback
from trl import SFTTrainer

from unsloth_pack.patching.trainer_hooks.deferred_logging import LogLine
from unsloth_pack.training.trainer import make_trainer

EVERY_LINE = {"logging_steps": 1, "eval_strategy": "no"}


class Watch(TrainerCallback):
    """What happens, in its order."""

    def __init__(self):
        self.events = []

    def on_optimizer_step(self, args, state, control, **_):
        self.events.append(("update", state.global_step + 1))

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            assert state.log_history[-1]["step"] == state.global_step
            self.events.append(("line", state.global_step))

    def on_evaluate(self, args, state, control, **_):
        self.events.append(("evaluation", state.global_step))

    def on_save(self, args, state, control, **_):
        self.events.append(("save", state.global_step))


def trainer_of(folder, *callbacks, packed=True, kind="run", **options):
    """The trainer of a run, or TRL's own."""
    if kind == "trl":
        made = runs.sft_trainer(folder, packed, **options)
        for callback in callbacks:
            made.add_callback(callback)
        return made
    arguments = runs.config(folder, packed, **options)
    rows, evaluated = runs.rows(packed), runs.rows(packed, 50)
    return make_trainer(runs.model(), byte_tokenizer(), arguments, rows, evaluated, list(callbacks))


both_trainers = pytest.mark.parametrize("kind", ["run", "trl"])


def make_nan_at(trainer, update):
    """The loss of this update is not finite."""
    step = trainer.training_step

    def broken(*args, **kwargs):
        loss = step(*args, **kwargs)
        if trainer.state.global_step + 1 == update:
            trainer.finite_updates._losses[-1] = loss * math.nan
        return loss

    trainer.training_step = broken


def as_on_a_gpu():
    return patch(runs.ON_A_GPU, lambda trainer: True)


@pytest.mark.parametrize("logging_steps", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@both_trainers
def test_late_lines_say_the_same(kind, packed, accumulation, logging_steps, tmp_path):
    options = {"packed": packed, "accumulation": accumulation, "logging_steps": logging_steps, "kind": kind}
    at_once = runs.logged(trainer_of(tmp_path, **options))
    with as_on_a_gpu():
        late = runs.logged(trainer_of(tmp_path, watch := Watch(), **options))
    assert late == at_once
    if logging_steps == 1:
        assert watch.events.index(("update", 2)) < watch.events.index(("line", 1))
    assert {"loss", "grad_norm", "learning_rate", "entropy", "num_tokens"} <= late[0].keys()


def test_late_lines_of_several_processes(tmp_path):
    run = {"packed": True, "trls_own": False, "logging_steps": 1}
    at_once, late = runs.logs_on_two_processes(tmp_path, [run, run | {"on_a_gpu": True}])
    assert late == at_once


@both_trainers
def test_a_line_is_written_once_the_next_update_is_launched(kind, tmp_path):
    trainer = trainer_of(tmp_path, watch := Watch(), kind=kind, max_steps=5, **EVERY_LINE)
    with as_on_a_gpu():
        trainer.train()
    late = [("update", 1)]
    for step in range(1, 5):
        late += [("update", step + 1), ("line", step)]
    assert watch.events == [*late, ("line", 5)]


@both_trainers
def test_a_cpu_writes_at_once(kind, tmp_path):
    trainer = trainer_of(tmp_path, watch := Watch(), kind=kind, max_steps=3, **EVERY_LINE)
    trainer.train()
    assert watch.events == [(what, step) for step in (1, 2, 3) for what in ("update", "line")]


@both_trainers
def test_what_others_look_at_is_written_before(kind, tmp_path):
    """A checkpoint holds the lines so far, and an evaluation comes after the line of its update."""
    options = {"logging_steps": 1, "eval_steps": 3, "save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    trainer = trainer_of(tmp_path, watch := Watch(), kind=kind, **options)
    with as_on_a_gpu():
        trainer.train()
    assert watch.events[:4] == [("update", 1), ("update", 2), ("line", 1), ("line", 2)]
    assert watch.events[4:9] == [
        ("save", 2),
        ("update", 3),
        ("line", 3),
        ("evaluation", 3),
        ("update", 4),
    ]
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert [line["step"] for line in saved["log_history"]] == [1, 2]


class _Stops(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 3


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_a_run_that_is_stopped_has_its_last_line(logging_steps, tmp_path):
    options = {"logging_steps": logging_steps, "eval_strategy": "no"}
    with as_on_a_gpu():
        trainer_of(tmp_path, watch := Watch(), _Stops(), **options).train()
    assert watch.events[-1] == ("line", 3)


@both_trainers
def test_an_error_does_not_take_the_line_before_with_it(kind, tmp_path):
    class Fails(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")

    trainer = trainer_of(tmp_path, watch := Watch(), Fails(), kind=kind, **EVERY_LINE)
    with as_on_a_gpu(), pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert watch.events[-1] == ("line", 3)
    with as_on_a_gpu(), pytest.raises(torch.OutOfMemoryError):  # nothing of it is left for the next training
        trainer.train()
    assert [event for event in watch.events if event == ("line", 3)] == [("line", 3)] * 2


@both_trainers
def test_a_device_that_has_failed_hides_no_error(kind, tmp_path):
    class Fails(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                raise ValueError("the first one")

    def failed(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    trainer = trainer_of(tmp_path, Fails(), kind=kind, **EVERY_LINE)
    with as_on_a_gpu(), patch.object(LogLine, "read", failed), pytest.raises(ValueError, match="the first"):
        trainer.train()


@both_trainers
def test_a_listener_that_fails_is_told_once(kind, tmp_path):
    class Fails(Watch):
        def on_log(self, args, state, control, **more):
            super().on_log(args, state, control, **more)
            raise ValueError("of the listener")

    trainer = trainer_of(tmp_path, watch := Fails(), kind=kind, **EVERY_LINE)
    with as_on_a_gpu(), pytest.raises(ValueError, match="of the listener"):
        trainer.train()
    assert watch.events == [("update", 1), ("update", 2), ("line", 1)]


@both_trainers
def test_an_interrupt_while_the_numbers_are_awaited_loses_no_line(kind, tmp_path):
    """Where the host waits most of the time."""
    read, interrupted = LogLine.read, []

    def awaited(*args):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return read(*args)

    trainer = trainer_of(tmp_path, watch := Watch(), kind=kind, **EVERY_LINE)
    with as_on_a_gpu(), patch.object(LogLine, "read", awaited), pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert watch.events == [("update", 1), ("update", 2), ("line", 1)]


def test_updates_that_are_not_finite_are_told_one_update_later(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=5, **EVERY_LINE)
    trainer.finite_updates.on_nonfinite = "skip"
    told = []
    trainer.finite_updates.report = lambda found: told.append((found.step, trainer.state.global_step))
    make_nan_at(trainer, 3)
    with as_on_a_gpu():
        trainer.train()
    assert told == [(3, 4)]
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [math.isnan(line["loss"]) for line in lines] == [False, False, True, False, False]


def test_an_evaluation_does_not_hide_such_an_update_from_the_next_line(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=4, logging_steps=2, eval_steps=3)
    trainer.finite_updates.on_nonfinite = "skip"
    make_nan_at(trainer, 3)
    trainer.train()
    losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    assert math.isnan(losses[4])
    assert not math.isnan(losses[2])


def test_a_run_that_such_an_update_stops_is_saved_with_all_its_lines(tmp_path):
    trainer = trainer_of(tmp_path, watch := Watch(), max_steps=5, save_strategy="steps", **EVERY_LINE)
    make_nan_at(trainer, 2)
    with as_on_a_gpu():
        trainer.train()
    assert watch.events[-4:] == [("update", 3), ("line", 2), ("line", 3), ("save", 3)]


@both_trainers
def test_no_number_is_read_while_a_line_is_made(kind, tmp_path, monkeypatch):
    """What reads the device would wait for the update at hand."""
    places, make = [], LogLine.__init__

    def watched(self, *args):
        with counted_reads() as read:
            make(self, *args)
        places.extend(read)

    monkeypatch.setattr(LogLine, "__init__", watched)
    with as_on_a_gpu():
        trainer_of(tmp_path, kind=kind, packed=False, max_steps=3, **EVERY_LINE).train()
    assert places == []


@both_trainers
def test_trls_own_loss_waits_anyway(kind, tmp_path):
    trainer = trainer_of(tmp_path, watch := Watch(), kind=kind, max_steps=2, **EVERY_LINE)
    with (
        as_on_a_gpu(),
        patch("unsloth_pack.patching.trainer_hooks.deferred_logging.reads_late", lambda trainer: False),
    ):
        trainer.train()
    assert watch.events == [(what, step) for step in (1, 2) for what in ("update", "line")]


def test_a_count_of_input_tokens_waits_anyway(tmp_path):
    options = {"max_steps": 2, "include_num_input_tokens_seen": "all", "kind": "trl", **EVERY_LINE}
    trainer = trainer_of(tmp_path, watch := Watch(), **options)
    with as_on_a_gpu():
        trainer.train()
    assert watch.events == [(what, step) for step in (1, 2) for what in ("update", "line")]
    seen = [line["num_input_tokens_seen"] for line in trainer.state.log_history if "loss" in line]
    assert 0 < seen[0] < seen[1]


def test_a_trainer_with_a_log_and_metrics_of_its_own(tmp_path):
    """Each line has the metrics of its own update."""

    class Own(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            self._metrics["train"]["updates before"].append(self.state.global_step)
            return super().compute_loss(*args, **kwargs)

        def log(self, logs, start_time=None):
            super().log({**logs, "own": True}, start_time)

    def lines():
        trained = runs.logged(runs.sft_trainer(tmp_path, True, kind=Own, max_steps=4, **EVERY_LINE))
        return [line for line in trained if "loss" in line]

    at_once = lines()
    with as_on_a_gpu():
        assert lines() == at_once
    assert [line["updates before"] for line in at_once] == [0, 1, 2, 3]


@pytest.mark.gpu
def test_a_gpu_is_not_waited_for(tmp_path, monkeypatch):
    make = LogLine.__init__

    def watched(self, *args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            make(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(LogLine, "__init__", watched)
    trainer = trainer_of(tmp_path, watch := Watch(), max_steps=8, **EVERY_LINE)
    trainer.train()
    assert watch.events[:5] == [("update", 1), ("update", 2), ("line", 1), ("update", 3), ("line", 2)]
    assert [line["step"] for line in trainer.state.log_history if "loss" in line] == list(range(1, 9))

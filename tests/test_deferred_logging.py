"""Metrics and log lines are read once the next update is launched, and say the same.

Under the trainer of a run and TRL's own: no step waits for the device to log.
"""

import json
import math
from contextlib import contextmanager
from unittest.mock import patch

import late_metrics_runs as runs
import pytest
import torch
from device_reads import counted_reads
from transformers import TrainerCallback
from trl import SFTTrainer

from unsloth_pack.patching import trainer_hooks
from unsloth_pack.patching.deferred_logging import LogLine

# What reads where the data is on the host, or reads a copy that was started before the decoder
ON_THE_HOST = {"check_labels", "prepare_head_inputs", "count", "pinned", "leave_out"}
EVERY_LINE = {"logging_steps": 1, "eval_strategy": "no"}
both_trainers = pytest.mark.parametrize("make", [runs.run_trainer, runs.sft_trainer])


# Metrics of micro-batches


class Reads(TrainerCallback):
    """The functions that read a tensor between the start of a step and its end, after the first.

    The first step looks for leaks.
    """

    def __init__(self):
        self.functions, self.steps = set(), 0

    def on_step_begin(self, args, state, control, **_):
        if state.global_step:
            self.inside = counted_reads()
            self.places = self.inside.__enter__()

    def on_step_end(self, args, state, control, **_):
        if state.global_step > 1:
            self.inside.__exit__(None, None, None)
            self.functions |= {place.split(":")[1] for place in self.places}
            self.steps += 1


@pytest.mark.parametrize(("packed", "accumulation"), [(True, 1), (False, 3)])
@pytest.mark.parametrize("waits", [False, True])
@both_trainers
def test_no_step_waits(make, waits, packed, accumulation, tmp_path, monkeypatch):
    """Under TRL's own loss every step does."""
    monkeypatch.setattr(trainer_hooks.PatchedTraining, "on_optimizer_step", lambda *_, **__: None)
    if waits:
        monkeypatch.setattr(runs.TRLS_OWN, lambda trainer: False)
    make(tmp_path, packed, reads := Reads(), accumulation=accumulation).train()
    assert reads.steps == 2 * math.ceil(len(runs.LENGTHS) / (1 if packed else 2) / accumulation) - 1
    assert reads.functions - ON_THE_HOST == ({"compute_loss"} if waits else set())


class Doubles(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "packed", "is_default", "options"),
    [
        (runs.run_trainer, True, True, {}),
        (runs.run_trainer, True, False, {"accumulation": 3, "arch": "qwen3_moe"}),
        (runs.run_trainer, True, False, {"label_smoothing_factor": 0.1}),
        (runs.sft_trainer, True, True, {"accumulation": 3}),
        (runs.sft_trainer, False, True, {}),
        (runs.sft_trainer, True, False, {"loss_type": "dft"}),
        (runs.sft_trainer, True, False, {"kind": Doubles}),
    ],
)
def test_the_log_is_that_of_trls_own_loss(make, packed, is_default, options, tmp_path):
    late, at_once = (runs.log_of(make, tmp_path, packed, trls_own=own, **options) for own in (False, True))
    assert late == at_once
    trained = late[0]
    assert trained.keys() >= {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"}
    assert trained["num_tokens"] > 0
    if "arch" in options:  # the auxiliary loss of experts is part of the loss, and of the log
        assert all(line["aux_loss"] > 0 for line in late if "loss" in line)
    elif is_default:
        evaluated = {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"}
        assert any(line.keys() >= evaluated for line in late)
    else:
        assert trained["loss"] != runs.log_of(make, tmp_path, packed)[0]["loss"]


def test_the_log_is_that_of_sft_trainer(tmp_path):
    same = {"optim": "adamw_torch"}  # the default is computed over one tensor in a run, and rounds otherwise
    ours = runs.log_of(runs.run_trainer, tmp_path, False, **same)
    theirs = runs.log_of(runs.sft_trainer, tmp_path, False, trls_own=True, **same)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for our_line, their_line in zip(ours, theirs, strict=True):
        # `eval_loss` is a mean over tokens, TRL's over batches; transformers takes 6N FLOPs of frozen weights
        shared = their_line.keys() - {"eval_loss", "total_flos"}
        assert {key: our_line[key] for key in shared} == {key: their_line[key] for key in shared}


def test_several_processes(tmp_path):
    """The rows cannot be shared out evenly: TRL leaves some of the last micro-batch out of its metrics."""
    packed, padded = {"packed": True, "logging_steps": 1}, {"packed": False, "accumulation": 2}
    variants = [packed, padded]
    variants += [run | {"trls_own": True} for run in (packed, padded)]
    variants += [packed | {"on_a_gpu": True}, packed | {"flat": False}]
    log, padded_log, trls_own, padded_trls_own, late, by_weight = runs.logs_on_two_processes(
        tmp_path, variants
    )
    assert log == trls_own == late
    assert padded_log == padded_trls_own
    losses, expected = ([line["loss"] for line in lines if "loss" in line] for lines in (log, by_weight))
    assert losses == pytest.approx(expected, rel=1e-5)  # the optimizer's buffer under DDP


# Log lines


class Watch(TrainerCallback):
    """What happens, in its order; an error at the beginning of a step, if one is given."""

    def __init__(self, fails_after=None, error=None):
        self.events, self.fails_after, self.error = [], fails_after, error

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.fails_after:
            raise self.error

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


def as_on_a_gpu():
    return patch(runs.ON_A_GPU, lambda arguments: True)


@contextmanager
def on_a_gpu_fails(error):
    with as_on_a_gpu(), pytest.raises(type(error), match=str(error)):
        yield


@pytest.mark.parametrize(
    ("packed", "accumulation", "logging_steps"), [(True, 1, 1), (True, 3, 2), (False, 3, 1)]
)
@both_trainers
def test_late_lines_say_the_same(make, packed, accumulation, logging_steps, tmp_path):
    options = {"accumulation": accumulation, "logging_steps": logging_steps}
    at_once = runs.log_of(make, tmp_path, packed, **options)
    with as_on_a_gpu():
        late = runs.logged(make(tmp_path, packed, watch := Watch(), **options))
    assert late == at_once
    if logging_steps == 1:
        assert watch.events.index(("update", 2)) < watch.events.index(("line", 1))


AT_ONCE = [(what, step) for step in (1, 2, 3) for what in ("update", "line")]
LATE = [("update", 1), ("update", 2), ("line", 1), ("update", 3), ("line", 2), ("line", 3)]
LOOKED_AT = [("update", 1), ("update", 2), ("line", 1), ("line", 2), ("save", 2)]
LOOKED_AT += [("update", 3), ("line", 3), ("evaluation", 3)]


@pytest.mark.parametrize(
    ("events", "on_a_gpu", "options"),
    [
        (LATE, True, {}),
        (AT_ONCE, False, {}),
        (AT_ONCE, True, {"loss_type": "dft"}),  # which waits anyway
        (AT_ONCE, True, {"include_num_input_tokens_seen": "all"}),
        (LOOKED_AT, True, {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 2}),
    ],
)
@both_trainers
def test_when_a_line_is_written(make, events, on_a_gpu, options, tmp_path):
    """Once the next update is launched, but before somebody looks: at a save, an evaluation and the end."""
    trainer = make(tmp_path, True, watch := Watch(), **EVERY_LINE | {"max_steps": 3} | options)
    with patch(runs.ON_A_GPU, lambda arguments: on_a_gpu):
        trainer.train()
    assert watch.events[: len(events)] == events
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    if "include_num_input_tokens_seen" in options:
        assert 0 < lines[0]["num_input_tokens_seen"] < lines[1]["num_input_tokens_seen"]
    if "save_steps" in options:
        saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
        assert [line["step"] for line in saved["log_history"]] == [1, 2]


@both_trainers
def test_an_error_does_not_take_the_line_before_with_it(make, tmp_path):
    error = torch.OutOfMemoryError("CUDA out of memory")
    trainer = make(tmp_path, True, watch := Watch(3, error), **EVERY_LINE)
    for n_trainings in (1, 2):  # nothing of it is left for the next training
        with on_a_gpu_fails(error):
            trainer.train()
        assert watch.events[-1] == ("line", 3)
        assert watch.events.count(("line", 3)) == n_trainings
    failed = patch.object(LogLine, "read", side_effect=RuntimeError("CUDA error: an illegal memory access"))
    watch.fails_after = 1
    with failed, on_a_gpu_fails(error):  # a device that has failed hides no error
        trainer.train()


# Updates that are not finite, in a run


def nan_run(folder, update, *callbacks, **options):
    """A run in which the loss of this update is not finite."""
    trainer = runs.run_trainer(folder, True, *callbacks, **options)
    step = trainer.training_step

    def broken(*args, **kwargs):
        loss = step(*args, **kwargs)
        if trainer.state.global_step + 1 == update:
            trainer.nonfinite_updates._losses[-1] = loss * math.nan
        return loss

    trainer.training_step = broken
    return trainer


@pytest.mark.parametrize(
    ("options", "on_a_gpu", "lines", "seen_at"),
    [
        (EVERY_LINE, True, [1, 2, 3, 4], 4),  # one update later
        ({"logging_steps": 2, "eval_steps": 3}, False, [2, 4], 4),  # an evaluation does not hide it
    ],
)
def test_an_update_that_is_not_finite_is_in_the_next_line(options, on_a_gpu, lines, seen_at, tmp_path):
    trainer = nan_run(tmp_path, 3, max_steps=4, **options)
    reports = []
    trainer.nonfinite_updates.on_nonfinite = "skip"
    trainer.nonfinite_updates.report = lambda report: reports.append((report.step, trainer.state.global_step))
    with patch(runs.ON_A_GPU, lambda arguments: on_a_gpu):
        trainer.train()
    assert reports == [(3, seen_at)]
    losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    assert [*losses] == lines
    assert [step for step, loss in losses.items() if math.isnan(loss)] == [min(n for n in lines if n >= 3)]


def test_a_run_that_such_an_update_stops_is_saved_with_all_its_lines(tmp_path):
    trainer = nan_run(tmp_path, 2, watch := Watch(), max_steps=5, save_strategy="steps", **EVERY_LINE)
    with as_on_a_gpu():
        trainer.train()
    assert watch.events[-4:] == [("update", 3), ("line", 2), ("line", 3), ("save", 3)]

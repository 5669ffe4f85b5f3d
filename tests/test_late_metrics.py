"""Metrics are read from the device when they are logged, under the trainer of a run and TRL's own."""

import math

import late_metrics_runs as runs
import pytest
from device_reads import counted_reads
from model_folder import byte_tokenizer
from tiny import tiny_model
from transformers import Trainer, TrainerCallback, TrainerState
from trl import SFTTrainer

from unsloth_pack import patch_model
from unsloth_pack.patching.trainer_hooks import deferred_logging, prefetch
from unsloth_pack.training.trainer import make_trainer

# What reads where the data is on the host, or reads a copy that was started before the decoder
ON_THE_HOST = {"checked_labels", "check_head", "count", "pinned", "leave_out"}


class Count(TrainerCallback):
    """The functions that read a tensor between the start of a step and its end, but for the first.

    That one looks for leaks.
    """

    def __init__(self):
        self.functions = set()
        self.steps = 0

    def on_step_begin(self, args, state, control, **_):
        if state.global_step:
            self.inside = counted_reads()
            self.places = self.inside.__enter__()

    def on_step_end(self, args, state, control, **_):
        if state.global_step > 1:
            self.inside.__exit__(None, None, None)
            self.functions |= {place.split(":")[1] for place in self.places}
            self.steps += 1


@pytest.fixture(autouse=True)
def _nothing_is_loaded_within_a_step(monkeypatch):
    """Collators read what lies on the host."""
    monkeypatch.setattr(prefetch.PrefetchCallback, "on_optimizer_step", lambda *_, **__: None)


def functions_that_read(folder, packed, accumulation):
    arguments = runs.config(folder, packed, accumulation)
    trainer = make_trainer(
        runs.model(), byte_tokenizer(), arguments, runs.rows(packed), runs.rows(packed), []
    )
    return functions_that_read_in(trainer)


def functions_that_read_in(trainer):
    trainer.add_callback(count := Count())
    trainer.train()
    arguments = trainer.args
    accumulation = arguments.gradient_accumulation_steps
    updates = math.ceil(len(runs.LENGTHS) / arguments.per_device_train_batch_size / accumulation)
    assert count.steps == arguments.num_train_epochs * updates - 1
    return count.functions


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_no_step_waits(packed, accumulation, tmp_path):
    assert functions_that_read(tmp_path, packed, accumulation) <= ON_THE_HOST


def test_a_step_that_waits_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.TRLS_OWN, lambda trainer: False)
    assert functions_that_read(tmp_path, True, 1) - ON_THE_HOST == {"compute_loss"}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_the_log_is_that_of_trls_own_loss(packed, accumulation, tmp_path):
    late, at_once = (
        runs.log_of_run(tmp_path, packed, trls_own, accumulation=accumulation) for trls_own in (False, True)
    )
    assert late == at_once
    trained, evaluated = late[0], next(line for line in late if "eval_loss" in line)
    assert trained.keys() >= {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"}
    assert evaluated.keys() >= {"eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"}


def test_the_log_is_that_of_sft_trainer(tmp_path):
    same = {"optim": "adamw_torch"}  # the default is computed over one tensor in a run, and rounds otherwise
    ours = runs.log_of_run(tmp_path, packed=False, trls_own=False, **same)
    theirs = runs.log_of_sft_trainer(tmp_path, packed=False, trls_own=True, **same)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for our_line, their_line in zip(ours, theirs, strict=True):
        assert our_line.keys() >= their_line.keys()
        own = {"eval_loss"}  # a mean over tokens, TRL's is over batches
        assert {key: our_line[key] for key in their_line.keys() - own} == {
            key: their_line[key] for key in their_line.keys() - own
        }


# TRL's own trainer


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_sft_trainer_does_not_wait_for_its_metrics(packed, accumulation, tmp_path):
    trainer = runs.sft_trainer(tmp_path, packed, accumulation=accumulation)
    assert functions_that_read_in(trainer) <= ON_THE_HOST


@pytest.mark.parametrize("options", [{}, {"accumulation": 3}, {"loss_type": "dft"}])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_sft_trainer_logs_the_same(packed, options, tmp_path):
    late, at_once = (runs.log_of_sft_trainer(tmp_path, packed, own, **options) for own in (False, True))
    assert late == at_once
    assert late[0]["num_tokens"] > 0


def test_a_trainer_derived_from_sft_trainer(tmp_path):
    class Doubles(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    late = runs.log_of_sft_trainer(tmp_path, True, kind=Doubles)
    at_once = runs.log_of_sft_trainer(tmp_path, True, trls_own=True, kind=Doubles)
    assert late == at_once
    assert late[0]["loss"] != runs.log_of_sft_trainer(tmp_path, True)[0]["loss"]


def test_other_models_are_trained_by_trls_own_loss(tmp_path, monkeypatch):
    """One that was never patched, and one whose patch is undone, after trainers have been prepared."""
    runs.sft_trainer(tmp_path, packed=True, max_steps=1).train()
    monkeypatch.setattr(deferred_logging, "default_loss", None)
    undone = tiny_model("qwen3")
    patch_model(undone).undo()
    for model in (tiny_model("qwen3"), undone):
        runs.sft_trainer(tmp_path, packed=True, trained=model, max_steps=1).train()


def test_experts(tmp_path):
    """Their auxiliary loss is part of the loss, and of the log."""
    late, at_once = (
        runs.log_of_run(tmp_path, True, trls_own, arch="qwen3_moe", accumulation=3)
        for trls_own in (False, True)
    )
    assert late == at_once
    assert all(line["aux_loss"] > 0 for line in late if "loss" in line)


def test_several_processes(tmp_path):
    """The rows cannot be shared out evenly: TRL leaves some of the last micro-batch out of its metrics."""
    both = [
        {"packed": packed, "trls_own": trls_own, "accumulation": accumulation}
        for packed, accumulation in ((True, 1), (False, 2))
        for trls_own in (False, True)
    ]
    weight_by_weight = both[0] | {"flat": False}
    logs = runs.logs_on_two_processes(tmp_path, [*both, weight_by_weight])
    packed, packed_trl, padded, padded_trl, by_weight = logs
    assert packed == packed_trl
    assert padded == padded_trl
    assert packed != padded
    flat_losses, losses = ([line["loss"] for line in log if "loss" in line] for log in (packed, by_weight))
    assert flat_losses == pytest.approx(losses, rel=1e-5)  # the optimizer's buffer under DDP


@pytest.mark.parametrize("options", [{"loss_type": "dft"}, {"label_smoothing_factor": 0.1}])
def test_other_losses_are_trls(options, tmp_path):
    late, at_once = (runs.log_of_run(tmp_path, True, trls_own, **options) for trls_own in (False, True))
    assert late == at_once
    plain = runs.log_of_run(tmp_path, True, trls_own=False)
    assert late[0]["loss"] != plain[0]["loss"]
    assert late[0].keys() == plain[0].keys()


@pytest.mark.parametrize("ends", ["by its updates", "early"])
def test_what_was_computed_is_counted_at_a_save_and_at_the_end(ends, tmp_path, monkeypatch):
    """Elsewhere all processes would wait for each other."""
    steps, store = [], Trainer.store_flos

    def stored(trainer):
        steps.append(trainer.state.global_step)
        store(trainer)

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if ends == "early" and state.global_step == 3:
                control.should_training_stop = True

    monkeypatch.setattr(Trainer, "store_flos", stored)
    options = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    arguments = runs.config(tmp_path, True, **options)
    trainer = make_trainer(
        runs.model(), byte_tokenizer(), arguments, runs.rows(True), runs.rows(True, 50), [Stops()]
    )
    trainer.train()
    last = 3 if ends == "early" else 5
    assert set(steps) == {*range(2, last, 2), last}
    saved = TrainerState.load_from_json(str(tmp_path / "checkpoint-2" / "trainer_state.json"))
    assert trainer.current_flos == 0
    assert 0 < saved.total_flos < trainer.state.total_flos

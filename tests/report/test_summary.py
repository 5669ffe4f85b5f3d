"""The figures that end a run."""

import io
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest
from rich.console import Console
from tables import table

from unsloth_pack.cli.run_report import summarise
from unsloth_pack.data.token_counts import TokenLedger
from unsloth_pack.report import callbacks
from unsloth_pack.report.callbacks import ProgressCallback
from unsloth_pack.report.terminal import (
    RowFill,
    fill_line,
    fill_of_packed,
    fill_of_padded,
    ledger_line,
    loss_line,
    shortened,
)
from unsloth_pack.training.chips import Chips
from unsloth_pack.training.updates import TokenCounter


def test_padding_and_passes_count_in_no_speed():
    """Three passes over 40 documents in 2 seconds, a quarter of all slots padded."""
    fill = RowFill(rows=10, documents=40, tokens=200, slots=400, slots_computed=270)
    logged = [{"loss": 3.0}, {"eval_loss": 9.0}, {"loss": 2.5}, {"loss": 2.0}]
    trainer = SimpleNamespace(
        trained=TokenCounter(2.0, 600, 800, 500, model_flops=6 * 10**12, hardware_flops=8 * 10**12),
        state=SimpleNamespace(log_history=logged, global_step=7, epoch=3.0),
        nonfinite_updates=SimpleNamespace(left_out=1),
        counts=SimpleNamespace(broken_images=2, chips=Chips(1, 10e12)),
        args=SimpleNamespace(output_dir="out"),
    )
    summary = summarise(trainer, fill, None, [])
    assert (summary.tokens_per_second, summary.documents_per_second) == (300, 60)
    assert (summary.tokens_trained, summary.tokens_counted, summary.tokens_padded) == (600, 500, 200)
    assert (summary.first_loss, summary.last_loss) == (3.0, 2.0)
    assert (summary.tflops, summary.mfu, summary.hfu) == (3.0, 0.3, 0.4)
    assert (summary.steps, summary.epochs, summary.seconds) == (7, 3.0, 2.0)
    assert (summary.updates_left_out, summary.broken_images, summary.output_dir) == (1, 2, "out")


def test_slots_that_packed_and_padded_rows_have():
    columns = {"input_ids": [[1] * 6, [1] * 3], "seq_lengths": [[4, 2], [3]]}
    rows = datasets.Dataset.from_dict(columns)
    assert fill_of_packed(rows, 8) == RowFill(rows=2, documents=3, tokens=9, slots=16, slots_computed=9)
    padded = RowFill(rows=2, documents=2, tokens=9, slots=12, slots_computed=12)
    assert fill_of_padded(rows.remove_columns("seq_lengths"), 2, seed=0) == padded


def test_zeros_are_not_told():
    ledger = TokenLedger(9, 2_340_000, *(0,) * 6, tokens_counted=80, prompts_rerendered=0, longest=50, p99=40)
    fill = RowFill(rows=10, documents=40, tokens=390, slots=400, slots_computed=390)
    assert ledger_line(ledger) == "9 rows, 2.3 M tokens"
    assert loss_line(ledger) == "80 tokens"
    assert fill_line(fill) == "10 rows, 4.0 documents a row, 97.5% full"
    cut = replace(ledger, rows_fully_masked=1, tokens_masked_at_boundaries=7)  # a row without text
    assert ledger_line(cut).endswith("; dropped 0 tokens of 1 fully masked rows")
    assert loss_line(cut) == "80 tokens; without loss 7 at boundaries"
    assert fill_line(replace(fill, slots_computed=400)).endswith(", 10 tokens of padding")


@table(
    ("number", "shown"),
    [(999_999, "999,999"), (12_345_678, "12.3 M"), (70.6e9, "70.6 B"), (2e12, "2.0 T")],
)
def test_large_numbers_have_units(number, shown):
    assert shortened(number) == shown


@pytest.fixture
def progress(monkeypatch):
    """Makes updates of so many seconds, and returns the lines that are printed off a terminal."""

    def run(seconds, max_steps, logging_steps, from_step=0):
        now = [100.0]
        monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now[0]))
        printed, state = io.StringIO(), SimpleNamespace(max_steps=max_steps, global_step=from_step)
        callback = ProgressCallback(Console(file=printed, width=20), lambda _: None)
        control = SimpleNamespace(should_log=False)
        callback.on_train_begin(None, state, control)
        while state.global_step < max_steps:
            now[0] += seconds
            state.global_step += 1
            control.should_log = state.global_step % logging_steps == 0
            callback.on_step_end(None, state, control)
            if control.should_log:
                callback.on_log(None, state, control, {"loss": state.global_step / 2})
        return printed.getvalue().splitlines()

    return run


def test_progress_off_a_terminal(progress):
    assert progress(2.0, 100, 5)[1] == "update 10/100  loss 5.0000  0:00:20 elapsed, 0:03:00 left"
    assert len(progress(2.0, 456, 5)) == 18  # 456 / 20 updates, rounded up to a line of the log
    resumed = progress(2.0, 100, 5, from_step=90)
    assert resumed[0] == "update 95/100  loss 47.5000  0:00:10 elapsed, 0:00:10 left"
    assert resumed[-1] == "update 100/100  loss 50.0000  0:00:20 elapsed, 0:00:00 left"


def test_slow_updates_are_told_every_minute(progress):
    lines = progress(45.0, 100, 50)
    assert len(lines) == 50
    assert lines[0] == "update 2/100    0:01:30 elapsed, 1:13:30 left"
    assert lines[24] == "update 50/100  loss 25.0000  0:37:30 elapsed, 0:37:30 left"
    assert "update 4/100  loss 2.0000" in progress(45.0, 100, 1)[1]

"""The figures that end a run."""

from types import SimpleNamespace

import datasets

from unsloth_pack.cli.run_report import summarise
from unsloth_pack.report.terminal import RowFill, fill_of_packed, fill_of_padded
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

"""A run that goes on from a checkpoint keeps the lines up to it, and writes those behind it anew."""

import math

from unsloth_pack.report.callbacks import MetricsFile
from unsloth_pack.report.metrics import read_lines


def test_lines_of_later_updates_go(tmp_path):
    metrics = MetricsFile(tmp_path)
    metrics.write("config", options={"r": 1})
    metrics.write("data", use="train")
    for step in (1, 2, 3):
        metrics.write("log", step=step, loss=math.nan if step == 2 else 0.5)
        metrics.write("nonfinite", step=step)
    metrics.write("stopped", step=3)
    metrics.rewind(2)
    kept = [(line["kind"], line.get("step")) for line in read_lines(tmp_path)]
    of_updates = [(kind, step) for step in (1, 2) for kind in ("log", "nonfinite")]
    assert kept == [("config", None), ("data", None), *of_updates]
    assert [line["loss"] for line in read_lines(tmp_path) if "loss" in line] == [0.5, None]


def test_other_processes_write_nothing(tmp_path):
    metrics = MetricsFile(tmp_path, enabled=False)
    metrics.write("log", step=1)
    metrics.rewind(0)
    assert list(tmp_path.iterdir()) == []

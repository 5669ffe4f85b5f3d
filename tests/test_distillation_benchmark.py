"""The ruler for distillation: both kinds of steps run, in turns."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import distillation


def test_both_kinds_of_steps_are_timed():
    result = distillation.measure("tiny", 64, 2, 4, True)
    assert [len(seconds) for seconds in result["seconds"].values()] == [2, 2]
    assert result["ratio"] > 1

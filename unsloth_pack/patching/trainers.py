"""What trainers and PEFT do for patched models: all that patching changes outside a model."""

from typing import Any

from transformers.trainer import DEFAULT_CALLBACKS

from unsloth_pack.memory.spare import GiveBackSpareMemory
from unsloth_pack.patching.ahead import LoadsAhead
from unsloth_pack.patching.flat_updates import update_flat
from unsloth_pack.patching.kept_boundaries import KeepsBoundaries
from unsloth_pack.patching.late_lines import WritesLinesLate
from unsloth_pack.patching.late_metrics import ReadsMetricsLate
from unsloth_pack.patching.later_adapters import refuse_later_adapters
from unsloth_pack.patching.loss_filter import LogsEveryLoss


def prepare_trainers() -> None:
    """Give the callbacks for patched models to every trainer that is made from now on, and flat updates.

    PEFT refuses what no patched model can have.
    """
    update_flat()
    refuse_later_adapters()
    callbacks: Any = DEFAULT_CALLBACKS
    for callback in (
        GiveBackSpareMemory,
        KeepsBoundaries,
        LogsEveryLoss,
        ReadsMetricsLate,
        WritesLinesLate,
        LoadsAhead,
    ):
        if callback not in callbacks:
            callbacks.append(callback)

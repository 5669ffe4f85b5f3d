"""What trainers and PEFT do for patched models: all that patching changes outside a model."""

from typing import Any

from transformers.trainer import DEFAULT_CALLBACKS

from unsloth_pack.memory.spare import GiveBackSpareMemory
from unsloth_pack.patching.refusals import refuse_later_adapters
from unsloth_pack.patching.trainer_hooks.check_collator import CheckCollatorCallback
from unsloth_pack.patching.trainer_hooks.deferred_logging import (
    DeferredLoggingCallback,
    DeferredMetricsCallback,
    NanFilterCallback,
)
from unsloth_pack.patching.trainer_hooks.optimizer import update_flat
from unsloth_pack.patching.trainer_hooks.prefetch import PrefetchCallback


def prepare_trainers() -> None:
    """Give the callbacks for patched models to every trainer that is made from now on, and flat updates.

    PEFT refuses what no patched model can have.
    """
    update_flat()
    refuse_later_adapters()
    callbacks: Any = DEFAULT_CALLBACKS
    for callback in (
        GiveBackSpareMemory,
        CheckCollatorCallback,
        NanFilterCallback,
        DeferredMetricsCallback,
        DeferredLoggingCallback,
        PrefetchCallback,
    ):
        if callback not in callbacks:
            callbacks.append(callback)

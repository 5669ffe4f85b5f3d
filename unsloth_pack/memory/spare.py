"""GPU memory that training took for a moment goes back to the device when a trainer is done.

Torch keeps what its largest step needed. After `trainer.train()` a notebook merges, generates or starts
another process, which want that memory. A model does not learn that its trainer is done, so trainers have to
be told: this is the one thing that patching changes outside the model.
"""

from typing import Any

import torch
from torch import nn
from transformers.trainer import DEFAULT_CALLBACKS
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from unsloth_pack.forwards.decoder import FastDecoder


class GiveBackSpareMemory(TrainerCallback):
    """For trainers of patched models alone; others keep theirs."""

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        if not torch.cuda.is_initialized() or model is None:
            return
        if any(isinstance(module, FastDecoder) for module in model.modules()):
            torch.cuda.empty_cache()


def give_back_spare_memory() -> None:
    """Have every trainer that is made from now on do so."""
    callbacks: Any = DEFAULT_CALLBACKS
    if GiveBackSpareMemory not in callbacks:
        callbacks.append(GiveBackSpareMemory)

"""When a trainer is done, GPU memory that only training needed goes back to the device.

Torch keeps what its largest step needed. After `trainer.train()` a notebook merges, generates or starts
another process, all of which need that memory. A model is not told that its trainer is done, but callbacks
are.
"""

from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from unsloth_pack.layers.decoder import FastDecoder


class GiveBackSpareMemory(TrainerCallback):
    """Acts for trainers of patched models only."""

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

"""Release spare GPU memory at the end of training.

Torch keeps the memory of its largest step, which a notebook then needs to merge, generate or start another
process. Only callbacks learn that a trainer is done.
"""

from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.layers.decoder import has_fast_decoder


class GiveBackSpareMemory(TrainerCallback):
    """Empty torch's cache after the training of a patched model."""

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        if torch.cuda.is_initialized() and has_fast_decoder(model):
            torch.cuda.empty_cache()

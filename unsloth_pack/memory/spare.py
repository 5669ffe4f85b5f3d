"""Give GPU memory back to the device when training ends.

Torch keeps what its largest step needed. After `trainer.train()` a notebook merges, generates or starts
another process, all of which need that memory.
"""

from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback

from unsloth_pack.layers.decoder import has_fast_decoder


class GiveBackSpareMemory(TrainerCallback):
    """Empty torch's cache when the training of a patched model ends."""

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
    ) -> None:
        if torch.cuda.is_initialized() and has_fast_decoder(model):
            torch.cuda.empty_cache()

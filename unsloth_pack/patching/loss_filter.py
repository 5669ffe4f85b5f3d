"""Trainers of patched models do not wait for the GPU to look at the loss of each step.

`logging_nan_inf_filter`, on by default, reads the loss on the host right after the backward pass is launched,
to leave losses that are not finite out of the logs. Clipping and the optimizer are launched only then, and
the GPU waits for them. Off, such a loss is logged as it is.
"""

from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from unsloth_pack.forwards.decoder import FastDecoder


class LogsEveryLoss(TrainerCallback):
    """Switches the filter off while a patched model trains on a GPU, and back on when training ends."""

    def __init__(self) -> None:
        self._was_on = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        decoders = [] if model is None else [m for m in model.modules() if isinstance(m, FastDecoder)]
        if any(map(_is_on_gpu, decoders)):
            self._was_on |= args.logging_nan_inf_filter  # still so after training that ended in an error
            args.logging_nan_inf_filter = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._was_on:
            self._was_on, args.logging_nan_inf_filter = False, True


def _is_on_gpu(decoder: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in decoder.parameters())

"""Losses that see a row through another model first: a teacher, or the reference of a preference.

inputs   = StepInputs(model, call, labelled)      before the decoder runs
loss_of  = training_loss.prepare(inputs)          runs the other model on them
loss     = loss_of(labelled, hidden, ...)         after it, as any `Loss`
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from unsloth_pack.errors import InputError
from unsloth_pack.losses.head import LabelledHead, Loss, read_head, why_head_not_fused
from unsloth_pack.modules import evaluation_mode


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step before its decoder runs."""

    model: Any  # the patched causal language model that trains
    call: Any  # its `ForwardCall`
    labelled: LabelledHead

    def run(self, model: Any) -> tuple[LabelledHead, Tensor]:
        """Run a patched model on them without gradients and dropout: its head, and hidden states
        `[B, T, C]` that predict the token behind each.

        It may be the model that trains, inside a context that changes its weights. Images that nothing
        trained encodes are then encoded once.
        """
        if why := why_head_not_fused(model):
            raise InputError(f"a loss needs the head of a teacher or reference: {why}; take another")
        if model is self.model:
            model.encode_once(self.call)
        elif self.call.images is not None and getattr(model, "vision_spec", None) != self.model.vision_spec:
            raise InputError(
                "a row has images, and the teacher takes other ones or none; take another teacher"
            )
        inputs = self.call.inputs | {"use_cache": False}
        call = replace(self.call, inputs=inputs, rest=dict(self.call.rest))
        with torch.no_grad(), evaluation_mode(model):
            head = read_head(model)
            hidden_BTC = call.before_next_token(model.run_decoder(call).last_hidden_state)
            return self.labelled.with_head(head), hidden_BTC


@runtime_checkable
class PreparedLoss(Protocol):
    """A `training_loss` that is prepared before the decoder runs. It is the loss of evaluation too."""

    def prepare(self, inputs: StepInputs) -> Loss:
        """Return the loss of this step."""

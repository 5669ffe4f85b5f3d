"""Compute the loss of a training step with the language-model head instead of from its logits.

Shapes: B rows of T tokens, C features, V outputs of the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from unsloth_pack.errors import InputError
from unsloth_pack.losses.contract import Head, LabelledHead
from unsloth_pack.packed_row.row import PackedRow


def cross_entropy(
    labelled: LabelledHead, hidden_BTC: Tensor, row: PackedRow | None, num_items: Tensor | float | None
) -> Tensor:
    """Average over labels, or sum and divide by `num_items`: a `Loss`."""
    return labelled.cross_entropy(hidden_BTC, num_items)


def loss_output(
    loss: Tensor, head: Head, decoded: Any, watch_logits: Callable[[Tensor], None]
) -> "LossOutput":
    """Build a model's output with a loss, without logits; `watch_logits` gets them once they are read."""
    hidden_BTC, weight = decoded.last_hidden_state, head.weight
    version = weight._version

    def make_logits() -> Tensor:
        if weight._version != version:
            raise InputError("logits are asked for after the head has changed; ask before optimizer.step()")
        with torch.enable_grad():
            logits_BTV = head.logits(hidden_BTC)
        watch_logits(logits_BTV)
        return logits_BTV

    lazy: Any = _LazyLogits(make_logits)
    return LossOutput(
        loss=loss,
        logits=lazy,
        past_key_values=decoded.past_key_values,
        hidden_states=decoded.hidden_states,
        attentions=decoded.attentions,
    )


@dataclass(frozen=True)
class _LazyLogits:
    """The placeholder in an output for logits that were not read yet."""

    make: Callable[[], Tensor]


@dataclass
class LossOutput(MoeCausalLMOutputWithPast):
    """A model's output whose `logits` are computed when first read: most steps never do.

    They are there by name, key and place, as transformers' are. `values()` and `items()`, by which wrappers
    rebuild an output, pass on the placeholder.
    """

    @property  # type: ignore[misc]  # in place of a field
    def logits(self) -> Tensor | None:
        logits = self.__dict__.get("logits")
        if isinstance(logits, _LazyLogits):
            logits = self.logits = logits.make()
        return logits

    @logits.setter
    def logits(self, value: Any) -> None:
        self.__dict__["logits"] = value

    def __getitem__(self, key: Any) -> Any:
        return self.logits if key == "logits" else super().__getitem__(key)

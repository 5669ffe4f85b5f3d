"""Define what a loss gets: the head, the labels and the hidden states of a step, never all logits.

    labelled = LabelledHead(head, labels)           before the decoder runs
    hidden   = decoder(...)
    scores   = labelled.scores(hidden, ...)         log-probability, entropy, ... of every label
    loss     = labelled.cross_entropy(hidden, ...)  or their sum, for less memory

Shapes: B rows of T tokens, C features, V outputs of the head.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from unsloth_pack.kernels import ExtraLogits, LabelledRows, TokenScores, linear_cross_entropy, token_scores
from unsloth_pack.kernels.arguments import Field
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow

LOSS_KEYWORDS = ("num_items_in_batch", "shift_labels", "ignore_index")  # of a model's call


@dataclass(frozen=True)
class Head:
    """A language-model head: z = (W x + b) / divisor, or softcap * tanh(z / softcap) with a softcap."""

    module: Callable[[Tensor], Tensor]  # computes W x + b; it may be a wrapper of PEFT's
    weight: Tensor  # W `[V, C]`
    bias: Tensor | None = None  # b `[V]`, or None
    divisor: float = 1.0
    softcap: float | None = None
    # what an adapter or trained tokens change in W x + b, for x `[..., C]`; None without them
    extra: Callable[[Tensor], ExtraLogits] | None = None

    def at_temperature(self, temperature: float) -> "Head":
        """Return the head whose logits are divided by `temperature`."""
        softcap = None if self.softcap is None else self.softcap / temperature
        return replace(self, divisor=self.divisor * temperature, softcap=softcap)

    def logits(self, hidden_BTC: Tensor) -> Tensor:
        """Compute `[B, T, V]` as transformers does."""
        return self.scaled(self.module(hidden_BTC.to(self.weight.dtype)))

    def scaled(self, logits_BTV: Tensor) -> Tensor:
        """Divide and cap the output of the linear layer."""
        if self.divisor != 1:
            logits_BTV = logits_BTV / self.divisor
        return logits_BTV if self.softcap is None else (logits_BTV / self.softcap).tanh() * self.softcap


class LabelledHead:
    """The head of one step with the labels of its row.

    Build it before the decoder runs: it then asks the device how many tokens have a label, and a loss reads
    the answer later, see `LabelledRows`.

    Args:
        labels: `[B, T]`, shifted: a token's label is that of the token after it. No label stands where none
            may be seen.
        ignore_index: marks tokens without a label.
    """

    def __init__(self, head: Head, labels: Tensor, ignore_index: int = IGNORE_INDEX):
        self.head = head
        labels = labels.to(head.weight.device)
        self.mask = labels != ignore_index
        self._labelled = LabelledRows(labels, ignore_index)

    def scores(self, hidden_BTC: Tensor, fields: Collection[Field] = ()) -> TokenScores:
        """Score each label, `[B, T]`: its log-probability, differentiable, and what `fields` name."""
        hidden, options = self._prepare(hidden_BTC)
        return token_scores(hidden, self.head.weight, self._labelled, **options, fields=fields)

    def cross_entropy(self, hidden_BTC: Tensor, num_items: Tensor | float | None) -> Tensor:
        """Sum minus the log-probabilities, over `num_items` or else over the number of labels."""
        hidden, options = self._prepare(hidden_BTC)
        return linear_cross_entropy(hidden, self.head.weight, self._labelled, **options, num_items=num_items)

    def _prepare(self, hidden_BTC: Tensor) -> tuple[Tensor, dict[str, Any]]:
        head = self.head
        hidden_BTC = hidden_BTC.to(head.weight.device)
        if not torch.is_autocast_enabled(hidden_BTC.device.type):
            hidden_BTC = hidden_BTC.to(head.weight.dtype)  # a trained head may be float32
        options = {"bias": head.bias, "softcap": head.softcap, "scale": 1 / head.divisor}
        return hidden_BTC, options | {"extra": None if head.extra is None else head.extra(hidden_BTC)}


class Loss(Protocol):
    """The loss of a training step, as a patched model computes it: `model.training_loss`."""

    def __call__(
        self,
        labelled: LabelledHead,
        hidden_BTC: Tensor,
        row: PackedRow | None,
        num_items: Tensor | float | None,
    ) -> Tensor:
        """Compute the loss, a number.

        Args:
            labelled: the head and the labels.
            hidden_BTC: the decoder's last hidden state.
            row: which tokens form a document; None for an ordinary batch.
            num_items: labels of the whole update, if a trainer has counted them.
        """
        ...

"""The loss of a training step, computed with the language-model head instead of from its logits.

Shapes: B rows of T tokens, C features, V outputs of the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from unsloth_pack.errors import InputError
from unsloth_pack.kernels import LabelledRows, linear_cross_entropy
from unsloth_pack.lora.layers import GATHERED_BY_MODULE, is_gathered_by_module
from unsloth_pack.models.spec import ArchSpec
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.row.packed_row import IGNORE_INDEX

# Of a model's call, for its loss alone.
LOSS_KEYWORDS = ("num_items_in_batch", "shift_labels", "ignore_index")


def why_loss_not_fused(model: Any) -> str | None:
    """Why the loss of a causal language model must come from its logits, or None."""
    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        return "the head has an adapter"
    if hasattr(head, "_is_fsdp_managed_module"):  # FSDP looks for tensors in every field of an output
        return "FSDP shards the head"
    if type(head) is not nn.Linear:  # wrapped by modules_to_save, quantised
        return f"the head is a {type(head).__name__}"
    if is_gathered_by_module(head.weight):
        return GATHERED_BY_MODULE
    if has_hooks(head):
        return "the head has hooks"
    if model.loss_function is not ForCausalLMLoss:
        return "the model has a loss function of its own"
    return None


def wants_loss_alone(model: Any, logits_to_keep: int | Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether a call with labels is a training step whose loss can be fused."""

    def asked(name: str) -> Any:
        value = kwargs.get(name)
        return getattr(model.config, name, None) if value is None else value

    if not (model.training and torch.is_grad_enabled()) or asked("return_dict") is False:
        return False
    keeps_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
    return keeps_all and not asked("output_router_logits") and why_loss_not_fused(model) is None


class FusedLoss:
    """The loss of one step. Made before the decoder runs, see `LabelledRows`.

    Args:
        model: a causal language model for which `why_loss_not_fused` finds nothing.
        labels: `[B, T]`; a token's label is that of the token after it.
        kwargs: of the model's call. What `ForCausalLMLoss` reads is taken out: `num_items_in_batch`, by
            which the sum is divided instead of by the number of labels; `shift_labels`, `[B, T]`, in place of
            labels; `ignore_index`.
    """

    def __init__(self, model: Any, labels: Tensor, kwargs: dict[str, Any]):
        ignored = kwargs.pop("ignore_index", IGNORE_INDEX)
        shifted = kwargs.pop("shift_labels", None)
        self._num_items = kwargs.pop("num_items_in_batch", None)
        self._model = model
        self._head = model.get_output_embeddings()
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        self._labelled = LabelledRows(shifted.to(self._head.weight.device), ignored)

    def output(self, decoded: Any) -> "LossOutput":
        """The model's output for that of its decoder."""
        hidden_BTC = decoded.last_hidden_state
        spec, config = self._model.spec, self._model.config
        loss = linear_cross_entropy(
            hidden_BTC,
            self._head.weight,
            self._labelled,
            bias=self._head.bias,
            softcap=spec.softcap_of_logits(config),
            scale=1 / spec.divisor_of_logits(config),
            num_items=self._num_items,
        )
        if loss.requires_grad:
            loss.register_hook(_refuse_second_derivative)
        weight, version = self._head.weight, self._head.weight._version

        def make_logits() -> Tensor:
            if weight._version != version:
                raise InputError(
                    "logits are asked for after the head has changed; ask before optimizer.step()"
                )
            return logits_of(hidden_BTC, self._head, spec, config)

        return LossOutput(
            loss=loss,
            logits=_Unmade(make_logits),
            past_key_values=decoded.past_key_values,
            hidden_states=decoded.hidden_states,
            attentions=decoded.attentions,
        )


def logits_of(hidden_BTC: Tensor, head: nn.Linear, spec: ArchSpec, config: Any) -> Tensor:
    """`[B, T, V]`, with a gradient, as transformers' own forward makes them."""
    with torch.enable_grad():
        logits_BTV = head(hidden_BTC.to(head.weight.dtype))
        logits_BTV = logits_BTV / spec.divisor_of_logits(config)
        softcap = spec.softcap_of_logits(config)
        return logits_BTV if softcap is None else torch.tanh(logits_BTV / softcap) * softcap


def _refuse_second_derivative(grad: Tensor) -> None:
    """torch's `once_differentiable` lets a loss through whose own gradient is a constant, and drops terms."""
    if torch.is_grad_enabled():
        raise InputError("create_graph=True: a fused loss has no second derivative; undo the patch")


@dataclass(frozen=True)
class _Unmade:
    """Stands in an output for logits that nobody has asked for."""

    make: Callable[[], Tensor]


@dataclass
class LossOutput(MoeCausalLMOutputWithPast):
    """A model's output whose `logits` are computed when they are first asked for: most steps never do.

    By name, key or place, they are there, as transformers' are; `values()` and `items()`, by which wrappers
    rebuild an output, hand on what stands for them.
    """

    @property
    def logits(self) -> Tensor | None:
        held = self.__dict__.get("logits")
        if isinstance(held, _Unmade):
            held = self.logits = held.make()
        return held

    @logits.setter
    def logits(self, value: Any) -> None:
        self.__dict__["logits"] = value

    def __getitem__(self, key: Any) -> Any:
        return self.logits if key == "logits" else super().__getitem__(key)

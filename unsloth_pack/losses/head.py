"""The loss of a training step, from the language-model head and hidden states, never from all logits.

    labelled = LabelledHead(head, labels)           before the decoder runs
    hidden   = decoder(...)
    scores   = labelled.scores(hidden, ...)         log-probability, entropy, ... of every label
    loss     = labelled.cross_entropy(hidden, ...)  or their sum, for less memory

TRL's trainers ask a model for scores of tokens instead of logits. They call `add_fused_lm_head(model,
temperature, cast_lm_head_to_fp32, outputs)`, which sets a `forward` on the model that runs the decoder by
itself and scores the tokens in chunks. Its calls read

    model(..., labels=labels, fused_lm_head=True) -> log_probs, entropy, is_top1, ... of every token

What the kernel cannot do as TRL does it (a head in float32) goes through TRL's own forward.

Shapes: B rows of T tokens, C features, V outputs of the head.
"""

import copy
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import ModelOutput, MoeCausalLMOutputWithPast

from unsloth_pack.errors import InputError
from unsloth_pack.kernels import (
    ExtraLogits,
    LabelledRows,
    TokenScores,
    linear_cross_entropy,
    token_scores,
)
from unsloth_pack.kernels.arguments import Field
from unsloth_pack.lora.linear import why_not_fused
from unsloth_pack.modules import GATHERED_BY_MODULE, has_hooks, is_gathered_by_module, is_managed_by_fsdp
from unsloth_pack.packed_row.row import IGNORE_INDEX, PackedRow

T = TypeVar("T")
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
        return self.call(token_scores, hidden_BTC, fields=fields)

    def cross_entropy(self, hidden_BTC: Tensor, num_items: Tensor | float | None) -> Tensor:
        """Sum minus the log-probabilities, over `num_items` or else over the number of labels."""
        return self.call(linear_cross_entropy, hidden_BTC, num_items=num_items)

    def with_head(self, head: Head) -> "LabelledHead":
        """Return another model's head with the same labels."""
        other = copy.copy(self)
        other.head = head
        return other

    def call(self, kernel: Callable[..., T], hidden_BTC: Tensor, **options: object) -> T:
        """Call a kernel that takes hidden states, a head and labels."""
        head = self.head
        hidden_BTC = hidden_BTC.to(head.weight.device)
        if not torch.is_autocast_enabled(hidden_BTC.device.type):
            hidden_BTC = hidden_BTC.to(head.weight.dtype)  # a trained head may be float32
        of_head = {"bias": head.bias, "softcap": head.softcap, "scale": 1 / head.divisor}
        extra = None if head.extra is None else head.extra(hidden_BTC)
        return kernel(hidden_BTC, head.weight, self._labelled, **of_head, extra=extra, **options)


# `model.training_loss(labelled, hidden_BTC, row, num_items)`: the loss of a training step, a number, from the
# head and labels, the decoder's last hidden state, the documents (None for an ordinary batch), and the number
# of labels in the whole update, if a trainer has counted them
Loss = Callable[[LabelledHead, Tensor, PackedRow | None, Tensor | float | None], Tensor]


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

    return LossOutput(
        loss=loss,
        logits=make_logits,  # type: ignore[arg-type]  # read as a tensor
        past_key_values=decoded.past_key_values,
        hidden_states=decoded.hidden_states,
        attentions=decoded.attentions,
    )


@dataclass
class LossOutput(MoeCausalLMOutputWithPast):
    """A model's output whose `logits` are computed when first read: most steps never do.

    They are there by name, key and place, as transformers' are. `values()` and `items()`, by which wrappers
    rebuild an output, pass on the function that computes them.
    """

    @property  # type: ignore[misc]  # in place of a field
    def logits(self) -> Tensor | None:
        logits = self.__dict__.get("logits")
        if callable(logits):
            logits = self.logits = logits()
        return logits

    @logits.setter
    def logits(self, value: Tensor | Callable[[], Tensor] | None) -> None:
        self.__dict__["logits"] = value

    def __getitem__(self, key: object) -> Any:
        return self.logits if key == "logits" else super().__getitem__(key)  # type: ignore[no-untyped-call]


def read_head(model: Any) -> Head:
    """Read the head of a patched causal language model for which `why_head_not_fused` returns None."""
    module = model.get_output_embeddings()
    linear, extra = _unwrap(module)
    return Head(module, linear.weight, linear.bias, model.logit_divisor, model.logit_softcap, extra)


def count_head_outputs(model: Any) -> int | None:
    """Return how many logits the head computes for a token, or None if a wrapper hides it."""
    head = model.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):
        # From a tied head PEFT 0.21 makes a layer whose in_features and out_features are exchanged
        return len(head.weight)
    if isinstance(head, TrainableTokensWrapper):
        head = head.token_adapter.base_layer
    return getattr(head, "out_features", None)


def why_head_not_fused(model: Any) -> str | None:
    """Return why a model's head must compute logits, or None."""
    head = model.get_output_embeddings()
    linear, _ = _unwrap(head)
    if is_managed_by_fsdp(head):  # FSDP looks for tensors in every field of an output
        return "FSDP shards the head"
    if why := _why_wrapper_not_fused(head):
        return why
    if type(linear) is not nn.Linear:  # quantised, or wrapped in another way
        return f"the head is a {type(linear).__name__}"
    if any(map(is_gathered_by_module, head.parameters())):
        return GATHERED_BY_MODULE
    if has_hooks(head, linear):
        return "the head has hooks"
    return None


def refuse_ignored_adapter(model: Any, why_not: str) -> None:
    """Refuse a head with an adapter that TRL's own loss would ignore: it reads the weight alone."""
    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer) and not (head.disable_adapters or head.merged):
        remedy = "leave lm_head out of target_modules"
        raise InputError(f"the head has an adapter, which TRL's loss ignores here ({why_not}); {remedy}")


def why_loss_not_fused(model: Any) -> str | None:
    """Return why a causal language model's own loss must come from its logits, or None."""
    own = "the model has a loss function of its own" if has_own_loss(model) else None
    return why_head_not_fused(model) or own


def has_own_loss(model: nn.Module) -> bool:
    """Return whether a model computes another loss than transformers' causal language models."""
    return model.loss_function is not ForCausalLMLoss


def _unwrap(head: object) -> tuple[Any, Callable[[Tensor], ExtraLogits] | None]:
    """Return the linear layer inside PEFT's wrapper, and what is added to its outputs or replaces them."""
    if isinstance(head, ModulesToSaveWrapper):
        is_off = head.disable_adapters or not head.active_adapters
        return (head.original_module if is_off else head.modules_to_save[head.active_adapters[0]]), None
    if isinstance(head, TrainableTokensWrapper):
        head = head.token_adapter
    if isinstance(head, TrainableTokensLayer):
        names = [] if head.disable_adapters or head.merged else head.active_adapters
        return head.base_layer, partial(_trained_token_logits, head, names) if names else None
    if isinstance(head, LoraLinear):
        is_off = head.disable_adapters or head.merged
        return head.base_layer, None if is_off else partial(_lora_logits, head)
    return head, None


def _why_wrapper_not_fused(head: Any) -> str | None:
    layer = head.token_adapter if isinstance(head, TrainableTokensWrapper) else head
    if isinstance(layer, TrainableTokensLayer):
        if layer.base_layer.bias is not None:  # PEFT ignores it
            return "tokens of a head with a bias are trained"
        return "several adapters train tokens of the head" if len(layer.active_adapters) > 1 else None
    if not isinstance(head, LoraLinear) or layer.disable_adapters or layer.merged:
        return None
    if why := why_not_fused(layer):
        return f"the head has an adapter: {why}"
    (name,) = layer.active_adapters
    if getattr(layer.lora_dropout[name], "p", 0):
        return "the head has an adapter: LoRA dropout"
    return "the head has an adapter: its bias is trained" if layer.lora_B[name].bias is not None else None


def _trained_token_logits(layer: TrainableTokensLayer, names: list[str], x: Tensor) -> ExtraLogits:
    (name,) = names
    outputs = torch.tensor(layer.token_indices[name])
    if x.is_cuda:  # from pinned memory, so that nothing waits
        outputs = outputs.pin_memory().to(x.device, non_blocking=True)
    trained = layer.trainable_tokens_delta[name].to(layer.base_layer.weight.dtype)
    return ExtraLogits(F.linear(x, trained), outputs=outputs)


def _lora_logits(layer: Any, x: Tensor) -> ExtraLogits:
    (name,) = layer.active_adapters
    lora_a, lora_b = layer.lora_A[name].weight, layer.lora_B[name].weight
    dtype = layer.base_layer.weight.dtype
    return ExtraLogits(F.linear(x, lora_a.to(dtype)) * layer.scaling[name], b=lora_b.to(dtype))


_TRL_MODULE = "trl.trainer.utils"
_FIELDS: dict[str, Field] = {  # TRL's names to the kernel's
    "entropy": "entropy",
    "is_top1": "is_top1",
    "mean_logits": "mean_logit",
    "log_sum_sq_probs": "log_sum_sq_probs",
}


@dataclass(frozen=True)
class TrlHead:
    """A trainer's request by `add_fused_lm_head`."""

    forward: MethodType  # TRL's own, bound to the model
    temperature: float  # divides the logits
    fields: tuple[str, ...]  # the requested scores beside the log-probability, by TRL's names
    why_not: str | None  # why only TRL's forward can answer, or None

    @classmethod
    def from_forward(cls, forward: Any) -> "TrlHead | None":
        """Read the settings of a forward that `add_fused_lm_head` made; return None for any other."""
        function = getattr(forward, "__func__", None)
        if function is None or getattr(function, "__globals__", {}).get("__name__") != _TRL_MODULE:
            return None
        settings = inspect.getclosurevars(function).nonlocals
        fields = tuple(name for name in settings["outputs"] if name != "log_probs")
        why_not = "the head computes in float32" if settings["cast_lm_head_to_fp32"] else None
        return cls(forward, settings["temperature"], fields, why_not)

    def score(self, labelled: LabelledHead, hidden_BTC: Tensor) -> TokenScores:
        """Return `[B, T]` of every requested score."""
        return labelled.scores(hidden_BTC, [_FIELDS[name] for name in self.fields])

    def build_output(
        self,
        scores: TokenScores,
        mask: Tensor,
        num_items: Tensor | float | None,
        aux_loss: Tensor | None,
        aux_weight: float,
    ) -> ModelOutput:
        """Build TRL's output from scores `[B, T']`, T - 1 where TRL has not shifted the labels by itself."""
        divisor = mask.sum().clamp(min=1) if num_items is None else num_items
        loss: Tensor = -scores.log_prob.sum() / divisor
        if aux_loss is not None:
            loss = loss + aux_weight * aux_loss
        output_class = self.forward.__func__.__globals__["FusedCausalLMOutput"]
        named = {name: getattr(scores, _FIELDS[name]) for name in self.fields}
        output: ModelOutput = output_class(
            loss=loss, log_probs=scores.log_prob, label_mask=mask, aux_loss=aux_loss, **named
        )
        return output


def first_tokens(scores: TokenScores, n_tokens: int) -> TokenScores:
    """Return the scores of the first `n_tokens` of every row."""
    log_prob, *others = scores
    return TokenScores(log_prob[:, :n_tokens], *(None if x is None else x[:, :n_tokens] for x in others))

"""Answer TRL's trainers, which ask a model for scores of tokens instead of logits.

A trainer calls `add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs)`, which sets a `forward`
on the model that runs the decoder by itself and scores the tokens in chunks. Its calls read

    model(..., labels=labels, fused_lm_head=True) -> log_probs, entropy, is_top1, ... of every token

What the kernel cannot do as TRL does it (a head in float32) goes through TRL's own forward.
"""

import inspect
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from unsloth_pack.kernels import TokenScores
from unsloth_pack.kernels.arguments import Field
from unsloth_pack.losses.contract import LabelledHead

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
        try:
            temperature, outputs = settings["temperature"], settings["outputs"]
            in_float32 = settings["cast_lm_head_to_fp32"]
        except KeyError as missing:
            return cls(forward, 1.0, (), f"this TRL has no setting {missing}")
        fields = tuple(name for name in outputs if name != "log_probs")
        if unknown := set(fields) - _FIELDS.keys():
            return cls(forward, temperature, fields, f"this TRL asks for {', '.join(sorted(unknown))}")
        return cls(forward, temperature, fields, "the head computes in float32" if in_float32 else None)

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
    ) -> Any:
        """Build TRL's output from these scores.

        Args:
            scores: `[B, T']`, T - 1 where TRL has not shifted the labels by itself.
            mask: `[B, T']`, which tokens have a label.
            num_items: divides the loss, in place of the number of labels; or None.
            aux_loss: of routed experts, weighted by `aux_weight` in the loss.
        """
        divisor: Any = mask.sum().clamp(min=1) if num_items is None else num_items
        loss: Tensor = -scores.log_prob.sum() / divisor
        if aux_loss is not None:
            loss = loss + aux_weight * aux_loss
        output_class = self.forward.__func__.__globals__["FusedCausalLMOutput"]
        named = {name: getattr(scores, _FIELDS[name]) for name in self.fields}
        return output_class(loss=loss, log_probs=scores.log_prob, label_mask=mask, aux_loss=aux_loss, **named)


def load_balancing_loss(
    router_logits: Any, text_config: Any, token_mask: Tensor | None, device: torch.device
) -> Tensor:
    """Compute the auxiliary loss of routed experts as transformers does for every family.

    `router_logits` are those of every layer with experts, `[tokens, experts]` each; `token_mask` is `[B, T]`,
    0 on padding.
    """
    n_experts = getattr(text_config, "num_experts", None) or text_config.num_local_experts
    loss = load_balancing_loss_func(router_logits, n_experts, text_config.num_experts_per_tok, token_mask)
    return torch.as_tensor(loss, device=device)  # transformers gives 0 for no layers


def first_tokens(scores: TokenScores, n_tokens: int) -> TokenScores:
    """Return the scores of the first `n_tokens` of every row."""
    log_prob, *others = scores
    return TokenScores(log_prob[:, :n_tokens], *(None if x is None else x[:, :n_tokens] for x in others))

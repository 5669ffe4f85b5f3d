"""The forward of decoder layers that norm what goes into their mixer and into their MLP.

Some 70 decoder layers in transformers have the same forward, Llama's, word for word. They run fused: a
residual is added and normed in one launch. Any other layer keeps transformers' own forward.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from unsloth_pack.forwards.norm import FastRMSNorm
from unsloth_pack.modules.eager import runs_eagerly
from unsloth_pack.modules.hooks import has_hooks
from unsloth_pack.modules.sharding import is_gathered_by_module


class FastLayer(nn.Module):
    """Takes the place of the class of a decoder layer for which `is_plain` is true."""

    input_layernorm: Any
    self_attn: nn.Module
    post_attention_layernorm: Any
    mlp: nn.Module

    @runs_eagerly
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """`[B, T, C]` through the layer; of a packed row fused, with the results of `_plain_forward`.

        Args:
            kwargs: as transformers' layer takes them, and `packed_row`.
        """
        before, between = self.input_layernorm, self.post_attention_layernorm
        if args or kwargs.get("packed_row") is None or not (_runs_fused(before) and _runs_fused(between)):
            return super().forward(hidden_states, *args, **kwargs)
        residual, normed = before.of_sum(hidden_states, None)
        mixed, _ = self.self_attn(hidden_states=normed, **kwargs)
        residual, normed = between.of_sum(residual, mixed)
        return residual + self.mlp(normed)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer's forward is `_plain_forward`, instruction for instruction."""
    forward: Any = inspect.unwrap(type(layer).forward)
    return "forward" not in vars(layer) and _instructions(forward) == _instructions(_plain_forward)


def _runs_fused(norm: nn.Module) -> bool:
    return isinstance(norm, FastRMSNorm) and not (has_hooks(norm) or is_gathered_by_module(norm.weight))


def _instructions(function: Any) -> tuple[Any, ...]:
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    constants = tuple(constant for constant in code.co_consts if constant != function.__doc__)
    return code.co_code, code.co_names, code.co_varnames, constants, function.__defaults__


def _plain_forward(
    self: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    use_cache: Any = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states  # noqa: RET504 - as there: the instructions are compared
